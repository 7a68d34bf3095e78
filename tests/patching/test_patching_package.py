"""The front door: names are found lazily, and the function ``sweep`` is not shadowed by its module."""

from __future__ import annotations

import subprocess
import sys

import pytest

import patching


def fresh(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def test_every_name_is_where_it_is_said_to_be():
    for name in patching.__all__:
        assert getattr(patching, name).__module__.startswith("patching."), name
    with pytest.raises(AttributeError, match=r"has no attribute 'swep'; it has .*sweep, sweep_plan"):
        _ = patching.swep


@pytest.mark.parametrize(
    "first", ["from patching import sweep", "import patching.sweeping", "from patching.sweeping import SweepResult"]
)
def test_sweep_is_the_function_whichever_import_comes_first(first):
    code = f"{first}; from patching import sweep; import patching; print(sweep is patching.sweep, sweep)"
    assert fresh(code).startswith("True <function sweep")


def test_cells_and_effects_need_no_torch():
    code = "import sys, patching; from patching import Cell, rank_heads, norm_matched_random; print('torch' in sys.modules)"
    assert fresh(code) == "False"
