"""The front door: cheap to import, honest about its names."""

from __future__ import annotations

import subprocess
import sys

import pytest

import activations


def test_importing_the_package_does_not_import_torch() -> None:
    code = "import sys, activations, activations.errors, activations.batching; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


@pytest.mark.parametrize("name", ["Model", "load", "read", "answer_tokens", "check", "pad", "ModelError", "Structure"])
def test_names_resolve(name: str) -> None:
    assert getattr(activations, name).__name__ == name
    assert name in dir(activations)


def test_an_unknown_name_lists_what_there_is() -> None:
    with pytest.raises(AttributeError, match=r"no attribute 'nonsense'; it has .*load"):
        activations.nonsense  # noqa: B018
