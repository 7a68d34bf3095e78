"""The page: view data into the template, one string out.

The template prints and decides nothing. Autoescape is on, and every value that it prints goes through ``clean`` first,
so no text from a model, an item or a file name reaches the page as markup or as a control character. The only values
that are let through as they are (``Markup``) are the drawings and the style sheet, which this package makes itself.
"""

from __future__ import annotations

import json
import shlex
from importlib.resources import files
from typing import Any

from jinja2 import DictLoader, Environment, StrictUndefined
from markupsafe import Markup

from experiments.inside import PAIR
from experiments.link import KINDS, OUTCOMES
from experiments.report import (
    plots_behaviour,
    plots_causes,
    plots_inside,
    plots_parts,
    tables,
    tables_behaviour,
    tables_inside,
)
from experiments.report.findings import Finding, findings, trade_off
from experiments.report.pairs import pairs
from experiments.report.source import Source, shown
from experiments.report.text import DASH, OUTCOME_NAMES, clean, listed, plural

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
    here = files("experiments.report")
    environment = Environment(
        loader=DictLoader({name: (here / name).read_text("utf-8") for name in ("page.html", "macros.html")}),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_finalize,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    style = Markup((here / "page.css").read_text("utf-8"))
    return environment.get_template("page.html").render(style=style, **_view(source))


def _finalize(value: Any) -> Any:
    return clean(value) if isinstance(value, str) and not isinstance(value, Markup) else value


def _view(source: Source) -> dict[str, Any]:
    return {
        "title": _title(source),
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
        "heads": plots_causes.heads(source),
        "ranked_on": _ranked_on(source),
        "trade_offs": [
            (shown(arm), text)
            for arm in source.arms
            if (text := trade_off(source.arm(arm)["ablation"]["sets"], strict=False))
        ],
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
        **_reproduce(source),
    }


def _title(source: Source) -> str:
    adapters = source.arms[1:]
    name = shown(str(source.environment["model"]["name"]).rstrip("/"))
    name = name.rsplit("/", 1)[-1] if name.startswith("/") else name
    kind = "adapter" if len(adapters) == 1 else "adapters"
    return f"{name} with {kind} {listed([shown(arm) for arm in adapters])}" if adapters else name


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
    grid: list[dict[str, Any]] = list(resolved["params"].values())
    fixed = {name: value for name, value in grid[0].items() if all(one[name] == value for one in grid)}
    fixed.pop("presentations", None)
    several = len(source.settings) > 1
    return [
        ("model", str(model["name"])),
        ("adapters", listed([shown(arm) for arm in source.arms[1:]]) if len(source.arms) > 1 else "none"),
        ("family", f"{resolved['family']}, version {resolved['family_version']}, {resolved['split']} split"),
        *([("settings", "; ".join(source.settings))] if several else []),
        ("parameters of all settings" if several else "parameters", _listed_values(fixed)),
        ("pairs", f"{count} ({plural(resolved['limit'], 'pair')} a setting)" if several else count),
        ("presentations", listed([*PAIR, *map(shown, source.unpaired)])),
        ("numerics", f"{model['dtype']} on {model['device']}, {model['attention']} attention"),
        ("seed", str(resolved["seed"])),
    ]


def _listed_values(values: dict[str, Any]) -> str:
    return ", ".join(f"{name}={_text(value)}" for name, value in values.items()) or "none"


def _statuses(source: Source) -> list[tuple[str, str]]:
    """For each arm how its answers could be read."""
    found = []
    for arm in source.arms:
        status = source.arm(arm)["behaviour"]["status"]
        parts = [f"{kind}: {', '.join(f'{count:,} {name}' for name, count in status[kind].items())}" for kind in PAIR]
        found.append((shown(arm), "; ".join(parts)))
    return found


def _reproduce(source: Source) -> dict[str, Any]:
    environment = source.environment
    model = environment["model"]
    identity = {key: value for key, value in model.items() if key not in ("versions", "adapters")}
    return {
        "command": shlex.join(["probe", *map(str, environment["command"][1:])]),
        "versions": [(name, version or "not installed") for name, version in environment["versions"].items()],
        "machine": [(key, _text(environment[key])) for key in ("python", "platform", "processor", "threads", "git")],
        "identity": [(key, _text(value)) for key, value in identity.items()],
        "adapters": [(name, _text(value)) for name, value in model["adapters"].items()],
        "resolved": json.dumps(source.resolved, indent=1, ensure_ascii=False),
        "methods": _methods(source.results),
    }


def _text(value: Any) -> str:
    if value is None:
        return DASH
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _methods(value: Any) -> list[str]:
    """Every method named in the results, once, in order of appearance."""
    found: dict[str, None] = {}

    def walk(one: Any) -> None:
        if isinstance(one, dict):
            if isinstance(one.get("method"), str):
                found[one["method"]] = None
            for inner in one.values():
                walk(inner)
        elif isinstance(one, list):
            for inner in one:
                walk(inner)

    walk(value)
    return list(found)
