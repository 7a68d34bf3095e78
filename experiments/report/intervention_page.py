"""The report of `probe patch` and `probe ablate`: sentences, drawings, tables, and how to make it again.

The page has the style of a whole study's and only the sections that the run has tables for. Each drawing is also written
as a file of its own into ``figures/``, for a paper or a talk; both come from the same panels, so they show the same.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from experiments.report import about
from experiments.report import intervention_tables as tables
from experiments.report.drawing import Figure, Panel
from experiments.report.findings_wrong import Finding
from experiments.report.intervention_findings import findings
from experiments.report.intervention_findings_heads import competence
from experiments.report.intervention_source import Interventions, read
from experiments.report.plots_interventions import layer_curves
from experiments.report.plots_interventions_heads import (
    before_after,
    beyond_controls,
    one_by_one,
    patched_heads,
    ranking,
)
from experiments.report.plots_interventions_maps import span_maps
from experiments.report.plots_interventions_more import estimates, transplants
from experiments.report.source import shown
from experiments.report.tables import Table
from experiments.report.template import render
from experiments.report.text import listed, plural
from experiments.rundir import RunDirectory

FIGURES = "figures"
MARGIN, GAP, HEADING = 14, 22, 26  # pixels of a figure file
LETTER = 7.4  # width of a letter of a legend


@dataclass(frozen=True, slots=True)
class Heading:
    """A heading between figures."""

    heading: str


@dataclass(frozen=True, slots=True)
class Section:
    """A part of the page: figures, tables, headings and notes in their order."""

    key: str
    short: str
    title: str
    lead: str
    parts: tuple[Figure | Table | Heading | Finding, ...]


def write(run: RunDirectory) -> None:
    """Write report.html and figures/*.svg of a finished run.

    Raises:
        RunError: the run is another command's, or a file of it is missing.
    """
    source = read(run)
    sections = _sections(source)
    run.write_text("report.html", page(source, sections))
    folder = run.path / FIGURES
    shutil.rmtree(folder, ignore_errors=True)  # drawings of an earlier version would stay beside the new ones
    drawings = [part for section in sections for part in section.parts if isinstance(part, Figure)]
    if drawings:
        folder.mkdir()
    for figure in drawings:
        run.write_text(f"{FIGURES}/{figure.name}.svg", figure_file(figure))


def page(source: Interventions, sections: list[Section] | None = None) -> str:
    """The report as one HTML document."""
    sections = _sections(source) if sections is None else sections
    found = findings(source)
    texts = [str(one) for table in source.tables.values() if "method" in table for one in table["method"].unique()]
    return render(
        "intervention.html",
        {
            "title": f"{'Patching' if source.command == 'patch' else 'Ablation'}: "
            f"{about.title(source.environment, source.arms)}",
            "lead": LEADS[source.command],
            "facts": _facts(source),
            "sections": sections,
            "section_names": {section.key: section.short for section in sections},
            "findings": [(shown(arm), [one for one in found if one.arm == arm]) for arm in source.arms],
            "caution": CAUTIONS["given" if source.resolved.get("chosen") else source.command],
            "command_name": source.command,
            **about.reproduced(source.environment, source.resolved, [one for one in dict.fromkeys(texts) if one]),
        },
    )


LEADS = {
    "patch": "The same question in two wordings: activations of one put into the run of the other, and what that does "
    "to the readout, beside what other donors do.",
    "ablate": "The same question in two wordings, with some attention heads cut: what is left of competence and of "
    "agreement, beside what cutting as many random heads does.",
}
CAUTIONS = {
    "patch": "An effect counts as far as it exceeds those of the controls, by a rule that was fixed before the run. It "
    "shows that the readout depends on the activation there, not what the model computes with it. What is not said was "
    "not shown by this run, at this size.",
    "ablate": "Heads are chosen on other instances than those they are cut on, so that the choice can't flatter the "
    "effect. A change counts as far as it exceeds that by random heads. What is not said was not shown by this run, at "
    "this size.",
    "given": "The heads were given, so this run can't tell whether the choice flatters the effect: it does if they "
    "were chosen on these instances. A change counts as far as it exceeds that by random heads. What is not said was "
    "not shown by this run, at this size.",
}


def _facts(source: Interventions) -> list[tuple[str, str]]:
    resolved, model = source.resolved, source.environment["model"]
    adapters = listed([shown(arm) for arm in source.arms[1:]]) if len(source.arms) > 1 else "none"
    settings = list(resolved["params"])
    return [
        ("model", str(model["name"])),
        ("adapters", adapters),
        ("family", f"{resolved['family']}, version {resolved['family_version']}, {resolved['split']} split"),
        *([("settings", "; ".join(map(shown, settings)))] if len(settings) > 1 else []),
        ("parameters", about.parameters(resolved)),
        ("instances a setting", str(resolved["limit"])),
        *(_patched(source) if source.command == "patch" else _ablated(source)),
        ("numerics", f"{model['dtype']} on {model['device']}, {model['attention']} attention"),
        ("seed", str(resolved["seed"])),
    ]


def _patched(source: Interventions) -> list[tuple[str, str]]:
    resolved = source.resolved
    arms = source.results["arms"]
    pairs = []
    for arm in source.arms:
        counts = [f"{one['patched']} of {one['found']} {kind}" for kind, one in arms[arm]["pairs"].items()]
        pairs.append(f"{shown(arm)}: {', '.join(counts)}")
    layers = resolved["layers"]
    return [
        ("sites", ", ".join(resolved["sites"])),
        ("layers", "all" if layers is None else ", ".join(map(str, layers))),
        ("positions", ", ".join(resolved["positions"])),
        ("controls", ", ".join(resolved["controls"]) or "none"),
        ("pairs patched", "; ".join(pairs)),
        (
            "compared with the controls by",
            "share flipped" if resolved["decides"] == "flipped" else "effect in logits",
        ),
    ]


def _ablated(source: Interventions) -> list[tuple[str, str]]:
    resolved = source.resolved
    heads = listed([str(one) for one in resolved["chosen"]]) if resolved["chosen"] else (
        f"first {resolved['heads']} by patch effect"
    )  # fmt: skip
    replaced = {"zero": "nothing (zero)", "mean": "its mean over other instances", "resample": "another instance's"}
    pairs = source.results["pairs"]
    halves = f"{pairs['ranked']} rank, {pairs['tested']} are cut"
    if pairs["left_out"]:
        halves += f", {pairs['left_out']} left out (their instance is on the other side)"
    held = resolved["held_out"]
    sets = plural(int(resolved["random_sets"]), "random set")
    return [
        ("heads", heads),
        ("cut at", {"answer": "the answer position", "all": "all positions"}[resolved["scope"]]),
        ("in a head's place", replaced[resolved["source"]]),
        ("pairs", halves + (f"; {held} held out: {', '.join(map(str, resolved['test'] or []))}" if held else "")),
        (
            "controls",
            f"up to {sets} of as many heads, all different, and of the same layers",
        ),
    ]


def _sections(source: Interventions) -> list[Section]:
    made = _patch_sections(source) if source.command == "patch" else _ablate_sections(source)
    return [one for one in made if one.parts]


def _patch_sections(source: Interventions) -> Iterable[Section]:
    curves: dict[str, list[Figure]] = {}
    for kind, figure in layer_curves(source):
        curves.setdefault(kind, []).append(figure)
    parts: list[Heading | Figure] = []
    for kind, figures in curves.items():
        parts += [Heading(KIND_TITLES[kind]), *figures]
    yield Section(
        "patching", "Layers", "Layers: where does the donor's answer arrive?",
        "One layer at a time. What counts is where the matched donor parts from its controls: an unrelated instance's "
        "activation is as natural and carries another content; a random direction of the same length only disturbs.",
        tuple(parts),
    )  # fmt: skip
    yield Section(
        "positions", "Positions", "Layers and positions",
        "One layer and one span of the prompt at a time. A hatched cell was not measured.", tuple(span_maps(source)),
    )  # fmt: skip
    yield Section(
        "heads", "Heads", "Heads, one by one",
        "One head's output at a time, before the projection that mixes heads. A hatched cell is no head.",
        tuple(patched_heads(source)),
    )  # fmt: skip
    yield Section(
        "transplant", "Base and adapter", "What carries the adapter's gain",
        "Both arms read the same tokens, so each one's activation can stand in the other's run. The gain is the "
        "adapter's readout less the base's, toward the gold answer.", tuple(transplants(source)),
    )  # fmt: skip
    yield Section(
        "estimates", "Estimates", "Estimates from gradients",
        "One forward and one backward pass estimate every cell at once. Here both were made, to see whether the "
        "estimate would have been enough.", _there(estimates(source), tables.quality(source)),
    )  # fmt: skip
    yield Section(
        "numbers", "Numbers", "Numbers, and what they ran on",
        "All groups of cells, with what was left out and why a number is missing.",
        _there(tables.studies(source), tables.sweeps(source)),
    )  # fmt: skip


KIND_TITLES = {
    "disagreement": "Pairs whose two readouts disagree",
    "agreement": "Pairs whose two readouts are both right",
    "shared error": "Pairs whose two readouts are both wrong",
}


def _ablate_sections(source: Interventions) -> Iterable[Section]:
    yield Section(
        "ranking", "Which heads", "Which heads",
        "Every head's output at the answer position is replaced, by itself, by that of the pair's other presentation. "
        "Heads are ranked by how far this moves the readout toward the donor's.",
        _there(ranking(source), tables.heads(source)),
    )  # fmt: skip
    notes = [
        Finding(arm, f"{shown(arm)}.", f"{text.split('. ')[0].split('.')[0]}.", "ablation")
        for arm in source.arms
        if (text := competence(source, arm)[0])
    ]
    yield Section(
        "ablation", "Without them", "Without them: competence and agreement",
        "Both presentations of every pair that takes no part in the ranking, as they are and with the heads cut. "
        "Agreement is no merit by itself: a model that always says yes agrees with itself.",
        (*notes, *_there(before_after(source), beyond_controls(source), tables.ablation(source))),
    )  # fmt: skip
    yield Section(
        "grid", "Every head", "Every head by itself",
        "Each head cut alone, on the same pairs.", _there(one_by_one(source)),
    )  # fmt: skip
    yield Section(
        "numbers", "Cost", "What it ran on", "Every sweep checks itself against plain forward passes.",
        _there(tables.sweeps(source)),
    )  # fmt: skip


def _there(*parts: Any) -> tuple[Any, ...]:
    return tuple(part for part in parts if part is not None)


def figure_file(figure: Figure) -> str:
    """A figure as one SVG file: legend above, panels two in a row, the caption as its description."""
    across = 1 if len(figure.panels) == 1 else 2
    boxes = [_box(panel) for panel in figure.panels]
    column = max(box[0] for box in boxes)
    width = across * column + (across - 1) * GAP + 2 * MARGIN
    keys, y = [], MARGIN
    x = MARGIN
    for key in figure.keys:
        needed = 34 + int(LETTER * len(key.label)) + 20
        if x + needed > width - MARGIN and x > MARGIN:
            x, y = MARGIN, y + 20
        keys.append((key, x, y))
        x += needed
    top = y + (40 if figure.keys else 14)
    panels = []
    for start in range(0, len(boxes), across):
        for place, box in enumerate(boxes[start : start + across]):
            panels.append((figure.panels[start + place], MARGIN + place * (column + GAP), top, box))
        top += max(box[1] for box in boxes[start : start + across]) + HEADING + GAP
    view = {"caption": figure.caption, "width": width, "height": top - HEADING, "keys": keys, "panels": panels}
    return render("figure.svg", view)


def _box(panel: Panel) -> tuple[int, int]:
    found = re.search(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', str(panel.svg))
    assert found is not None  # drawn by this package
    return round(float(found[1])), round(float(found[2]))
