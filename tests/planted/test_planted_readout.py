"""Readout, lens, decomposition and direct attribution find δ, s and the parts that carry them, by name and by size."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from activations import Plan, answer_tokens, capture, from_modules
from activations.contributions import contributions, required_sites
from experiments.inside import unembedder
from probes.components import against_gold, decompose_components
from probes.decompose import decompose, decompose_layers
from probes.lens import lens
from tests.planted.family import Switches
from tests.planted.models import DEFAULT, LAYERS, OVERRIDE, PLANTS, SCALE, TRUTH, Kind
from tests.planted.observed import PRESENTATIONS, Observed, network, observed, sets, without

COUNT = 100


@dataclass(frozen=True, slots=True, eq=False)
class Inside:
    """What the package's own capture and arithmetic make of one presentation."""

    resid_post: np.ndarray
    logit: np.ndarray
    lens: np.ndarray
    gap: float
    names: tuple[str, ...]
    values: np.ndarray
    seen: Observed


@pytest.fixture(scope="module", params=PLANTS)
def inside(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Kind, dict[str, Inside]]:
    kind: Kind = request.param
    model = from_modules(*network(kind))
    answers = answer_tokens(model, Switches.answers)
    asked = [(kind_, matched) for kind_ in PRESENTATIONS for matched in sets(COUNT)]
    store = capture(
        model,
        model.encode([matched[shown].chat() for shown, matched in asked]),
        Plan(sites=("resid_post", *required_sites(model))),
        tmp_path_factory.mktemp(kind) / "store",
        answers=answers,
        index=[(matched.instance.key, shown) for shown, matched in asked],
    )
    shares = contributions(model, store, answers)
    resid = np.stack([store["resid_post", layer][:] for layer in range(LAYERS)])
    found = {}
    for number, shown in enumerate(PRESENTATIONS):
        rows = slice(number * COUNT, (number + 1) * COUNT)
        through = lens(resid[:, rows], unembedder(model, answers))
        logit = np.asarray(store.readout["logit"][rows], dtype=float)
        found[shown] = Inside(
            resid[:, rows], logit, through.difference, through.final_gap(logit), shares.names, shares.values[:, rows],
            observed(kind, COUNT)[shown],
        )  # fmt: skip
    return kind, found


def test_capture_and_readout_are_those_of_plain_forwards(inside: tuple[Kind, dict[str, Inside]]) -> None:
    for one in inside[1].values():
        np.testing.assert_allclose(one.resid_post, one.seen.resid_post, atol=5e-5)
        np.testing.assert_allclose(one.logit[:, 0] - one.logit[:, 1], one.seen.readout, atol=5e-5)
        assert one.gap < 1e-6


def test_default_and_signal_are_the_planted_sizes(inside: tuple[Kind, dict[str, Inside]]) -> None:
    """Both are what taking parts out of plain forwards says, and their intervals hold the planted values."""
    kind, found = inside
    signs = {
        "original": 1.0,
        "equivalent": {"early_loss": 0.0, "no_signal": 0.0, "unread": 0.0, "reversed": -1.0}.get(kind, 1.0),
    }
    for shown, one in found.items():
        split = decompose(one.seen.readout, one.seen.cells, one.seen.gold, resamples=500, seed=0)
        assert split.delta == pytest.approx(one.seen.default, abs=1e-9)
        assert split.signal == pytest.approx(one.seen.signal, abs=1e-9)
        silent = without(kind, heads=[(1, 2)], count=COUNT)[shown]  # the noise of the fillers stays
        assert split.signal - silent.signal == pytest.approx(SCALE * signs[shown], rel=0.05, abs=0.02)
        extra = OVERRIDE if shown == "equivalent" and "override" in kind else 0.0
        assert split.delta == pytest.approx(SCALE * (DEFAULT + extra), rel=0.05, abs=0.15)
        assert split.signal_low < split.signal < split.signal_high
        assert np.sign(split.signal_low) == np.sign(split.signal_high) or signs[shown] == 0


def test_the_lens_sees_signal_and_default_from_their_layers_on(inside: tuple[Kind, dict[str, Inside]]) -> None:
    kind, found = inside
    truth = TRUTH[kind]
    for shown, one in found.items():
        split = decompose_layers(one.lens, one.seen.cells, one.seen.gold, resamples=100, seed=0)
        signal, default = np.array([s.signal for s in split]), np.array([s.delta for s in split])
        changed = shown == "equivalent"
        expected = np.where(np.arange(LAYERS) >= 1, SCALE, 0.0)
        if changed:
            expected = expected * {"no_signal": 0, "unread": 0, "reversed": -1}.get(kind, 1)
            if truth.lost_layer is not None:
                expected[truth.lost_layer :] = 0
        np.testing.assert_allclose(signal, expected, atol=0.2)
        stands = np.where(np.arange(LAYERS) >= 2, SCALE * DEFAULT, 0.0)
        if changed and truth.override_head:
            stands[truth.override_head[0] :] += SCALE * OVERRIDE
        np.testing.assert_allclose(default, stands, rtol=0.05, atol=0.15)


def test_direct_attribution_names_the_planted_parts(inside: tuple[Kind, dict[str, Inside]]) -> None:
    kind, found = inside
    for shown, one in found.items():
        np.testing.assert_allclose(one.values.sum(axis=0), one.seen.readout, atol=1e-4)
        table = decompose_components(one.values, one.names, one.seen.cells, one.seen.gold, resamples=100, seed=0)
        signal = {name: part.signal for name, part in zip(table.names, table.parts, strict=True)}
        default = {name: part.delta for name, part in zip(table.names, table.parts, strict=True)}
        assert table.whole.signal == pytest.approx(one.seen.signal, abs=1e-6)
        changed = shown == "equivalent"
        carried = {"L1H2": SCALE}
        if changed and kind in ("no_signal", "unread"):
            carried = {}
        if changed and kind == "reversed":
            carried = {"L1H2": -SCALE}
        if changed and kind == "early_loss":
            carried = {"L1H2": SCALE, "L3H1": -SCALE}
        stands = {"L2 mlp": SCALE * DEFAULT}
        if changed and "override" in kind:
            stands["L4H1"] = SCALE * OVERRIDE
        for name in table.names:
            assert signal[name] == pytest.approx(carried.get(name, 0.0), rel=0.05, abs=0.15), (shown, name)
            assert default[name] == pytest.approx(stands.get(name, 0.0), rel=0.05, abs=0.15), (shown, name)
        ranked = {name for name, _ in table.top(len(carried), by="signal")} if carried else set()
        assert ranked == set(carried)
        assert {name for name, _ in table.top(len(stands), by="delta")} == set(stands)


def test_what_spoke_against_the_gold_answer_is_the_guilty_part(inside: tuple[Kind, dict[str, Inside]]) -> None:
    kind, found = inside
    guilty = {"early_loss": "L3H1", "reversed": "L1H2", "no_signal": "L2 mlp", "unread": "L2 mlp"}.get(kind, "L4H1")
    one = found["equivalent"]
    wrong = ~one.seen.right & (one.seen.gold == 0)
    sign = np.where(one.seen.gold == 1, 1, -1)
    counts = against_gold(one.values[:-1, wrong], one.names[:-1], sign[wrong]).counts()
    assert next(iter(counts)) == guilty
    assert counts[guilty] >= 0.9 * wrong.sum()
