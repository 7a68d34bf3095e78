"""Commands of the main job: ``run``, ``report`` and ``check``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from experiments.cli.app import (
    Adapter,
    Device,
    Dtype,
    Family,
    Json,
    Limit,
    Model,
    Seed,
    Set,
    Split,
    app,
    default_name,
    flag,
    libraries,
    place,
    terminable,
)
from experiments.errors import RunError


@app.command("run")
def run_command(
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
    seed: Seed = None,
    split: Split = None,
    device: Device = None,
    dtype: Dtype = None,
    out: Annotated[str | None, flag("out", "Run directory; the same command resumes it.", "-o")] = None,
    json_: Json = False,
) -> None:
    """Ask, score, capture, probe, patch, ablate and report, for a model and its adapters on the same items."""
    import json

    from experiments.behaviour import gate
    from experiments.config import config_text, load
    from experiments.pipeline import run
    from experiments.progress import Reporter

    flags = {"model": model, "adapter": tuple(adapter) if adapter else None, "family": family, "limit": limit,
             "seed": seed, "split": split, "device": device, "dtype": dtype}  # fmt: skip
    loaded = load(config, set_ or [], flags)
    study = f"{Path(config).stem}-" if config else ""
    directory = (
        place("out", out) if out is not None else Path("runs") / f"{study}{default_name(loaded.model, loaded.adapter)}"
    )
    with terminable():
        results = run(loaded, directory, config_text=config_text(loaded), reporter=Reporter(quiet=json_))
    if json_:
        sys.stdout.write(json.dumps(results, indent=1) + "\n")
    else:
        from experiments.summary import show

        show(results, directory)
    gate(results, loaded.max_unparsed)


@app.command()
def check(
    model: Annotated[str, typer.Argument(help="Hub id, folder, .gguf file, builtin or smollm2.")],
    adapter: Annotated[list[str] | None, flag("adapter", "LoRA adapter to check along.", "-a")] = None,
    device: Annotated[str, flag("device", "auto, cpu, cuda, cuda:1 or mps.")] = "auto",
    dtype: Annotated[str, flag("dtype", "float32, bfloat16, float16 or auto.")] = "float32",
    any_base: Annotated[bool, typer.Option("--any-base", help="Accept an adapter that names another base.")] = False,
    backends: Annotated[
        str | None, flag("backends", "Compare with other libraries: all, or transformer_lens,nnsight.")
    ] = None,
    json_: Json = False,
) -> None:
    """Check a model's numerics: padding, lens, heads, hooks, adapters, against the bounds that every run relies on.

    --backends adds a row for the logits and for each site, as TransformerLens and nnsight give them on the same weights.
    """
    import json
    from dataclasses import asdict
    from itertools import islice

    from activations.checks import check as run_checks
    from activations.errors import ModelError
    from activations.model import load
    from tasks.registry import family as family_named

    def asked(names: str) -> Any:
        sets = islice(family_named("ordering").generate({"n": 6, "names": names}, seed=0, split="test"), 4)
        return loaded.encode([shown.chat() for matched in sets for shown in matched.presentations])

    wanted = libraries(backends)
    loaded = load(model, adapters=tuple(adapter or ()), device=device, dtype=dtype, any_base=any_base, verify=False)
    try:
        prompts = asked("census")
    except ModelError:  # a word-level tokenizer, such as the built-in model's, knows few names
        prompts = asked("builtin")
    table = run_checks(loaded, prompts, backends=wanted)
    if json_:
        sys.stdout.write(json.dumps([asdict(one) for one in table], indent=1) + "\n")
    else:
        width = max(len(one.name) for one in table)
        for one in table:
            verdict = "n/a " if one.value is None else "ok  " if one.ok else "FAIL"
            value = "        -" if one.value is None else f"{one.value:9.2e}"
            sys.stdout.write(f"{verdict} {one.name:<{width}} {value}  bound {one.bound:.0e}  {one.note}\n")
    if not all(one.ok for one in table):
        raise RunError(f"{model} fails {sum(not one.ok for one in table)} checks: see the lines above")


@app.command()
def report(run: Annotated[Path, typer.Argument(help="A run directory.")]) -> None:
    """Write report.html of a run, a patching or an ablation anew from its tables; needs no model."""
    from experiments.report import write
    from experiments.rundir import RunDirectory

    folder = RunDirectory(run)
    if not folder.results.exists():
        raise RunError(
            f"{run} has no results.json: give the folder of a finished run, or repeat the command that began it"
        )
    write(folder)
    sys.stdout.write(f"{folder.report}\n")
