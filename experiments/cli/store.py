"""Commands about activation stores: ``store info``, ``store verify``, ``store merge``, ``store export``."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer

from experiments.cli.app import Json, app, flag, place, terminable
from experiments.errors import RunError, UsageError

store = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Look into, check, merge and export stores.")
app.add_typer(store, name="store")

Directory = Annotated[str, typer.Argument(help="Directory of an activation store.", show_default=False)]


@store.command()
def info(directory: Directory, json_: Json = False) -> None:
    """Say what a store holds and what made it; works on a capture in progress too."""
    import json
    from dataclasses import asdict

    from activations.store_checking import info as describe

    found = describe(place("directory", directory))
    if json_:
        sys.stdout.write(json.dumps(asdict(found), indent=1) + "\n")
    else:
        _show(asdict(found))


@store.command()
def verify(directory: Directory, json_: Json = False) -> None:
    """Read all of a store: hashes, checksums, finite values, every row once. One line a fault, exit code 1 if any."""
    import json

    from activations.store_checking import verify as faults_of

    faults = faults_of(place("directory", directory))
    if json_:
        sys.stdout.write(json.dumps({"store": str(directory), "faults": faults}, indent=1) + "\n")
    else:
        for fault in faults:
            sys.stdout.write(f"{fault}\n")
    if faults:
        raise RunError(f"{directory} has {len(faults)} fault{'s' * (len(faults) > 1)}: see the lines above")
    if not json_:
        sys.stdout.write(f"{directory} is whole\n")


@store.command()
def merge(
    parts: Annotated[list[str], typer.Argument(help="Stores of one model and plan, with different prompts.")],
    out: Annotated[str, flag("out", "Directory of the merged store.", "-o")],
    json_: Json = False,
) -> None:
    """Put stores that several processes captured together, rows in the order of the parts."""
    import json

    from activations.store_merging import merge as put_together

    if len(parts) < 2:
        raise UsageError(f"{len(parts)} stores to merge: give at least two")
    with terminable():
        merged = put_together([place("a part", part) for part in parts], place("out", out))
    if json_:
        sys.stdout.write(json.dumps({"store": str(out), "rows": len(merged), "parts": len(parts)}, indent=1) + "\n")
    else:
        sys.stdout.write(f"{out}: {len(merged)} rows of {len(parts)} stores\n")


@store.command()
def export(
    directory: Directory,
    out: Annotated[str, flag("out", "File to write.", "-o")],
    format_: Annotated[str, typer.Option("--format", help="safetensors, npz or transformer_lens.")] = "safetensors",
    sites: Annotated[str | None, flag("sites", "resid_post,z or TransformerLens names; all if not given.")] = None,
    layers: Annotated[str | None, flag("layers", "0-3,8 or -1; all if not given.")] = None,
    key: Annotated[str | None, flag("key", "Instance keys, with commas.")] = None,
    presentation: Annotated[str | None, flag("presentation", "original,equivalent, …; all if not given.")] = None,
    label: Annotated[str | None, flag("label", "answer,premise:17; premise: for all premises.")] = None,
    json_: Json = False,
) -> None:
    """Write one file that other programs read: safetensors, npz, or the arrays of a TransformerLens ActivationCache."""
    import json

    from activations.errors import StoreError
    from activations.store import ActivationStore
    from activations.store_export import check_export
    from experiments.capture import layer_numbers, words

    target = place("out", out)
    opened = ActivationStore.open(place("directory", directory))
    chosen = {"key": words(key), "presentation": words(presentation), "label": words(label)}
    named, numbers = words(sites), layer_numbers(layers)
    if empty := [name for name, value in {**chosen, "sites": named, "layers": numbers}.items() if value == ()]:
        raise UsageError(f"{empty[0]} is empty: name one, or leave the flag out for all")
    try:
        rows = opened.select(**chosen) if any(chosen.values()) else None
        check_export(opened, target, format_, sites=named, layers=numbers, rows=rows)
    except StoreError as error:  # what makes no file is a value that the user gave; what comes later is not
        raise UsageError(str(error)) from None
    with terminable():
        path = opened.export(target, format_, sites=named, layers=numbers, rows=rows)
    size, n_rows = path.stat().st_size, len(opened) if rows is None else len(rows)
    if json_:
        said = {"file": str(path), "format": format_, "rows": n_rows, "bytes": size}
        sys.stdout.write(json.dumps(said, indent=1) + "\n")
    else:
        sys.stdout.write(f"{path}: {n_rows} rows, {size / 1e6:.3g} MB\n")


def _show(found: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    model, shards = found["model"], found["shards"]
    lines = {
        "model": " ".join(str(model.get(name)) for name in ("name", "source") if model.get(name)),
        "revision": model.get("revision") or "-",
        "weights": str(model.get("weights"))[:16],
        "adapter": " ".join(str(value)[:40] for value in found["adapter"].values() if value) or "none",
        "computed in": f"{model.get('dtype')}, attention {model.get('attention')}, {model.get('device')}",
        "stored as": found["dtype"],
        "readout": ", ".join(found["readout"]) if found["readout"] else "none",
        "rows": f"{found['n_rows']} of {found['n_keys']} instances",
        "shards": f"{shards['there']} of {shards['total']}"
        + (f", merged from {found['parts']} stores" if found["parts"] > 1 else ""),
        "bytes": f"{found['bytes']:,}",
        "versions": ", ".join(f"{name} {version}" for name, version in found["versions"].items()) or "-",
    }
    table = Table(show_header=False, box=None, title=found["path"], title_justify="left")
    for name, value in lines.items():
        table.add_row(name, value)
    console.print(table, highlight=False)
    sites = Table("site", "layers", "width", "heads", title_justify="left")
    for one in found["sites"]:
        heads = ",".join(map(str, one.get("heads", []))) or "-"
        sites.add_row(one["site"], one["layers"], ",".join(map(str, one["width"])), heads)
    console.print(sites, highlight=False)
    rows = Table("presentation", "label", "rows", title_justify="left")
    for one in found["rows"][:40]:
        rows.add_row(one["presentation"] or "-", one["label"], str(one["rows"]))
    console.print(rows, highlight=False)
    if len(found["rows"]) > 40:
        console.print(f"and {len(found['rows']) - 40} more presentations and labels: --json lists all", highlight=False)
