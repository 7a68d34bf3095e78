"""Commands that measure a store's activations without a run: ``fit`` (probes) and ``lens``."""

from __future__ import annotations

import math
import sys
import tempfile
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from experiments.cli.app import (
    Adapter,
    Device,
    Json,
    Model,
    Resamples,
    Seed,
    app,
    columns,
    flag,
    integer,
    joined,
    place,
    wrapped,
)
from experiments.errors import RunError, UsageError

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
KEPT = "identity"  # how a layer begins that keeps the plain lens


@app.command()
def fit(
    store: Where,
    target: Annotated[
        str, flag("target", "gold, answer, correct, presentation, or a target that the family derives.")
    ] = "gold",
    site: Annotated[str, flag("site", "resid_post, z, … as the store holds them.")] = "resid_post",
    layers: Annotated[list[str] | None, flag("layers", "0-3,8 or -1; all of the store if not given.")] = None,
    position: Annotated[str, flag("position", "answer, query/mean, premise:3, … as captured.")] = "answer",
    train: Annotated[list[str] | None, flag("train", "Presentations to train on; original if not given.")] = None,
    read: Annotated[list[str] | None, flag("read", "Presentations that the same probes are read on besides.")] = None,
    member: Annotated[str | None, flag("member", "logistic, ridge or mean_difference.")] = None,
    penalty: Annotated[
        list[str] | None, flag("penalty", "Inverse L2 strength; of several, inner folds choose.")
    ] = None,
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
        layers=layer_numbers(joined(layers)),
        position=position,
        train=words(joined(train)),
        read=words(joined(read)),
        probe={"member": member, "penalty": words(joined(penalty)), "inner_folds": inner_folds, "folds": folds,
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
        said = {
            **found.about,
            "meaning": found.meaning,
            "curves": curves,
            "layers": layered,
            "notes": list(found.notes),
        }
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
    presentation: Annotated[list[str] | None, flag("presentation", "original,equivalent, …; all if not given.")] = None,
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
        presentations=words(joined(presentation)),
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
    return None if text is None else place(f"--{name}", text)


def _file(out: str | None) -> Path | None:
    """Where a table goes; checked before anything is computed."""
    if out is None:
        return None
    path = place("--out", out)
    if path.suffix not in SUFFIXES:
        raise UsageError(f"--out is {out!r}: give a file that ends in {' or '.join(SUFFIXES)}")
    if path.is_dir() or not path.parent.is_dir():
        raise UsageError(f"--out is {out!r}: give a file in a folder that exists")
    try:
        # Permission bits don't tell: a file system may be read-only, or hold no files of users at all.
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=".probe-"):
            pass
    except OSError as error:
        raise UsageError(
            f"--out is {out!r}, and no file can be made in {path.parent} ({error.strerror}): give another folder"
        ) from None
    return path


def _write(table: pd.DataFrame, path: Path | None) -> None:
    from experiments.rundir import atomic

    if path is None:
        return
    try:
        with atomic(path) as file:
            if path.suffix == ".csv":
                file.write(table.to_csv(index=False).encode())
            else:
                table.to_parquet(file, index=False)
    except OSError as error:  # it names the temporary file
        raise RunError(f"can't write {path}: {error.strerror or error}; give another --out") from None


def _show_fit(found: Fit, file: Path | None) -> None:
    about = found.about
    lines = [
        wrapped(f"{about['target']} from {about['site']} at {about['position']} ({about['store']}, {about['arm']})"),
        wrapped(found.meaning),
    ]
    for curve in found.curves:
        of = curve.summary
        held = f", {about['held_out_unit']} {curve.held_out} held out" if curve.held_out else ""
        other = f", read on {curve.read}" if curve.read != about["train"] else ""
        about_rows = f"{of['n']} rows of {of['instances']} instances, {of['ones']} with 1 and {of['zeros']} with 0"
        lines += ["", wrapped(f"trained on {about['train']}{other}{held}: {about_rows}")]
        if of["reason"]:
            lines.append(wrapped(f"no AUROC: {of['reason']}", first="  ", rest="    "))
            continue
        lines.append("  layer    AUROC [95%]          shuffled 95%   selectivity       p")
        here = found.table[(found.table["read"] == curve.read) & (found.table["held_out"] == curve.held_out)]
        lines += [_fit_line(one) for one in here.to_dict("records")]
        lines += [wrapped(line, first="  ", rest="    ") for line in _over_layers(of, about)]
    if (found.table["above_null"] == True).any():  # noqa: E712 - a curve without an AUROC has neither
        lines += ["", wrapped("* above the 95% quantile of the shuffles' largest AUROC over layers")]
    lines += [wrapped(f"note: {note}") for note in found.notes]
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
        f"first layer with AUROC ≥ {about['threshold']:g}: {first}",
        f"best layer {of['layer']}; p over all layers {_number(of['p_max'], '.3f')}",
        f"smallest AUROC that so few instances would show in 80% of studies: {detectable}",
        *([f"remark: {of['remark']}"] if of["remark"] else []),
    ]


LENS_HEADS = ("layer", "δ [95%]", "s [95%]", "gold", "off", "rank", "top token")
KL_HEADS = ("layer", "KL lens", "tuned", "constant", "")
LENS_WORDS = (
    "gold: share of rows that lean to the gold answer; off: off-label, the probability on no answer; rank: of the gold "
    "answer in the vocabulary, median; top token: the most frequent first, and its share of rows"
)
KL_WORDS = (
    "KL from the model's own output over held-out rows of all presentations, in nats: of the plain lens, of the tuned, and "
    "of the best constant answer"
)


def _show_lens(found: Lens, file: Path | None) -> None:
    about = found.about
    arm = f" with {about['adapter']}" if about["adapter"] else ""
    lines = [
        wrapped(f"logit lens of {about['model']}{arm} ({about['store']})"),
        wrapped(f"the last layer is the model's readout to {about['gap']:.0e}, bound {about['bound']:.0e}"),
    ]
    tuned = narrow = False
    width = columns()
    for (kind, name), part in found.table.groupby(["presentation", "lens"], sort=False):
        said = next(one for one in found.presentations if (one["presentation"], one["lens"]) == (kind, name))
        records = part.to_dict("records")
        tuned = tuned or name == "tuned"
        rows = f"{said['n']} rows"
        if name == "tuned":
            rows = f"{said['n']} of {said['of']} rows, of instances that fitted nothing"
        lines += ["", wrapped(f"{kind}, {name} lens, {rows}")]
        drawn = _aligned(LENS_HEADS, [_lens_cells(one) for one in records])
        if max(map(len, drawn)) > width:
            drawn = _aligned([head.removesuffix(" [95%]") for head in LENS_HEADS],
                             [[cell.partition(" [")[0] if place else cell for place, cell in enumerate(_lens_cells(one))]
                              for one in records])  # fmt: skip
            narrow = True
        lines += drawn
        if reasons := list(dict.fromkeys(one["reason"] for one in records if one["reason"])):
            lines.append(wrapped("; ".join(reasons), first="  ", rest="    "))
        if name == "tuned":
            lines += _aligned(KL_HEADS, [_kl_cells(one) for one in records])
            if kept := [str(one["layer"]) for one in records if one["how"].startswith(KEPT)]:
                lines.append(wrapped(f"keeps the plain lens: layer {', '.join(kept)}", first="  ", rest="    "))
            lines += [
                wrapped(f"layer {one['layer']}: {one['how']}", first="  ", rest="    ")
                for one in records
                if not one["how"].startswith(KEPT)
            ]
        lines.append(wrapped(said["reading"], first="  ", rest="    "))
    lines += ["", wrapped(LENS_WORDS), *([wrapped(KL_WORDS)] if tuned else [])]
    lines += [wrapped("intervals stand in --json and --out: the terminal is too narrow for them")] if narrow else []
    sys.stdout.write("\n".join(lines) + "\n")
    if file is not None:
        sys.stdout.write(f"{file}\n")


def _aligned(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows under heads, numbers to the right and the last column to the left, as narrow as they can be."""
    widths = [max(map(len, column)) for column in zip(heads, *rows, strict=True)]
    return [
        "  "
        + "  ".join([*(cell.rjust(width) for cell, width in zip(row[:-1], widths, strict=False)), row[-1]]).rstrip()
        for row in (heads, *rows)
    ]


def _lens_cells(one: dict[str, Any]) -> list[str]:
    return [
        str(one["layer"]),
        *(_interval(*(one[f"{name}{end}"] for end in ("", "_low", "_high"))) for name in ("delta", "signal")),
        f"{one['accuracy']:.0%}",
        f"{one['off_label_mass']:.0%}",
        f"{one['gold_rank']:,.0f}",
        f"{one['top_token']!r} {one['top_share']:.0%}",
    ]


def _interval(value: float, low: float, high: float) -> str:
    ends = "" if math.isnan(low) or math.isnan(high) else f" [{low:+.2f}, {high:+.2f}]"
    return f"{_number(value, '+.2f')}{ends}"


def _kl_cells(one: dict[str, Any]) -> list[str]:
    numbers = [f"{one[name]:.3f}" for name in ("kl_lens", "kl_tuned", "kl_constant")]
    return [str(one["layer"]), *numbers, "worse than the constant" if one["kl_tuned"] > one["kl_constant"] else ""]


def _number(value: float, form: str = ".2f") -> str:
    return "–" if value is None or math.isnan(value) else format(value, form)
