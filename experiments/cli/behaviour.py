"""Commands about what models say: ``eval``, ``recipes``, ``score``, ``compare``. The last three need no model."""

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
    Resamples,
    Seed,
    Set,
    Split,
    app,
    default_name,
    flag,
    integer,
    joined,
    place,
    terminable,
    wrapped,
)
from experiments.errors import UsageError


@app.command("eval")
def eval_command(
    config: Annotated[
        str | None, typer.Argument(help="YAML file, or the name of a recipe (see `probe recipes`).")
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
    """Ask a model and its adapters, score the answers and print a table; looks at behaviour only."""
    import json

    from experiments.behaviour import gate
    from experiments.config import config_text
    from experiments.eval_config import load_eval
    from experiments.evaluation import evaluate
    from experiments.progress import Reporter

    flags = {"model": model, "adapter": tuple(adapter) if adapter else None, "family": family, "limit": limit,
             "seed": seed, "split": split, "device": device, "dtype": dtype}  # fmt: skip
    loaded = load_eval(config, set_ or [], flags)
    study = Path(config).stem if config else f"eval-{loaded.family.rpartition(':')[2]}"
    directory = (
        place("out", out) if out is not None else Path("runs") / f"{study}-{default_name(loaded.model, loaded.adapter)}"
    )
    with terminable():
        results = evaluate(loaded, directory, config_text=config_text(loaded), reporter=Reporter(quiet=json_))
    if json_:
        sys.stdout.write(json.dumps(results, indent=1) + "\n")
    else:
        _print_table(directory, results)
    gate(results, loaded.max_unparsed)


@app.command()
def recipes(json_: Json = False) -> None:
    """List the recipes: of `probe eval` (behaviour), `probe run` (what is inside too), and of single interventions."""
    import json

    from experiments.recipes import command, describe, names

    found = {name: {"command": command(name), "asks": describe(name)} for name in names()}
    if json_:
        sys.stdout.write(json.dumps(found, indent=1) + "\n")
        return
    for name, one in found.items():
        sys.stdout.write(wrapped(one["asks"], first=f"{one['command']:<7}{name:<22} ", rest=" " * 30) + "\n")


@app.command()
def score(
    run: Annotated[Path, typer.Argument(help="A finished run directory.")],
    table: Annotated[
        str | None,
        typer.Option("--table", help="Make the table of this recipe or file as well, from the same answers."),
    ] = None,
    json_: Json = False,
) -> None:
    """Read and grade the answers of a run again from their text, and renew what follows; needs no model."""
    import json

    from experiments.eval_config import other
    from experiments.scoring import score as score_run

    found = score_run(run, None if table is None else other(table))
    if json_:
        from experiments.results import plain

        sys.stdout.write(json.dumps(found.results if found.other is None else plain(found.other), indent=1) + "\n")
        return
    sys.stdout.write(
        f"{found.answers:,} answers read again (parser version {found.old_parser} -> {found.new_parser}), "
        f"{found.changed:,} changed\n"
    )
    if table is not None and found.other is not None:
        from experiments.summary import show_table_of

        show_table_of(found.other)
        sys.stdout.write(f"{run / Path(table).stem}.csv\n")
    elif found.command == "eval":
        _print_table(run, found.results)
    else:
        from experiments.summary import show

        show(found.results, run)


@app.command()
def compare(
    runs: Annotated[
        list[str], typer.Argument(help="Two or more of RUN or RUN:ARM, on the same items; without ARM, the base model.")
    ],
    recipe: Annotated[
        str | None,
        typer.Option("--recipe", help="Make the table and figure of this recipe or file, with a row for each model."),
    ] = None,
    sizes: Annotated[
        list[str] | None,
        typer.Option("--sizes", help="Parameters of models whose runs recorded none: name=135M,name=3B."),
    ] = None,
    out: Annotated[
        str | None,
        typer.Option("--out", "-o", help="Folder for table.csv, trends.csv and figure.svg over all models."),
    ] = None,
    strata: Annotated[str | None, flag("strata", "Family parameter to resample within, such as relation.")] = None,
    resamples: Resamples = None,
    seed: Seed = None,
    json_: Json = False,
) -> None:
    """Compare arms on the same items: two with paired differences; more, or a recipe's table, in one table with trends."""
    if len(runs) == 2 and recipe is None:
        _refuse_of_many(sizes=sizes, out=out)
        _compare_two(runs, strata=strata, resamples=resamples, seed=seed, json_=json_)
    else:
        if strata is not None:
            raise UsageError(f"--strata is {strata!r}, which is about the differences of two runs: leave it out")
        _compare_models(
            runs,
            recipe,
            joined(sizes),
            None if out is None else place("out", out),
            resamples=resamples,
            seed=seed,
            json_=json_,
        )


def _refuse_of_many(**given: Any) -> None:
    for name, value in given.items():
        if value is not None:
            raise UsageError(
                f"--{name} belongs to a table over models: give --recipe or more than two runs, or leave it out"
            )


def _compare_two(runs: list[str], *, strata: str | None, resamples: str | None, seed: str | None, json_: bool) -> None:
    import json
    from dataclasses import asdict

    from experiments.comparing import compare as compare_sides
    from experiments.comparing import side
    from experiments.results import plain

    found = compare_sides(
        *(side(one) for one in runs),
        strata=strata,
        resamples=integer("resamples", resamples, default=2000, least=1),
        seed=integer("seed", seed, default=1),
    )
    if json_:
        sys.stdout.write(json.dumps(plain(asdict(found)), indent=1) + "\n")
    else:
        from experiments.summary import show_comparison

        show_comparison(found)


def _compare_models(
    runs: list[str],
    recipe: str | None,
    sizes: str | None,
    out: Path | None,
    *,
    resamples: str | None,
    seed: str | None,
    json_: bool,
) -> None:
    import json

    from experiments.comparing import side
    from experiments.comparing_models import compare_models, sizes_given, write
    from experiments.eval_config import other
    from experiments.results import plain

    found = compare_models(
        [side(one) for one in runs],
        None if recipe is None else other(recipe),
        sizes=sizes_given(sizes),
        resamples=None if resamples is None else integer("resamples", resamples, default=0, least=1),
        seed=None if seed is None else integer("seed", seed, default=0),
    )
    files = [] if out is None else write(found, out)
    if json_:
        shown = {"spec": found.spec.model_dump(), "rows": found.table.to_dict("records"),
                 "trends": found.trends.to_dict("records"), "sizes": dict(found.sizes), "notes": found.notes}  # fmt: skip
        sys.stdout.write(json.dumps(plain(shown), indent=1) + "\n")
        return
    from experiments.summary_models import show_models

    show_models(found)
    if out is not None:
        sys.stdout.write(f"{out}: {', '.join(files)}\n")
    elif found.figure is not None:
        sys.stdout.write("give --out FOLDER for the figure\n")


def _print_table(directory: Path, results: dict[str, Any]) -> None:
    from experiments.summary import show_made

    show_made(directory, results)
