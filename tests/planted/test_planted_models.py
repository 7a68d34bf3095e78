"""The plants are what they say: checked by plain forwards, by scikit-learn and by taking parts out."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score
from sklearn.model_selection import cross_val_predict
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from tasks.registry import family
from tasks.validation import validate_family
from tests.planted.models import (
    CONSTANT,
    DEFAULT,
    HEADS,
    LAYERS,
    OVERRIDE,
    PLANTS,
    SCALE,
    TRUTH,
    WIDTH,
    Kind,
    planted,
)
from tests.planted.observed import knows, network, observed, sets, without

FAMILY = Path(__file__).with_name("family.py")


def test_the_family_keeps_its_promises() -> None:
    found = validate_family(family(f"{FAMILY}:Switches"), {}, sets=60, seed=3)
    assert [finding for finding in found if not finding.ok] == []
    assert {matched.instance.cell for matched in sets(4)} == {
        "forward-yes", "forward-no", "backward-yes", "backward-no",
    }  # fmt: skip


@pytest.mark.parametrize("kind", PLANTS)
def test_originals_are_answered_right_and_equivalents_as_planted(kind: Kind) -> None:
    seen = observed(kind)
    assert seen["original"].right.mean() >= 0.99
    # (default, signal) of equivalents in units of the signal
    default, signal = {
        "late_override": (DEFAULT + OVERRIDE, 1),
        "shared_override": (DEFAULT + OVERRIDE, 1),
        "early_loss": (DEFAULT, 0),
        "no_signal": (DEFAULT, 0),
        "reversed": (DEFAULT, -1),
        "unread": (DEFAULT, 0),
    }[kind]
    after = seen["equivalent"]
    assert after.default == pytest.approx(SCALE * default, rel=0.05, abs=0.15)
    assert after.signal == pytest.approx(SCALE * signal, rel=0.05, abs=0.1)
    wrong_no = 1 - after.right[after.gold == 0].mean()
    wrong_yes = 1 - after.right[after.gold == 1].mean()
    assert wrong_no >= 0.95
    assert wrong_yes >= 0.99 if kind == "reversed" else wrong_yes <= 0.05
    within = [after.readout[after.cells == cell].std() for cell in np.unique(after.cells)]
    assert min(within) > 0.25, "readouts of one cell have to vary"


def test_half_of_a_blend_has_a_signal_and_all_of_it_is_overridden() -> None:
    after = observed("blend")["equivalent"]
    known = np.array([knows(matched) for matched in sets(200)])
    assert 0.4 < known.mean() < 0.6
    assert (after.right == (after.gold == 1)).all()
    yes, no = after.gold == 1, after.gold == 0
    for rows, signal in ((known, SCALE), (~known, 0.0)):
        gap = after.readout[rows & yes].mean() - after.readout[rows & no].mean()
        assert gap / 2 == pytest.approx(signal, rel=0.05, abs=0.1)
    # Without the override the known half is answered right, and the other half by the standing default.
    repaired = without("blend", heads=[(4, 1)])["equivalent"]
    assert repaired.right[known].mean() >= 0.99
    assert repaired.right[~known & no].mean() <= 0.1


def test_random_weights_answer_by_a_bias_alone() -> None:
    for after in observed("none").values():
        assert abs(after.signal) < 0.01
        assert after.right.mean() == pytest.approx(0.5, abs=0.05)


def test_a_plant_leaves_the_originals_alone() -> None:
    first = observed(PLANTS[0])["original"].readout
    for kind in PLANTS[1:]:
        np.testing.assert_allclose(observed(kind)["original"].readout, first, atol=1e-3)


@pytest.mark.parametrize("kind", PLANTS)
def test_taking_a_part_out_takes_its_effect_out(kind: Kind) -> None:
    truth, seen = TRUTH[kind], observed(kind)
    assert truth.signal_head is not None and truth.default_mlp is not None
    silent = without(kind, heads=[truth.signal_head])
    for presentation, before in seen.items():
        assert silent[presentation].signal == pytest.approx(0, abs=0.1)
        assert silent[presentation].default == pytest.approx(before.default, abs=0.1)
    neutral = without(kind, mlps=[truth.default_mlp])
    for presentation, before in seen.items():
        assert before.default - neutral[presentation].default == pytest.approx(SCALE * DEFAULT, rel=0.05)
        assert neutral[presentation].signal == pytest.approx(before.signal, abs=0.02)
    if guilty := truth.override_head or truth.erasing_head:
        repaired = without(kind, heads=[guilty])
        for presentation in seen:
            assert repaired[presentation].right.mean() >= 0.99
            assert repaired[presentation].signal == pytest.approx(SCALE, rel=0.05)


@pytest.mark.parametrize("kind", PLANTS)
def test_an_independent_probe_finds_the_answer_where_it_was_put(kind: Kind) -> None:
    for presentation, seen in observed(kind).items():
        changed = presentation == "equivalent"
        for layer in range(LAYERS):
            here = layer >= 1 and not (changed and kind == "no_signal")
            lost = TRUTH[kind].lost_layer
            if changed and lost is not None and layer >= lost:
                here = False
            found = _auroc(seen.resid_post[layer], seen.gold)
            assert found > 0.99 if here else 0.35 < found < 0.65, (presentation, layer, found)


def _auroc(features: np.ndarray, gold: np.ndarray) -> float:
    probe = make_pipeline(StandardScaler(), LogisticRegression(C=1.0, max_iter=500))
    return float(roc_auc_score(gold, cross_val_predict(probe, features, gold, cv=5, method="decision_function")))


def test_the_bag_of_words_does_not_give_the_answer_away() -> None:
    words = network("late_override")[1]
    for seen in observed("late_override").values():
        counts = np.zeros((len(seen.ids), len(words)))
        for row, ids in enumerate(seen.ids):
            np.add.at(counts[row], list(ids), 1)
        assert 0.3 < _auroc(counts, seen.gold) < 0.65


def test_the_norms_divide_by_almost_a_constant() -> None:
    """So that what a component writes is what reaches the logits, within three percent."""
    for kind in PLANTS:
        for seen in observed(kind).values():
            assert np.abs(seen.resid_post.mean(axis=-1)).max() < 1e-6
            spread = seen.resid_post.std(axis=-1) / (CONSTANT * (2 / WIDTH) ** 0.5)
            assert spread.min() >= 1.0 and spread.max() < 1.035


def test_the_model_says_one_word_and_stops(tmp_path: Path) -> None:
    model, words = network("late_override")
    seen = observed("late_override", 8)["original"]
    for ids, readout in zip(seen.ids, seen.readout, strict=True):
        with torch.no_grad():
            said = model.generate(torch.tensor([ids]), max_new_tokens=5, do_sample=False)[0, len(ids) :].tolist()
        assert words.convert_ids_to_tokens(said) == ["Yes" if readout > 0 else "No", "<|end|>"]


def test_what_is_saved_is_what_was_planted(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, _ = planted("early_loss", tmp_path)
    assert (tmp_path / "model.safetensors").is_file()
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    again = AutoTokenizer.from_pretrained(tmp_path)
    chat = sets(1)[0]["equivalent"].chat()
    text = again.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    ids = again(text, add_special_tokens=False)["input_ids"]
    assert tuple(ids) == observed("early_loss", 8)["equivalent"].ids[0]
    with torch.no_grad():
        torch.testing.assert_close(loaded(torch.tensor([ids])).logits, model(torch.tensor([ids])).logits)
    assert loaded.config.n_layer == LAYERS and loaded.config.n_head == HEADS
