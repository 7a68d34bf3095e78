"""Probability operators through the commands: which pairs are compared, and a model that knows no such words."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from experiments.config import settings
from experiments.eval_config import load_eval, table_of
from tasks.registry import family

PROBE = (sys.executable, "-c", "from experiments.cli import main; main()")


def pairs(*chosen: str) -> tuple[tuple[str, str], ...]:
    config = load_eval(None, chosen, {"family": "modals", "model": "any"})
    return table_of(config, settings(config, family("modals"))).pairs


def test_questions_that_flip_the_gold_answer_are_no_pairs() -> None:
    assert pairs() == tuple(("original", form) for form in ("correct", "valid", "follow", "direct"))
    assert pairs("presentations=original,equivalent,truth_negated,repeat") == (
        ("original", "equivalent"),
        ("original", "repeat"),
    )


@pytest.mark.parametrize("what", [["--family", "modals"], ["modals-table-3"]])
def test_the_built_in_model_is_refused_in_one_line(tmp_path: Path, what: list[str]) -> None:
    asked = [*PROBE, "eval", *what, "--limit", "4", "--out", str(tmp_path / "run")]
    done = subprocess.run(asked, capture_output=True, text=True, check=False)
    said = done.stderr.strip().splitlines()[-1]
    assert done.returncode == 1
    assert said.startswith("probe: the tokenizer cannot read ") and "use another model" in said
    assert "Traceback" not in done.stderr


def test_a_size_is_refused_by_name() -> None:
    done = subprocess.run([*PROBE, "show", "modals", "--set", "n=4"], capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "modals has no parameter 'n'" in done.stderr and done.stderr.count("\n") == 1
