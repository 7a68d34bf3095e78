"""The command ``ablate``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from experiments.cli.app import (
    Adapter,
    Device,
    Dtype,
    Family,
    Json,
    Limit,
    Model,
    Resamples,
    Seed,
    Set,
    Split,
    app,
    default_name,
    flag,
    place,
    terminable,
)


@app.command("ablate")
def ablate_command(
    config: Annotated[
        str | None,
        typer.Argument(
            help="YAML file or name of a recipe (`probe recipes`); without it, the built-in pair is studied."
        ),
    ] = None,
    model: Model = None,
    adapter: Adapter = None,
    family: Family = None,
    set_: Set = None,
    limit: Limit = None,
    heads: Annotated[str | None, flag("heads", "Number of top-ranked heads to cut together.")] = None,
    chosen: Annotated[str | None, flag("chosen", "Heads to cut instead of ranking them: 3.1,3.2 or L3H1.")] = None,
    pairs: Annotated[str | None, flag("pairs", "Pairs that heads are ranked on, at most.")] = None,
    random_sets: Annotated[str | None, flag("random-sets", "Random sets of as many heads, of either kind.")] = None,
    held_out: Annotated[
        str | None, flag("held-out", "Swept parameter whose test values do not rank, such as relation.")
    ] = None,
    test: Annotated[str | None, flag("test", "Values of it that heads are cut on; the last if not given.")] = None,
    scope: Annotated[str | None, flag("scope", "Tokens at which heads are cut: answer or all.")] = None,
    source: Annotated[str | None, flag("source", "What takes a head's place: zero, mean or resample.")] = None,
    leave_one_out: Annotated[
        bool | None, typer.Option("--leave-one-out/--no-leave-one-out", help="Cut the top heads but one as well.")
    ] = None,
    grid: Annotated[bool | None, typer.Option("--grid/--no-grid", help="Cut every head by itself as well.")] = None,
    direct: Annotated[
        bool | None,
        typer.Option("--direct/--no-direct", help="Also what a patched head does to the logits by itself."),
    ] = None,
    check_cells: Annotated[str | None, flag("check-cells", "Cells recomputed by plain forwards.")] = None,
    cell_budget: Annotated[str | None, flag("cell-budget", "Cells in one forward pass, at most.")] = None,
    resamples: Resamples = None,
    seed: Seed = None,
    split: Split = None,
    device: Device = None,
    dtype: Dtype = None,
    out: Annotated[str | None, flag("out", "Run directory; the same command resumes it.", "-o")] = None,
    json_: Json = False,
) -> None:
    """Rank attention heads by patching, cut the top ones, and compare competence and agreement with random heads cut."""
    import json

    from experiments.ablate_command import ablate, load_ablate
    from experiments.capture import words
    from experiments.config import config_text
    from experiments.progress import Reporter
    from experiments.rundir import RunDirectory

    flags = {"model": model, "adapter": tuple(adapter) if adapter else None, "family": family, "limit": limit,
             "heads": heads, "chosen": words(chosen), "pairs": pairs, "random_sets": random_sets, "held_out": held_out,
             "test": words(test), "scope": scope, "source": source, "leave_one_out": leave_one_out, "grid": grid,
             "direct": direct, "check_cells": check_cells, "cell_budget": cell_budget, "resamples": resamples,
             "seed": seed, "split": split, "device": device, "dtype": dtype}  # fmt: skip
    loaded = load_ablate(config, set_ or [], flags)
    study = Path(config).stem if config else "ablate"
    directory = (
        place("out", out) if out is not None else Path("runs") / f"{study}-{default_name(loaded.model, loaded.adapter)}"
    )
    with terminable():
        results = ablate(loaded, directory, config_text=config_text(loaded), reporter=Reporter(quiet=json_))
    if json_:
        sys.stdout.write(json.dumps(results, indent=1) + "\n")
    else:
        from experiments.summary_interventions import show

        show(RunDirectory(directory))
