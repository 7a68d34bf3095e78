"""Whole runs without a model: readouts, activations and the effect of an edit are drawn; everything else is real.

Items, tables, statistics, probes and results are made by the package's own code.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest

from experiments import (
    ablate_halves,
    ablate_options,
    ablating,
    behaviour,
    fitting,
    inside,
    intervention_stage,
    items,
    patch_stage,
    probe_tables,
    probing,
)
from experiments.config import Config, resolved, settings
from experiments.patch_effects import effects_table
from experiments.patch_rows import Tokens
from experiments.pipeline import conclude
from experiments.progress import Reporter
from experiments.rundir import RunDirectory, append_lines, opened
from experiments.study import arm_table, stacked
from probes.decompose import decompose_layers
from tasks.registry import family as family_named

LABELS = ("yes", "no")


@dataclass(frozen=True)
class Made:
    """How a made-up arm answers: readout = default + signal × (+1 for gold yes, −1 for gold no) + noise."""

    default: float = -1.0
    signal: float = 1.5
    noise: float = 1.0
    text: Callable[[float], str] = lambda readout: "Yes" if readout > 0 else "No"


def make_run(
    path: Path,
    arms: Mapping[str, Made],
    *,
    params: Mapping[str, Any],
    limit: int = 24,
    heads: Sequence[int | None] = (2, None, 2, 2),
    environment: Mapping[str, Any] | None = None,
) -> RunDirectory:
    """A finished run directory."""
    config = Config(
        model="made-up", family="ordering", params=dict(params), limit=limit, resamples=100,
        probe={"folds": 3, "shuffles": 25, "penalty": 0.1, "splits": 2}, patch={"pairs": 8},
        ablate={"heads": 2, "random_sets": 3},
    )  # fmt: skip
    family = family_named("ordering")
    grid = settings(config, family)
    with opened(path, resolved(config, family, grid), "") as run:
        items.make(run, config, family, grid)
        asked = [row for _, made in items.stored(run) for row in items.rows(made)]
        parts: dict[str, list[pd.DataFrame]] = {}
        stores: dict[str, Any] = {}
        for number, (arm, made) in enumerate(arms.items()):
            rng = np.random.default_rng(number)
            table = items.frame(asked)
            sign = np.where(table["gold"] == "yes", 1.0, -1.0)
            difference = made.default + made.signal * sign + made.noise * rng.standard_normal(len(table))
            table = table.assign(yes=difference, no=0.0, difference=difference, off_label_mass=0.1, top="Yes")
            append_lines(
                run.responses, [_response(arm, row, made.text(d)) for row, d in zip(asked, difference, strict=True)]
            )
            stores[arm] = Store(sign, rng, len(heads))
            for name, part in _tables(run, arm, table, stores[arm], rng, heads, config).items():
                parts.setdefault(name, []).append(part.assign(arm=arm))
        tables = {name: pd.concat(each, ignore_index=True) for name, each in parts.items()}
        tables["behaviour"] = behaviour.table(
            behaviour.by_identity(behaviour.responses(run)), family, asked, list(arms)
        )
        params = {one.label: one.params for one in grid}
        tables |= _of_all_arms(asked, stores, tables, params, config)
        how: Any = {"seed": config.seed, "resamples": config.resamples}
        tables["patch_effects"] = effects_table(tables["patch"], None, params, config.patch, **how)
        for name, table in tables.items():
            run.write_table(name, table)
        tables["attribution"] = pd.concat([_attribution(run, arm, config) for arm in arms], ignore_index=True)
        run.write_table("attribution", tables["attribution"])
        run.write_table("attribution_shares", probing.label_shares(tables["attribution"]))
        conclude(run, list(arms), LABELS, params, config)
        run.write_json("environment.json", environment or _environment(arms))
    return run


def _response(arm: str, row: items.Row, text: str) -> str:
    setting, key, presentation = row.identity
    return json.dumps({
        "arm": arm, "setting": setting, "key": key, "presentation": presentation, "text": text,
        "finish_reason": "stop", "prompt_opened_think": False, "n_prompt_tokens": 9, "n_tokens": 1, "status": "answered",
        "attempt": 1,
    }) + "\n"  # fmt: skip


class Store:
    """Activations in memory: noise, and a gold direction that grows with the layer."""

    def __init__(self, sign: np.ndarray, rng: np.random.Generator, layers: int) -> None:
        noise = rng.standard_normal((layers, len(sign), 6))
        strength = np.linspace(0.1, 2.0, layers)[:, None] * sign
        resid = noise + strength[:, :, None] * np.array([1.0, 0, 0, 0, 0, 0])
        self.sites = {"resid_post": resid, "z": noise, "embed": noise[:1] * 0 + rng.standard_normal((1, len(sign), 6))}

    def __getitem__(self, where: tuple[str, int]) -> np.ndarray:
        return self.sites[where[0]][where[1]]

    def read(self, site: str, layer: int, rows: np.ndarray) -> np.ndarray:
        return self.sites[site][layer][rows]

    def stack(self, site: str, layers: Sequence[int], rows: np.ndarray) -> np.ndarray:
        return np.stack([self.sites[site][layer][rows] for layer in layers])


def _tables(
    run: RunDirectory,
    arm: str,
    table: pd.DataFrame,
    store: Store,
    rng: np.random.Generator,
    heads: Sequence[int | None],
    config: Config,
) -> dict[str, pd.DataFrame]:
    layers = len(heads)
    patch = _patch(run, arm, table, store, heads, config)
    data = intervention_stage.Arm(
        run=run,
        model=SimpleNamespace(n_layers=layers, heads=lambda layer: heads[layer]),  # type: ignore[arg-type]
        name=arm,
        store=store,  # type: ignore[arg-type]
        table=table,
        prompts=list(range(len(table))),  # type: ignore[arg-type]
        answers=None,  # type: ignore[arg-type]
        config=config,
    )
    grid = {one.label: one.params for one in settings(config, family_named("ordering"))}
    how = ablate_options.of_run(config)
    halves = ablate_halves.halves(table, how, grid)
    ablating.ablate_arm(data, how, halves, LABELS, Reporter(quiet=True), tested=False)
    return {
        "readout": table,
        "lens": _lens(table, layers, config),
        "decomposition": inside.decomposition_table(table, LABELS, grid, config),
        "contributions": _contributions(table, rng),
        "patch": patch,
        **{name: arm_table(run, name, arm) for name in ablating.arm_tables(how)},
    }


def _patch(
    run: RunDirectory, arm: str, table: pd.DataFrame, store: Store, heads: Sequence[int | None], config: Config
) -> pd.DataFrame:
    layers = len(heads)
    absent = [None] * layers
    structure = SimpleNamespace(
        blocks=[f"block.{n}" for n in range(layers)], attn_out=absent, mlp_out=absent, out_projections=absent, d_model=6
    )
    data = intervention_stage.Arm(
        run=run,
        model=SimpleNamespace(name="made up", n_layers=layers, heads=lambda n: heads[n], structure=structure),  # type: ignore[arg-type]
        name=arm,
        store=store,  # type: ignore[arg-type]
        table=table,
        prompts=[SimpleNamespace(answer=7)] * len(table),  # type: ignore[list-item]
        answers=SimpleNamespace(labels=LABELS),  # type: ignore[arg-type]
        config=config,
    )
    tokens = Tokens(data.model, [], data.prompts, config.patch.positions)
    planned = patch_stage.sweeps(data, config.patch, config.patch.positions, tokens)
    return patch_stage.patch_table(data, config.patch, planned, tokens, lambda _: None)


def _contributions(table: pd.DataFrame, rng: np.random.Generator) -> pd.DataFrame:
    """The readout dealt out to an embedding, two heads and an MLP."""
    shares = rng.dirichlet(np.ones(4), len(table))
    about = [("embed", "embed", None, None), ("L0H0", "head", 0, 0), ("L0H1", "head", 0, 1), ("L1 mlp", "mlp", 1, None)]
    parts = pd.DataFrame(about * len(table), columns=["component", "kind", "layer", "head"])
    identity = table[["setting", "key", "presentation", "cell", "gold"]].loc[np.repeat(np.arange(len(table)), 4)]
    parts = parts.astype({"layer": "Int64", "head": "Int64"})
    contribution = (shares * table["difference"].to_numpy()[:, None]).ravel()
    return pd.concat([identity.reset_index(drop=True), parts], axis=1).assign(contribution=contribution, gap=0.0)


def _of_all_arms(
    asked: Sequence[items.Row],
    stores: Mapping[str, Any],
    tables: Mapping[str, pd.DataFrame],
    params: Mapping[str, Any],
    config: Config,
) -> dict[str, pd.DataFrame]:
    """Probes and components, which are made for all arms at once."""
    row = ["setting", "key", "presentation"]

    def of(name: str, arm: str) -> pd.DataFrame:
        table = tables[name]
        return table[table["arm"] == arm].drop(columns="arm").reset_index(drop=True)

    joined = {
        arm: of("readout", arm).merge(of("behaviour", arm)[[*row, "answer", "correct"]], on=row) for arm in stores
    }
    material = fitting.Material(
        stores=stores, tables=joined, tokens=[[1] * (1 + number % 7) for number in range(len(asked))],
        params=params, labels=LABELS, layers=len(next(iter(stores.values())).sites["z"]), config=config,
    )  # fmt: skip
    splits = {arm: of("decomposition", arm) for arm in stores}
    folds = fitting.shared_folds(next(iter(joined.values())), 3, config.seed)
    found: dict[str, list[pd.DataFrame]] = {name: [] for name in probe_tables.NAMES}
    for unit in probe_tables.chunks(fitting.curves(params, config)):
        for name, table in probe_tables.fit(material, unit, folds, splits).items():
            found[name].append(table)
    parts = {arm: of("contributions", arm) for arm in stores}
    return {**{name: stacked(made) for name, made in found.items()},
            "components": inside.component_table(parts, LABELS, params, config)}  # fmt: skip


def _lens(table: pd.DataFrame, layers: int, config: Config) -> pd.DataFrame:
    parts = []
    for kind, shown in table.groupby("presentation", sort=False):
        values = np.linspace(0.1, 1.0, layers)[:, None] * shown["difference"].to_numpy()
        gold = (shown["gold"] == "yes").to_numpy().astype(int)
        split = decompose_layers(values, shown["cell"].to_numpy(), gold, resamples=100, seed=config.seed)
        columns = {name: [getattr(one, name) for one in split] for name in inside.DECOMPOSED}
        parts.append(pd.DataFrame({"presentation": kind, "layer": range(layers), **columns, "off_label_mass": 0.2,
                                   "accuracy": 0.5, "settled": 2.0, "settled_low": 1.0, "settled_high": 3.0,
                                   "overtaken": 0.1, "overtaken_mirror": 0.05, "n": len(shown), "gap": 1e-7}))  # fmt: skip
    return pd.concat(parts, ignore_index=True)


def _attribution(run: RunDirectory, arm: str, config: Config) -> pd.DataFrame:
    return probing.attribute(run, arm, arm_table(run, "behaviour", arm), LABELS, config).assign(arm=arm)


def _environment(arms: Mapping[str, Made]) -> dict[str, Any]:
    model = {
        "name": "org/made-up <b>", "weights": "a" * 64, "adapters": {arm: {"rank": 8} for arm in list(arms)[1:]},
        "template": "b" * 64, "dtype": "float32", "device": "cpu", "attention": "sdpa", "versions": {"torch": "of-model"},
    }  # fmt: skip
    versions = {"pairlens": None, "torch": "2.13.0", "numpy": "2.4.6"}
    return {"model": model, "versions": versions, "python": "3.11.7", "platform": "Linux", "processor": "x86_64",
            "threads": 1, "git": None, "seed": 1, "command": ["probe", "run", "--out", "a b"]}  # fmt: skip


@pytest.fixture(autouse=True, scope="module")
def edits_without_a_model() -> Iterator[None]:
    """What an edit does: more of the donor's readout the later it is, and noise for the controls."""

    def sweep(arm: Any, chunk: Sequence[Any], cells: Any, donors: Any, **_: Any) -> Any:
        rng = np.random.default_rng(len(cells))
        readout = arm.table["difference"].to_numpy()
        own, other = (readout[[getattr(one, name) for one in chunk]] for name in ("recipient", "donor"))
        columns = []
        for cell in cells:
            edit = cell.edits[0]
            depth = (edit.layer + 1) / arm.model.n_layers
            weight = depth if edit.source == "matched" else 0.3 * depth
            goal = other if edit.source == "matched" else np.zeros(len(own))
            columns.append((1 - weight) * own + weight * goal + 0.01 * rng.standard_normal(len(own)))
        return SimpleNamespace(
            difference=np.stack(columns, axis=1), unpatched=own, engine="branch", forward_passes=1.5, checked=4,
            check_max_abs=1e-6,
            check_bound=1e-4,
        )  # fmt: skip

    patcher = pytest.MonkeyPatch()
    patcher.setattr(intervention_stage, "swept", sweep)
    patcher.setattr(patch_stage, "swept", sweep)
    yield
    patcher.undo()
