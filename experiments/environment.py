"""What a run is computed with: the model it loads, and a record of model, items, library versions, machine and commit.

The record is written once, before the first answer. A resumed run has to meet the same model, items and token ids, since
a table whose rows come from two models would look like any other table.
"""

from __future__ import annotations

import hashlib
import platform
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from experiments.errors import RunError
from experiments.rundir import RunDirectory

if TYPE_CHECKING:
    from activations.model import Model
    from experiments.config import Asking
    from experiments.progress import Reporter

VERSIONED = (
    "pairlens", "torch", "transformers", "peft", "tokenizers", "numpy", "scipy", "scikit-learn", "statsmodels", "pandas",
    "h5py", "matplotlib",
)  # fmt: skip


def load_model(config: Asking, reporter: Reporter) -> Model:
    """The model and adapters that a run asks, loaded and checked.

    Raises:
        ModelError: they can't be loaded or fail a check.
        RunError: an adapter bears the name of the base's arm.
    """
    from activations.model import load

    with reporter.stage(f"load {config.model}", 1):
        model = load(
            config.model,
            adapters=config.adapter,
            device=config.device,
            dtype=config.dtype,
            any_base=config.any_base,
            trust_remote_code=config.trust_remote_code,
        )
    if "base" in model.adapter_names:
        raise RunError("an adapter's folder is called 'base', which names the model itself here: rename the folder")
    return model


def remember(run: RunDirectory, model: Model, *, token_ids: str, seed: int) -> None:
    """Write environment.json once; a resumed run must meet the same model, items and token ids.

    Args:
        token_ids: hash over the ids of all prompts. It also stands for the tokenizer: a changed vocabulary shows here.

    Raises:
        RunError: something that decides the numbers has changed since the run began.
    """
    name = "environment.json"
    asked = {"items": file_hash(run.items), "token_ids": token_ids}
    if run.begun():
        environment = run.read_json(name)
        for key, value in asked.items():
            if environment.get("asked", {}).get(key) != value:
                raise RunError(
                    f"{run.path} was begun with other {key.replace('_', ' ')} (items.jsonl or the tokenizer has changed): "
                    "give another --out, or put the old files back"
                )
        known = environment["model"]
        for key, value in model.identity.items():
            if key not in ("versions",) and known.get(key) != value:
                raise RunError(
                    f"{run.path} was begun with another model ({key} was {known.get(key)}, is {value}): "
                    "give another --out, or the old model"
                )
        return
    run.write_json(
        name,
        {
            # Beside the identity, which a resumed run has to meet and which older runs recorded without it.
            "model": {**model.identity, "n_parameters": model.n_parameters},
            "asked": asked,
            "versions": _versions(),
            "python": sys.version.split()[0],
            "platform": platform.platform(),
            "processor": platform.processor() or platform.machine(),
            "threads": _threads(),
            "git": _git(),
            "seed": seed,
            "command": sys.argv,
        },
    )


def file_hash(path: Path) -> str:
    """sha256 of a file, read in pieces."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _versions() -> dict[str, str | None]:
    """Versions of this package and of the libraries whose code makes the numbers."""
    from importlib.metadata import PackageNotFoundError, version

    found: dict[str, str | None] = {}
    for name in VERSIONED:
        try:
            found[name] = version(name)
        except PackageNotFoundError:  # run from a checkout that was never installed
            found[name] = None
    return found


def _threads() -> int:
    import torch

    return torch.get_num_threads()


def _git() -> str | None:
    """Commit of the checkout that this package runs from; None where it is installed like any other package."""
    here = Path(__file__)
    try:
        # An installed package may lie inside somebody else's repository, whose commit would say nothing.
        tracked = _git_says("ls-files", "--error-unmatch", here.name, cwd=here.parent)
        return _git_says("describe", "--always", "--dirty", cwd=here.parent) if tracked else None
    except (OSError, subprocess.TimeoutExpired):
        return None


def _git_says(*words: str, cwd: Path) -> str | None:
    found = subprocess.run(["git", *words], cwd=cwd, capture_output=True, text=True, timeout=5, check=False)
    return found.stdout.strip() or None
