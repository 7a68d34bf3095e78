"""Models whose mechanism was set by hand are dissected correctly: the planted part comes first, ablation takes it out."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import pytest

from activations import answer_tokens, from_modules, read
from patching import (
    Pool,
    ablation_cells,
    ablation_study,
    attribution,
    control_donors,
    direct_effects,
    donor_from_run,
    estimate_quality,
    head_cells,
    head_map,
    head_sets,
    layer_cells,
    pair_kind,
    run_study,
    select_heads,
    signed_effect,
    sweep,
)
from patching.direct_path import answer_rows
from tests.planted.family import Switches
from tests.planted.models import LAYERS, PLANTS, TRUTH, Kind
from tests.planted.observed import network, sets

COUNT = 60
KINDS = ("original", "equivalent")
GUILTY: dict[str, tuple[int, int]] = {
    "late_override": (4, 1),
    "shared_override": (4, 1),
    "no_signal": (1, 2),
    "reversed": (1, 2),
    "unread": (1, 2),
}
"""The head whose activation of the original repairs the equivalent."""


@dataclass(frozen=True)
class Case:
    model: Any
    prompts: dict[str, Any]
    answers: Any
    readout: dict[str, np.ndarray]
    gold: np.ndarray
    cells: list[str]
    wrong: np.ndarray
    donors: dict[str, Any]

    def taken(self, kind, rows):
        """The donor's rows of one presentation."""
        return {
            site: {layer: values[rows] for layer, values in positions["answer"].items()}
            for site, positions in self.donors[kind].items()
        }

    def study(self, cells):
        """The originals' activations in the runs of all equivalents that are answered wrong, with every control."""
        rows, everyone = self.wrong, np.arange(COUNT)
        pool = Pool(self.taken("original", everyone), [str(i) for i in everyone], [0] * COUNT, self.cells)
        controls = control_donors(
            self.taken("original", rows),
            self.taken("equivalent", rows),
            keys=[str(i) for i in rows],
            groups=[0] * len(rows),
            cells=[self.cells[i] for i in rows],
            seed=0,
            heads=head_map(self.model),
            pool=pool,
        )
        return run_study(
            self.model,
            [self.prompts["equivalent"][i] for i in rows],
            cells,
            answers=self.answers,
            donors={"matched": self.taken("original", rows), **controls},
            donor_readout=self.readout["original"][rows],
            margin=0.5,
            seed=0,
            resamples=400,
        )[0]

    def ablated(self, top):
        made = head_sets(head_map(self.model), top, count=5, seed=0)
        both = [*self.prompts["original"], *self.prompts["equivalent"]]
        result = sweep(self.model, both, ablation_cells(made), answers=self.answers, seed=0)
        return ablation_study(
            result.unpatched,
            dict(zip(result.cells, result.difference.T, strict=True)),
            presentations=[kind for kind in KINDS for _ in range(COUNT)],
            keys=[*range(COUNT)] * 2,
            cells=self.cells * 2,
            gold=np.tile(self.gold, 2),
            seed=0,
            resamples=400,
        )


@cache
def case(kind: Kind) -> Case:
    model, made = from_modules(*network(kind)), sets(COUNT)
    prompts = {one: model.encode([matched[one].chat() for matched in made]) for one in KINDS}
    answers = answer_tokens(model, Switches.answers)
    readout = {one: read(model, own, answers).difference.numpy() for one, own in prompts.items()}
    gold = np.array([1 if matched.instance.gold == "yes" else -1 for matched in made])
    cells = [*head_cells(head_map(model)), *layer_cells(LAYERS, source="any")]
    return Case(
        model,
        prompts,
        answers,
        readout,
        gold,
        [matched.instance.cell for matched in made],
        np.flatnonzero(np.sign(readout["equivalent"]) != gold),
        {one: donor_from_run(model, own, cells) for one, own in prompts.items()},
    )


@pytest.mark.parametrize("kind", PLANTS)
def test_the_planted_layer_repairs_and_no_layer_before_it(kind: Kind) -> None:
    own, truth = case(kind), TRUTH[kind]
    study = own.study(layer_cells(LAYERS, source="matched"))
    assert set(
        pair_kind(own.readout["equivalent"][own.wrong], own.readout["original"][own.wrong], own.gold[own.wrong])
    ) == {"disagreement"}
    assert study.monotone and study.own_change < 1e-4
    start = truth.repaired_from or 0
    flipped = study.matched.flipped.share
    assert (flipped[start:] == 1).all() and (flipped[:start] <= 0.1).all()
    expected = [layer >= start for layer in range(LAYERS)]
    assert study.specific(by="flipped").tolist() == expected
    # Another instance with the same answer repairs as well: what is carried is the answer.
    assert (study.controls["same cell"].flipped.share[start:] == 1).all()
    assert not study.specific(by="flipped", against=["same cell"]).any()


@pytest.mark.parametrize("kind", sorted(GUILTY))
def test_the_guilty_head_is_first_in_sweep_estimate_and_held_out_rows(kind: Kind) -> None:
    own = case(kind)
    cells = head_cells(head_map(own.model), source="matched")
    donors = {"matched": own.taken("original", own.wrong)}
    recipients = [own.prompts["equivalent"][i] for i in own.wrong]
    exact = sweep(own.model, recipients, cells, answers=own.answers, donors=donors, seed=0)
    effects = signed_effect(exact.difference, exact.unpatched, own.gold[own.wrong])
    units = [own.cells[i].split("-")[0] for i in own.wrong]
    found = select_heads(effects, cells, units, held_out={"forward"}, k=1, seed=0, resamples=200)
    assert found.top == (GUILTY[kind],) and found.overlap == 1
    assert found.tested[0].low > 10 * max(abs(one.mean) for one in found.tested[1:])
    estimate = attribution(own.model, recipients, cells, answers=own.answers, donors=donors)
    signed = estimate.estimate * own.gold[own.wrong][:, None]
    quality = estimate_quality(signed, effects, k=1, seed=0, resamples=200)
    assert quality.pearson.low > 0.99 and quality.overlap.low == 1
    assert cells[int(np.argmax(signed.mean(axis=0)))].edits[0].head == GUILTY[kind][1]


def test_a_gradient_misses_what_works_through_another_head() -> None:
    """In early_loss the trigger works by moving where the eraser attends, which is saturated: its gradient is nearly 0."""
    own = case("early_loss")
    cells = head_cells(head_map(own.model), source="matched")
    donors = {"matched": own.taken("original", own.wrong)}
    recipients = [own.prompts["equivalent"][i] for i in own.wrong]
    exact = sweep(own.model, recipients, cells, answers=own.answers, donors=donors, seed=0)
    effects = signed_effect(exact.difference, exact.unpatched, own.gold[own.wrong]).mean(axis=0)
    names = [(cell.edits[0].layer, cell.edits[0].head) for cell in cells]
    trigger, eraser = names.index((2, 1)), names.index((3, 1))
    assert set(np.argsort(-effects)[:2].tolist()) == {trigger, eraser}
    found = attribution(own.model, recipients, cells, answers=own.answers, donors=donors)
    signed = found.estimate * own.gold[own.wrong][:, None]
    assert signed.mean(axis=0)[trigger] < 0.1 * effects[trigger]
    assert signed.mean(axis=0)[eraser] == pytest.approx(effects[eraser], rel=0.1)
    moved = signed_effect(exact.difference, exact.unpatched, own.gold[own.wrong])
    assert not estimate_quality(signed, moved, k=2, seed=0, resamples=200).enough()


@pytest.mark.parametrize("kind", PLANTS)
def test_without_the_signal_head_the_signal_is_gone_and_the_default_stays(kind: Kind) -> None:
    own, truth = case(kind), TRUTH[kind]
    study = own.ablated([truth.signal_head])
    top = study.sets["top"]
    assert top.share_removed["original"].value == pytest.approx(1, abs=0.05)
    for name in ("default_original", "default_equivalent"):
        assert abs(top.measures[name].change.value) < 0.2
    assert top.measures["accuracy_original"].after.value < 0.6
    if kind == "reversed":
        assert "share_removed_mean is undefined" in study.reason
        assert top.share_removed["equivalent"].value == pytest.approx(1, abs=0.05)
    else:
        assert top.agreement_without_competence, "a model without its signal agrees with itself"
        assert top.note.endswith("more agreement with less competence")


@pytest.mark.parametrize("kind", ["late_override", "shared_override"])
def test_without_the_override_the_answer_is_repaired_and_nothing_is_lost(kind: Kind) -> None:
    study = case(kind).ablated([(4, 1)])
    top = study.sets["top"]
    assert abs(top.share_removed["mean"].value) < 0.02
    assert top.measures["default_equivalent"].change.value < -4
    assert abs(top.measures["default_original"].change.value) < 0.1
    assert top.measures["accuracy_equivalent"].after.value == 1 and top.measures["robust"].after.value == 1
    assert not top.agreement_without_competence and top.note == ""
    assert study.above["random"]["accuracy_equivalent"].low > 0.2


@pytest.mark.parametrize("kind", PLANTS)
def test_only_the_signal_head_writes_to_the_logits_by_itself(kind: Kind) -> None:
    """The heads it reads from matter as much in the full sweep, and not at all along the direct path."""
    own = case(kind)
    cells = head_cells(head_map(own.model))
    rows = answer_rows(own.model, own.prompts["original"], cells)
    direct = direct_effects(own.model, rows, cells, answers=own.answers)
    exact = sweep(own.model, own.prompts["original"], cells, answers=own.answers, seed=0)
    np.testing.assert_allclose(direct.unpatched, exact.unpatched, atol=1e-4)
    names = [(cell.edits[0].layer, cell.edits[0].head) for cell in cells]
    lost = [-((one.difference - one.unpatched[:, None]) * own.gold[:, None]).mean(axis=0) for one in (direct, exact)]
    at, reads = names.index((1, 2)), names.index((0, 0))
    assert lost[0][at] > 2.5 and np.abs(np.delete(lost[0], at)).max() < 0.1
    assert lost[1][reads] > 2.5, "which thing is asked about comes from there"
