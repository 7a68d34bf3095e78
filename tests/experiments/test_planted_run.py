"""A whole run on a model whose failure is known: the tables name the planted cause.

The model answers by head 1.2, leans to yes by the MLP of layer 2, and on equivalent presentations head 4.1 adds a default
larger than the signal. See ``tests/planted/models.py``.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from tests.planted.models import DEFAULT, LAYERS, OVERRIDE, PLANTS, SCALE, TRUTH, Kind, planted

ROOT = Path(__file__).parents[2]
PROBE = [sys.executable, "-c", "from experiments.cli import main; main()"]
FAMILY = ROOT / "tests" / "planted" / "family.py"
LIMIT = 48
PLANT: Kind = "late_override"
SMALL = ["--limit", str(LIMIT), "--set", "probe.shuffles=39", "--set", "probe.folds=4", "--set", "patch.pairs=16",
         "--set", "ablate.heads=1", "--set", "ablate.random_sets=3", "--set", "resamples=200"]  # fmt: skip


def study(kind: Kind, folder: Path) -> Path:
    """The run directory of a study of one plant."""
    planted(kind, folder / "model")
    asked = ["--model", str(folder / "model"), "--family", f"{FAMILY}:Switches", "--out", str(folder / "run")]
    result = subprocess.run(
        [*PROBE, "run", *asked, *SMALL],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert result.returncode == 0, result.stderr
    return folder / "run"


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return study(PLANT, tmp_path_factory.mktemp("planted"))


def table(run: Path, name: str) -> pd.DataFrame:
    return pd.read_parquet(run / "tables" / f"{name}.parquet")


def test_every_wrong_equivalent_is_overridden(finished: Path) -> None:
    found = table(finished, "attribution")
    assert len(found) == 2 * LIMIT
    original, equivalent = (found[found["presentation"] == kind] for kind in ("original", "equivalent"))
    assert original["correct"].all() and (original["kind"] == "right").all()
    wrong = equivalent[~equivalent["correct"]]
    assert (wrong["gold"] == "no").all() and len(wrong) == LIMIT / 2
    assert (wrong["kind"] == TRUTH[PLANT].label).mean() >= 0.9
    assert set(wrong["outcome"]) == {"U"}
    # Toward gold: the signal speaks for it, the default against it and louder.
    np.testing.assert_allclose(wrong["signal"].mean(), SCALE, rtol=0.1)
    np.testing.assert_allclose(wrong["default"].mean(), -SCALE * (DEFAULT + OVERRIDE), rtol=0.1)
    assert wrong["decodable"].mean() >= 0.9
    assert (wrong["share"] >= 0.8).mean() >= 0.9
    assert (wrong["lost_at"] == -1).all()


def test_default_and_signal_are_the_planted_ones(finished: Path) -> None:
    split = table(finished, "decomposition").set_index("presentation")
    assert split.loc["original", "signal"] == pytest.approx(SCALE, rel=0.1)
    assert split.loc["equivalent", "signal"] == pytest.approx(SCALE, rel=0.1)
    assert split.loc["original", "delta"] == pytest.approx(SCALE * DEFAULT, abs=0.3)
    assert split.loc["equivalent", "delta"] == pytest.approx(SCALE * (DEFAULT + OVERRIDE), rel=0.1)
    base = json.loads((finished / "results.json").read_text())["arms"]["base"]
    reported = base["decomposition"]["equivalent"]["all"]
    assert reported["delta"] == pytest.approx(split.loc["equivalent", "delta"])


def test_the_answer_is_there_from_the_head_that_writes_it(finished: Path) -> None:
    probes = table(finished, "probes")
    probes, baselines = probes[probes["layer"] >= 0], probes[probes["layer"] < 0]
    assert not (baselines["p_max"] <= 0.05).any() and set(baselines["features"]) == {"embed", "length", "tokens"}
    lens = table(finished, "lens")
    for kind in ("original", "equivalent"):
        curve = probes[probes["presentation"] == kind].set_index("layer")["auroc"]
        assert curve[0] < 0.75 and (curve[1:] > 0.98).all()
        assert (probes.loc[probes["presentation"] == kind, "p_max"] <= 0.05).all()
        seen = lens[lens["presentation"] == kind].set_index("layer")
        assert abs(seen.loc[0, "signal"]) < 0.3
        np.testing.assert_allclose(seen.loc[1:, "signal"], SCALE, rtol=0.1)
    step = lens[lens["presentation"] == "equivalent"].set_index("layer")["delta"].diff()
    assert step.idxmax() == 4 and step[4] == pytest.approx(SCALE * OVERRIDE, rel=0.1)


def test_patching_repairs_from_the_override_on(finished: Path) -> None:
    patch = table(finished, "patch")
    rows = patch[(patch["presentation"] == "equivalent") & (patch["pair"] == "disagreeing")]
    right = np.sign(rows["patched"]) == np.where(rows["gold"] == "yes", 1, -1)
    repaired = right[rows["donor"] == "matched"].groupby(rows["layer"]).mean()
    assert (repaired[[4, 5]] == 1).all() and (repaired[[0, 1, 2, 3]] == 0).all()
    # Another instance's answer repairs as often as that instance's gold answer happens to be no.
    assert right[(rows["donor"] == "unrelated") & (rows["layer"] == 4)].mean() < 0.9
    assert len(repaired) == LAYERS


def test_the_head_that_overrides_is_ranked_first_and_ablated(finished: Path) -> None:
    heads = table(finished, "heads")
    rows = heads[heads["presentation"] == "equivalent"]
    toward = (rows["patched"] - rows["unpatched"]) * np.where(rows["gold"] == "yes", 1, -1)
    assert toward.groupby([rows["layer"], rows["head"]]).mean().idxmax() == TRUTH[PLANT].override_head
    ablated = table(finished, "ablate")
    assert set(ablated.loc[ablated["ablated"] == "top", "heads"]) == {"4.1"}
    rows = ablated[ablated["presentation"] == "equivalent"]
    right = np.sign(rows["difference"]) == np.where(rows["gold"] == "yes", 1, -1)
    share = right.groupby(rows["ablated"]).mean()
    assert share["top"] == 1 and share["none"] == pytest.approx(0.5)
    # A random set may hit the signal head, but none undoes the default.
    assert share[[name for name in share.index if name.startswith("random")]].max() <= 0.55


def test_the_report_says_what_was_found(finished: Path) -> None:
    link = json.loads((finished / "results.json").read_text())["arms"]["base"]["link"]
    [wrong] = [row for row in link if row["answered"] == "wrong"]
    assert wrong["outcome"] == "U" and wrong["n"] == LIMIT / 2
    assert wrong["kinds"]["overridden"]["value"] >= 0.9
    # Readable at layer 1, overridden at 4: the original's residual of layer 1 is overridden like the equivalent's own.
    assert wrong["patch_layer"]["equivalent"] == 1 and wrong["repaired"]["matched"]["value"] == 0
    parts = table(finished, "components")
    shown = (
        parts[(parts["presentation"] == "equivalent") & (parts["what"] == "value")]
        .set_index("component")
        .drop("readout")
    )
    assert shown["signal"].abs().idxmax() == "L1H2"
    assert shown["delta"].abs().nlargest(2).index.tolist() == ["L4H1", "L2 mlp"]
    np.testing.assert_allclose(shown.loc["L1H2", "signal"], SCALE, rtol=0.1)
    assert "overridden" in (finished / "report.html").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("kind", [kind for kind in PLANTS if kind != PLANT and TRUTH[kind].label])
def test_every_other_plant_gets_its_own_label(kind: Kind, tmp_path: Path) -> None:
    found = table(study(kind, tmp_path), "attribution")
    assert (found.loc[found["presentation"] == "original", "kind"] == "right").mean() >= 0.95
    wrong = found[(found["presentation"] == "equivalent") & ~found["correct"]]
    assert len(wrong) >= 0.4 * LIMIT
    assert (wrong["kind"] == TRUTH[kind].label).mean() >= 0.9, wrong["kind"].value_counts()
    if TRUTH[kind].lost_layer is not None:
        lost = wrong[wrong["kind"] == "lost"]
        assert (lost["lost_at"] == TRUTH[kind].lost_layer).mean() >= 0.9
