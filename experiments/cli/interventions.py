"""Commands that intervene in a model's run: ``patch``."""

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
    joined,
    place,
)


@app.command("patch")
def patch_command(
    config: Annotated[
        str | None,
        typer.Argument(help="YAML file or name of a recipe (`probe recipes`); without it, the built-in pair."),
    ] = None,
    model: Model = None,
    adapter: Adapter = None,
    family: Family = None,
    set_: Set = None,
    limit: Limit = None,
    pairs: Annotated[str | None, flag("pairs", "Disagreeing pairs, and as many that agree, at most.")] = None,
    sites: Annotated[
        list[str] | None, flag("sites", "resid_pre, resid_mid, resid_post, attn_out, mlp_out, z (each head).")
    ] = None,
    layers: Annotated[list[str] | None, flag("layers", "0-3,8 or -1; all if not given.")] = None,
    positions: Annotated[
        list[str] | None, flag("positions", "answer, all, or spans: query, premise:1, premise:* for every one.")
    ] = None,
    directions: Annotated[
        list[str] | None, flag("directions", "repair (original into equivalent), break (the other way).")
    ] = None,
    kinds: Annotated[list[str] | None, flag("kinds", "disagreement, agreement, shared error.")] = None,
    controls: Annotated[list[str] | None, flag("controls", "unrelated, random, same cell, own.")] = None,
    decides: Annotated[str | None, flag("decides", "flipped or difference: what has to exceed the controls.")] = None,
    margin: Annotated[str | None, flag("margin", "Logits by which runs must differ to count in restoration.")] = None,
    estimate: Annotated[
        bool, typer.Option("--estimate", help="Estimate each cell by a gradient as well, and say how good that is.")
    ] = False,
    transplant: Annotated[
        list[str] | None,
        flag("transplant", "answer or all: exchange activations of base and adapter there as well."),
    ] = None,
    cell_budget: Annotated[str | None, flag("cell-budget", "Cells in one forward pass, at most.")] = None,
    check_cells: Annotated[str | None, flag("check-cells", "Cells recomputed by plain forwards in a sweep.")] = None,
    resamples: Resamples = None,
    seed: Seed = None,
    split: Split = None,
    device: Device = None,
    dtype: Dtype = None,
    out: Annotated[str | None, flag("out", "Run directory; the same command resumes it.", "-o")] = None,
    json_: Json = False,
) -> None:
    """Patch activations between the presentations of a pair, beside controls, in a model and its adapters."""
    import json

    from experiments.capture import words
    from experiments.cli.app import terminable
    from experiments.config import config_text
    from experiments.patch_command import load_patch, study
    from experiments.progress import Reporter
    from experiments.rundir import RunDirectory

    flags = {"model": model, "adapter": tuple(adapter) if adapter else None, "family": family, "limit": limit,
             "pairs": pairs, "sites": words(joined(sites)), "layers": words(joined(layers)),
             "positions": words(joined(positions)), "directions": words(joined(directions)),
             "kinds": words(joined(kinds)), "controls": words(joined(controls)), "decides": decides, "margin": margin,
             "estimate": estimate or None, "transplant": words(joined(transplant)), "cell_budget": cell_budget,
             "check_cells": check_cells, "resamples": resamples, "seed": seed, "split": split, "device": device,
             "dtype": dtype}  # fmt: skip
    loaded = load_patch(config, set_ or [], flags)
    name = Path(config).stem if config else f"patch-{loaded.family.rpartition(':')[2]}"
    directory = (
        place("out", out) if out is not None else Path("runs") / f"{name}-{default_name(loaded.model, loaded.adapter)}"
    )
    with terminable():
        results = study(loaded, directory, config_text=config_text(loaded), reporter=Reporter(quiet=json_))
    if json_:
        sys.stdout.write(json.dumps(results, indent=1) + "\n")
    else:
        from experiments.summary_interventions import show

        show(RunDirectory(directory))
