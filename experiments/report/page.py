"""The page of a whole study: its files into view data, one string out."""

from __future__ import annotations

from typing import Any

from experiments.inside import PAIR
from experiments.link import KINDS, OUTCOMES
from experiments.report import (
    about,
    plots_behaviour,
    plots_causes,
    plots_inside,
    plots_parts,
    tables,
    tables_behaviour,
    tables_inside,
)
from experiments.report.findings import Finding, findings
from experiments.report.intervention_findings_heads import competence
from experiments.report.intervention_source import of_study
from experiments.report.pairs import pairs
from experiments.report.plots_interventions import less_controls
from experiments.report.plots_interventions_heads import beyond_controls, one_by_one
from experiments.report.source import Source, shown
from experiments.report.template import render
from experiments.report.text import OUTCOME_NAMES, listed, plural

SECTIONS = (
    ("summary", "In short"),
    ("link", "Link"),
    ("profile", "Profile"),
    ("comparison", "Adapter against base"),
    ("probes", "Probes"),
    ("lens", "Logit lens"),
    ("components", "Components"),
    ("patching", "Patching"),
    ("heads", "Heads"),
    ("pairs", "Pairs"),
    ("reproduce", "Reproduce"),
)


def page(source: Source) -> str:
    """The whole report as one HTML document."""
    return render("page.html", _view(source))


def _view(source: Source) -> dict[str, Any]:
    moved = of_study(source)
    return {
        "title": about.title(source.environment, source.arms),
        "facts": _facts(source),
        "sections": [(key, name) for key, name in SECTIONS if key != "comparison" or len(source.arms) > 1],
        "glance": tables.glance(source),
        "findings": _grouped(source),
        "section_names": dict(SECTIONS),
        "link": tables.link(source),
        "readouts": plots_behaviour.readouts(source),
        "failures": plots_behaviour.failures(source),
        "profile": plots_behaviour.profile(source),
        "competence": tables_behaviour.competence(source),
        "bias": tables_behaviour.bias(source),
        "statuses": _statuses(source),
        "differences": plots_behaviour.differences(source),
        "differences_table": tables_behaviour.differences(source),
        "probes": plots_inside.probes(source),
        "probes_table": tables_inside.probes(source),
        "by_setting": plots_inside.by_setting(source),
        "transfer": plots_parts.transfer(source),
        "between_arms": tables_inside.between_arms(source),
        "labels": plots_parts.labels(source),
        "calibration": tables_inside.calibration(source),
        "components": plots_parts.components(source),
        "component_change": plots_parts.component_change(source),
        "lens": plots_inside.lens(source),
        "lens_gap": _gap(float(source.tables["lens"]["gap"].max())),
        "patching": plots_causes.patching(source),
        "agreeing": plots_causes.agreeing(source),
        "sweeps": tables_inside.sweeps(source),
        "less_controls": less_controls(moved),
        "heads": plots_causes.heads(source),
        "head_grid": one_by_one(moved),
        "beyond_controls": beyond_controls(moved),
        "cut": plots_causes.cut(source),
        "ranked_on": _ranked_on(source),
        "trade_offs": [(shown(arm), text) for arm in source.arms if (text := competence(moved, arm)[0])],
        "ablation": plots_causes.ablation(source),
        "ablation_table": tables_inside.ablation(source),
        "ablated": source.resolved["ablate"]["heads"],
        "note": source.profile("base").get("note", ""),
        "pairs": pairs(source),
        "pair_count": f"{source.profile('base')['n']:,}",
        "arms": [shown(arm) for arm in source.arms],
        "settings": [shown(setting) for setting in source.settings],
        "outcomes": [(outcome, OUTCOME_NAMES[outcome]) for outcome in OUTCOMES],
        "outcome_names": OUTCOME_NAMES,
        "kinds": KINDS,
        "presentations": PAIR,
        "threshold": source.resolved["probe"]["threshold"],
        "config": source.resolved,
        **about.reproduced(source.environment, source.resolved, about.methods(source.results)),
    }


def _grouped(source: Source) -> list[tuple[str, list[Finding]]]:
    """Sentences under headings: each arm, then the comparison."""
    found = findings(source)
    groups = [
        (shown(arm), [one for one in found if one.arm == arm and one.section != "comparison"]) for arm in source.arms
    ]
    return [*groups, ("adapter against base", [one for one in found if one.section == "comparison"])]


def _gap(largest: float) -> str:
    return f"largest relative difference {largest:.1e}" if largest else "equal bit for bit"


def _ranked_on(source: Source) -> str:
    bases = {arm: source.arm(arm)["ablation"]["ranked_on"] for arm in source.arms}
    if len(set(bases.values())) == 1:
        return str(next(iter(bases.values())))
    return "; ".join(f"{shown(arm)}: {basis}" for arm, basis in bases.items())


def _facts(source: Source) -> list[tuple[str, str]]:
    resolved, model = source.resolved, source.environment["model"]
    count = f"{source.profile('base')['n']:,}"
    several = len(source.settings) > 1
    return [
        ("model", str(model["name"])),
        ("adapters", listed([shown(arm) for arm in source.arms[1:]]) if len(source.arms) > 1 else "none"),
        ("family", f"{resolved['family']}, version {resolved['family_version']}, {resolved['split']} split"),
        *([("settings", "; ".join(source.settings))] if several else []),
        ("parameters of all settings" if several else "parameters", about.parameters(resolved)),
        ("pairs", f"{count} ({plural(resolved['limit'], 'pair')} a setting)" if several else count),
        ("presentations", listed([*PAIR, *map(shown, source.unpaired)])),
        ("numerics", f"{model['dtype']} on {model['device']}, {model['attention']} attention"),
        ("seed", str(resolved["seed"])),
    ]


def _statuses(source: Source) -> list[tuple[str, str]]:
    """For each arm how its answers could be read."""
    found = []
    for arm in source.arms:
        status = source.arm(arm)["behaviour"]["status"]
        parts = [f"{kind}: {', '.join(f'{count:,} {name}' for name, count in status[kind].items())}" for kind in PAIR]
        found.append((shown(arm), "; ".join(parts)))
    return found
