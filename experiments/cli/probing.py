"""Commands that measure a store's activations without a run: ``fit`` (probes) and ``lens``."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from experiments.cli.app import Adapter, Device, Json, Model, Resamples, Seed, app, flag, integer, place
from experiments.errors import UsageError

if TYPE_CHECKING:
    from pathlib import Path

    import pandas as pd

    from experiments.fit_command import Fit
    from experiments.lens_command import Lens

Where = Annotated[
    str, typer.Argument(help="A store of `probe capture`, a run, or RUN/activations/ARM.", show_default=False)
]
Run = Annotated[str | None, flag("run", "Run on the same prompts, for a store of its own.")]
Items = Annotated[str | None, flag("items", "File of `probe generate`, for a store without items.")]
Arm = Annotated[str | None, flag("arm", "Arm of a run; base if not given.")]
Out = Annotated[str | None, flag("out", "Write a tidy table: FILE.parquet or FILE.csv.", "-o")]
SUFFIXES = (".parquet", ".csv")


@app.command()
def fit(
    store: Where,
    target: Annotated[
        str, flag("target", "gold, answer, correct, presentation, or a target that the family derives.")
    ] = "gold",
    site: Annotated[str, flag("site", "resid_post, z, … as the store holds them.")] = "resid_post",
    layers: Annotated[str | None, flag("layers", "0-3,8 or -1; all of the store if not given.")] = None,
    position: Annotated[str, flag("position", "answer, query/mean, premise:3, … as captured.")] = "answer",
    train: Annotated[str | None, flag("train", "Presentations to train on; original if not given.")] = None,
    read: Annotated[str | None, flag("read", "Presentations that the same probes are read on besides.")] = None,
    member: Annotated[str | None, flag("member", "logistic, ridge or mean_difference.")] = None,
    penalty: Annotated[str | None, flag("penalty", "Inverse L2 strength; of several, inner folds choose.")] = None,
    inner_folds: Annotated[str | None, flag("inner-folds", "Folds that choose the penalty.")] = None,
    folds: Annotated[str | None, flag("folds", "Folds, grouped by instance.")] = None,
    held_out: Annotated[
        str | None, flag("held-out", "Parameter whose values folds hold out whole, or template.")
    ] = None,
    shuffles: Annotated[str | None, flag("shuffles", "Refits with shuffled labels.")] = None,
    threshold: Annotated[str | None, flag("threshold", "AUROC that counts as readable.")] = None,
    resamples: Resamples = None,
    seed: Seed = None,
    arm: Arm = None,
    run: Run = None,
    items: Items = None,
    family: Annotated[str | None, flag("family", "Where a derived target comes from: path/to/file.py:Name.")] = None,
    out: Out = None,
    json_: Json = False,
) -> None:
    """Fit linear probes to a store, layer by layer, with shuffled-label null, intervals and transfer."""
    import json

    from experiments.capture import layer_numbers, words
    from experiments.fit_command import fit as fit_probes
    from experiments.fit_options import choice
    from experiments.progress import Reporter
    from experiments.results import plain
    from experiments.store_items import open_store

    chosen = choice(
        target=target,
        site=site,
        layers=layer_numbers(layers),
        position=position,
        train=words(train),
        read=words(read),
        probe={"member": member, "penalty": words(penalty), "inner_folds": inner_folds, "folds": folds,
               "held_out": held_out, "shuffles": shuffles, "threshold": threshold},
        seed=seed,
        resamples=resamples,
    )  # fmt: skip
    file = _file(out)
    opened = open_store(
        place("store", store), run=_given("run", run), items=_given("items", items), arm=arm, family=family
    )
    found = fit_probes(opened, chosen, Reporter(quiet=json_))
    _write(found.table, file)
    if json_:
        layered = found.table.drop(columns=list(found.about)).to_dict("records")
        curves = [{"read": one.read, "held_out": one.held_out, **one.summary} for one in found.curves]
        said = {**found.about, "curves": curves, "layers": layered, "notes": list(found.notes)}
        sys.stdout.write(json.dumps(plain(said), indent=1) + "\n")
    else:
        _show_fit(found, file)


@app.command()
def lens(
    store: Where,
    model: Model = None,
    adapter: Adapter = None,
    tuned: Annotated[
        bool, typer.Option("--tuned", help="Fit a tuned lens as well; read on held-out instances.")
    ] = False,
    presentation: Annotated[str | None, flag("presentation", "original,equivalent, …; all if not given.")] = None,
    resamples: Resamples = None,
    seed: Seed = None,
    device: Device = None,
    arm: Arm = None,
    run: Run = None,
    items: Items = None,
    out: Out = None,
    json_: Json = False,
) -> None:
    """Read a store's layers through the model's own final norm and unembedding: δ, s, accuracy, ranks, by layer."""
    import json

    from experiments.capture import words
    from experiments.lens_command import read_lens
    from experiments.progress import Reporter
    from experiments.results import plain
    from experiments.store_items import open_store

    file = _file(out)
    numbers = {
        "resamples": integer("resamples", resamples, default=2000, least=100),
        "seed": integer("seed", seed, default=1),
    }
    opened = open_store(place("store", store), run=_given("run", run), items=_given("items", items), arm=arm)
    found = read_lens(
        opened,
        model=model,
        adapters=tuple(adapter or ()),
        presentations=words(presentation),
        tuned=tuned,
        device=device or "auto",
        reporter=Reporter(quiet=json_),
        **numbers,
    )
    _write(found.table, file)
    if json_:
        said = {**found.about, "presentations": found.presentations, "layers": found.table.to_dict("records")}
        sys.stdout.write(json.dumps(plain(said), indent=1) + "\n")
    else:
        _show_lens(found, file)


def _given(name: str, text: str | None) -> Path | None:
    return None if text is None else place(name, text)


def _file(out: str | None) -> Path | None:
    """Where a table goes; checked before anything is computed."""
    if out is None:
        return None
    path = place("out", out)
    if path.suffix not in SUFFIXES:
        raise UsageError(f"out is {out!r}: give a file that ends in {' or '.join(SUFFIXES)}")
    if path.is_dir() or not path.parent.is_dir():
        raise UsageError(f"out is {out!r}: give a file in a folder that exists")
    return path


def _write(table: pd.DataFrame, path: Path | None) -> None:
    from experiments.rundir import atomic

    if path is None:
        return
    with atomic(path) as file:
        if path.suffix == ".csv":
            file.write(table.to_csv(index=False).encode())
        else:
            table.to_parquet(file, index=False)


def _show_fit(found: Fit, file: Path | None) -> None:
    about = found.about
    lines = [f"{about['target']} from {about['site']} at {about['position']} ({about['store']}, {about['arm']})"]
    for curve in found.curves:
        of = curve.summary
        held = f", {about['held_out_unit']} {curve.held_out} held out" if curve.held_out else ""
        other = f", read on {curve.read}" if curve.read != about["train"] else ""
        about_rows = f"{of['n']} rows of {of['instances']} instances, {of['ones']} with 1 and {of['zeros']} with 0"
        lines.append(f"\ntrained on {about['train']}{other}{held}: {about_rows}")
        if of["reason"]:
            lines.append(f"  no AUROC: {of['reason']}")
            continue
        lines.append("  layer    AUROC [95%]          shuffled 95%   selectivity       p")
        here = found.table[(found.table["read"] == curve.read) & (found.table["held_out"] == curve.held_out)]
        lines += [_fit_line(one) for one in here.to_dict("records")]
        lines += _over_layers(of, about)
    lines.append("\n* above the 95% quantile of the shuffles' largest AUROC over layers")
    lines += [f"note: {note}" for note in found.notes]
    sys.stdout.write("\n".join(lines) + "\n")
    if file is not None:
        sys.stdout.write(f"{file}\n")


def _fit_line(one: dict[str, Any]) -> str:
    interval = f"{_number(one['auroc'])} [{_number(one['auroc_low'])}, {_number(one['auroc_high'])}]"
    null = f"{_number(one['null_low'])} to {_number(one['null_high'])}"
    tests = f"{_number(one['selectivity'], '+.2f'):>11}  {_number(one['p'], '.3f'):>6}"
    return f"  {one['layer']:>5}    {interval:<19}  {null:<13}  {tests}{'  *' if one['above_null'] else ''}"


def _over_layers(of: Any, about: Any) -> list[str]:
    from experiments.run_table import first_layer_text

    first = of["first_layer_reason"]
    if not math.isnan(of["first_layer"]):
        first = first_layer_text(
            of["first_layer"], of["first_layer_low"], of["first_layer_high"], of["first_layer_never"]
        )
    detectable = "undefined" if math.isnan(of["detectable_auroc"]) else f"{of['detectable_auroc']:.2f}"
    return [
        f"  first layer with AUROC ≥ {about['threshold']:g}: {first}",
        f"  best layer {of['layer']}; p over all layers {_number(of['p_max'], '.3f')}; smallest AUROC that so few "
        f"instances would show in 80% of studies: {detectable}",
    ]


def _show_lens(found: Lens, file: Path | None) -> None:
    about = found.about
    arm = f" with {about['adapter']}" if about["adapter"] else ""
    lines = [
        f"logit lens of {about['model']}{arm} ({about['store']}); the last layer is the model's readout to "
        f"{about['gap']:.0e}, bound {about['bound']:.0e}"
    ]
    for (kind, name), part in found.table.groupby(["presentation", "lens"], sort=False):
        tuned = name == "tuned"
        lines.append(f"\n{kind}, {name} lens, {part['n'].iloc[0]} rows")
        lines.append(f"  layer         δ          s  accuracy  off-label  gold rank  {'top token':<16}"
                     f"{'  KL lens, tuned, constant' if tuned else ''}".rstrip())  # fmt: skip
        lines += [_lens_line(one, tuned=tuned) for one in part.to_dict("records")]
        lines.append(_reading(found.presentations, str(kind), str(name)))
    sys.stdout.write("\n".join(lines) + "\n")
    if file is not None:
        sys.stdout.write(f"{file}\n")


def _lens_line(one: dict[str, Any], *, tuned: bool) -> str:
    top = f"{one['top_token']!r} {one['top_share']:.0%}"
    kl = f"  {one['kl_lens']:.3f}, {one['kl_tuned']:.3f}, {one['kl_constant']:.3f}" if tuned else ""
    split = f"{_number(one['delta'], '+.2f'):>9} {_number(one['signal'], '+.2f'):>10}"
    shares = f"{one['accuracy']:>9.0%} {one['off_label_mass']:>10.0%} {one['gold_rank']:>10,.0f}"
    return f"  {one['layer']:>5} {split} {shares}  {top:<16}{kl}".rstrip()


def _reading(presentations: Sequence[dict[str, Any]], kind: str, name: str) -> str:
    found = next(one for one in presentations if (one["presentation"], one["lens"]) == (kind, name))
    return f"  {found['reading']}"


def _number(value: float, form: str = ".2f") -> str:
    return "–" if value is None or math.isnan(value) else format(value, form)
