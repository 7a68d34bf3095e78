"""Patching and ablation name the planted parts, and nothing else."""

from __future__ import annotations

import numpy as np
import pytest

from activations import answer_tokens, from_modules
from patching import Cell, Edit, head_cells, head_map, layer_cells, rank_heads, signed_effect, sweep
from tests.planted.family import Switches
from tests.planted.models import HEADS, LAYERS, PLANTS, TRUTH, Kind
from tests.planted.observed import Observed, network, observed, sets, without

COUNT = 40
NAMES = [(layer, head) for layer in range(LAYERS) for head in range(HEADS)]


def swept(kind: Kind, recipient: str, cells, donors=None):  # type: ignore[no-untyped-def]
    model = from_modules(*network(kind))
    prompts = model.encode([matched[recipient].chat() for matched in sets(COUNT)])
    result = sweep(model, prompts, cells, answers=answer_tokens(model, Switches.answers), donors=donors or {}, seed=0)
    # A cell without edits needs no branch; whichever runs, it is no plain forward pass.
    assert result.engine in ("branch", "restart")
    return result


def donor(seen: Observed) -> dict[str, np.ndarray]:
    return {"resid_post": seen.resid_post.swapaxes(0, 1), "z": seen.z.swapaxes(0, 1)}


def signal(readout: np.ndarray, seen: Observed) -> np.ndarray:
    """s of each cell's column; the sets are balanced, so plain means will do."""
    return (readout[seen.gold == 1].mean(axis=0) - readout[seen.gold == 0].mean(axis=0)) / 2


@pytest.mark.parametrize("kind", PLANTS)
def test_unpatched_readouts_are_those_of_plain_forwards(kind: Kind) -> None:
    for presentation, seen in observed(kind, COUNT).items():
        result = swept(kind, presentation, [Cell("none", ())])
        np.testing.assert_allclose(result.unpatched, seen.readout, atol=5e-5)


@pytest.mark.parametrize("kind", PLANTS)
def test_zeroing_the_signal_head_takes_the_signal_and_leaves_the_default(kind: Kind) -> None:
    truth = TRUTH[kind]
    for presentation, seen in observed(kind, COUNT).items():
        model = from_modules(*network(kind))
        result = swept(kind, presentation, head_cells(head_map(model)))
        change = signal(result.difference, seen) - signal(seen.readout, seen)
        moved = {name for name, size in zip(NAMES, change, strict=True) if abs(size) > 0.2}
        at = NAMES.index(truth.signal_head)  # type: ignore[arg-type]
        absent = presentation == "equivalent" and kind in ("no_signal", "unread", "early_loss")
        if presentation == "original" or not absent:
            assert np.argmax(np.abs(change)) == at
        reference = without(kind, heads=[truth.signal_head], count=COUNT)[presentation].readout  # type: ignore[list-item]
        np.testing.assert_allclose(result.difference[:, at], reference, atol=5e-5)
        # Without knowing what is asked, the signal head looks at both states alike, and the signal is gone too.
        expected = {(0, 0), truth.signal_head}
        if presentation == "equivalent":
            expected = {
                "no_signal": set(),
                "unread": set(),
                "early_loss": {(2, 1), truth.erasing_head},  # taking either out brings the signal back
            }.get(kind, expected)
        assert moved == expected, (presentation, moved)


@pytest.mark.parametrize("kind", ["late_override", "shared_override"])
def test_zeroing_the_override_takes_the_default_and_leaves_the_signal(kind: Kind) -> None:
    seen = observed(kind, COUNT)["equivalent"]
    model = from_modules(*network(kind))
    result = swept(kind, "equivalent", head_cells(head_map(model)))
    default = result.difference.mean(axis=0) - seen.readout.mean()
    at = NAMES.index((4, 1))
    assert np.argmin(default) == at and default[at] < -4.5
    assert np.abs(np.delete(default, at)).max() < 0.4
    reference = without(kind, heads=[(4, 1)], count=COUNT)["equivalent"].readout
    np.testing.assert_allclose(result.difference[:, at], reference, atol=5e-5)
    np.testing.assert_allclose(signal(result.difference, seen)[at], signal(seen.readout, seen), atol=0.1)
    assert ((result.difference[:, at] > 0) == (seen.gold == 1)).all()


@pytest.mark.parametrize("kind", PLANTS)
def test_residuals_of_the_original_repair_from_the_planted_layer_on(kind: Kind) -> None:
    truth, seen = TRUTH[kind], observed(kind, COUNT)
    assert truth.repaired_from is not None
    before, after = seen["original"], seen["equivalent"]
    result = swept(kind, "equivalent", layer_cells(LAYERS, source="original"), {"original": donor(before)})
    wrong = ~after.right
    right = (result.difference > 0) == (after.gold == 1)[:, None]
    repaired = right[wrong].mean(axis=0)
    assert (repaired[truth.repaired_from :] == 1).all(), repaired
    assert (repaired[: truth.repaired_from] <= 0.1).all(), repaired
    np.testing.assert_allclose(result.difference[:, -1], before.readout, atol=1e-4)


@pytest.mark.parametrize("kind", PLANTS)
def test_an_unrelated_residual_brings_its_own_answer(kind: Kind) -> None:
    """What repairs is the instance's own content: another original's residual answers that one's question."""
    seen = observed(kind, COUNT)
    other = np.roll(np.arange(COUNT), 1)
    lent = {"unrelated": {"resid_post": seen["original"].resid_post[:, other].swapaxes(0, 1)}}
    result = swept(kind, "equivalent", layer_cells(LAYERS, source="unrelated"), lent)
    follows = (result.difference[:, -1] > 0) == (seen["original"].readout[other] > 0)
    assert follows.all()
    wrong = ~seen["equivalent"].right
    right = (result.difference[wrong, -2] > 0) == (seen["equivalent"].gold[wrong] == 1)
    assert right.mean() < 0.75


@pytest.mark.parametrize(
    ("kind", "first"),
    [
        ("late_override", (4, 1)),
        ("shared_override", (4, 1)),
        ("reversed", (1, 2)),
        ("no_signal", (1, 2)),
        ("unread", (1, 2)),
    ],
)
def test_patching_heads_ranks_the_guilty_one_first(kind: Kind, first: tuple[int, int]) -> None:
    """Each head's z of the original, put into the wrong equivalent."""
    seen = observed(kind, COUNT)
    model = from_modules(*network(kind))
    cells = head_cells(head_map(model), source="original")
    result = swept(kind, "equivalent", cells, {"original": donor(seen["original"])})
    wrong = ~seen["equivalent"].right
    toward = np.where(seen["equivalent"].gold[wrong] == 1, 1, -1)
    ranked = rank_heads(signed_effect(result.difference[wrong], result.unpatched[wrong], toward), cells, seed=0)
    assert (ranked[0].layer, ranked[0].head) == first
    assert ranked[0].low > 3 * max(abs(one.mean) for one in ranked[1:])


def test_what_erases_is_found_by_taking_it_out() -> None:
    seen = observed("early_loss", COUNT)["equivalent"]
    cells = [
        Cell("eraser", (Edit("z", 3, 1),)),
        Cell("its trigger", (Edit("z", 2, 1),)),
        Cell("noise", (Edit("z", 3, 2),)),
    ]
    result = swept("early_loss", "equivalent", cells)
    right = ((result.difference > 0) == (seen.gold == 1)[:, None]).mean(axis=0)
    assert right[0] == 1 and right[1] == 1 and right[2] < 0.6
