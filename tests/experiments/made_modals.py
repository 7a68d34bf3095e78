"""Runs of `probe eval` about probability operators without a model: real items, real files, answers with a known lean."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from experiments import behaviour, items
from experiments.config import resolved, settings
from experiments.eval_config import load_eval
from experiments.rundir import RunDirectory, append_lines, opened
from tasks.registry import family as family_named

SMALL = ("names=letters", "activities=party", "resamples=100")


def modals_run(
    path: Path,
    model: str,
    *,
    skill: float = 0.2,
    lean: float = 0.0,
    parameters: int | None = None,
    limit: int = 30,
    params: Sequence[str] = SMALL,
    seed: int = 0,
) -> RunDirectory:
    """A run whose model says yes with probability 0.5 + lean, and skill more or less where yes is right or wrong."""
    config = load_eval(None, list(params), {"family": "modals", "model": model, "limit": limit})
    family, rng = family_named("modals"), np.random.default_rng(seed)
    grid = settings(config, family)
    with opened(path, resolved(config, family, grid), "") as run:
        items.make(run, config, family, grid, ())
        asked = [row for _, made in items.stored(run) for row in items.rows(made)]
        lines = []
        for row in asked:
            toward = skill if row.presentation.gold == "yes" else -skill
            said = "Yes." if rng.random() < 0.5 + lean + toward else "No."
            lines.append(_line(row, said if rng.random() < 0.97 else "Perhaps."))
        append_lines(run.responses, lines)
        given = behaviour.by_identity(behaviour.responses(run))
        run.write_table("behaviour", behaviour.table(given, family, asked, ["base"]))
        known: dict[str, Any] = {"name": model, "adapters": {}}
        run.write_json("environment.json", {
            "model": known if parameters is None else {**known, "n_parameters": parameters}, "asked": {}
        })  # fmt: skip
    return run


def _line(row: items.Row, text: str) -> str:
    setting, key, presentation = row.identity
    return json.dumps({
        "arm": "base", "setting": setting, "key": key, "presentation": presentation, "text": text,
        "finish_reason": "stop", "prompt_opened_think": False, "n_prompt_tokens": 60, "n_tokens": 2, "status": "answered",
        "attempt": 1,
    }) + "\n"  # fmt: skip
