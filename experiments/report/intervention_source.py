"""What the page of an intervention is made of: the files of a finished `probe patch` or `probe ablate`, read once.

Every number on the page stands in a table of the run; nothing is computed here but which row is the largest. A table that
the command was not asked for is empty, and what would show it is left out.

Words. A *cell* is one place that was edited: site, layer, position, and the head if the site is cut into heads. A cell is
*specific* where the matched donor does more there than every control (a column of ``patch_effects``). The last layer of a
residual curve at the answer position decides nothing: the readout there is the donor's by construction.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from experiments.errors import RunError
from experiments.report.source import Source, shown
from experiments.rundir import RunDirectory

if TYPE_CHECKING:
    import pandas as pd

TABLES = ("patch", "patch_effects", "patch_estimates", "patch_quality", "transplant", "heads", "head_effects",
          "head_grid", "ablate", "ablation", "ablation_above", "ablation_notes")  # fmt: skip
# What the page reads of the tables that say what was found.
COLUMNS = {
    "patch_effects": ("arm", "group", "direction", "kind", "site", "position", "layer", "head", "donor", "n", "n_groups",
                      "effect", "effect_low", "effect_high", "flipped", "above", "above_low", "above_high", "above_p",
                      "specific", "monotone", "reason"),
    "ablation": ("arm", "ablated", "family", "heads", "measure", "before", "after", "change", "change_low", "change_high",
                 "n", "reason"),
    "ablation_above": ("arm", "control", "measure", "value", "low", "high"),
    "ablation_notes": ("arm", "ablated", "agreement_without_competence", "note"),
    "head_effects": ("arm", "half", "layer", "head", "effect", "low", "high", "n", "n_groups", "rank", "chosen"),
    "head_grid": ("arm", "layer", "head", "measure", "value"),
}  # fmt: skip
NEEDED = {"patch": "patch_effects", "ablate": "ablation"}
MATCHED, OWN, ALL = "matched", "own", "all"
CONTROLS = ("unrelated", "random", "same cell")
DECIDING = ("unrelated", "random")  # what the matched donor has to exceed
WAYS = {"repair": "original → equivalent", "break": "equivalent → original"}  # donor → recipient
KINDS = ("disagreement", "agreement", "shared error")
HEADS = "z"  # the site that is cut into heads
RESIDUAL = ("resid_pre", "resid_mid", "resid_post")


@dataclass(frozen=True, slots=True)
class Sweep:
    """Cells that were tested together: rows of ``patch_effects`` of one arm, direction, kind, site and position.

    ``matched`` has a row a cell; ``controls`` by name the same cells in the same order.
    """

    arm: str
    direction: str
    kind: str
    site: str
    position: str
    matched: pd.DataFrame
    controls: dict[str, pd.DataFrame]

    @property
    def measured(self) -> bool:
        """Whether any effect is defined."""
        return bool(self.matched["effect"].notna().any())

    @property
    def monotone(self) -> bool:
        """Whether the curve climbs by construction."""
        return bool(self.matched["monotone"].map(truth).any())

    @property
    def decided(self) -> bool:
        """Whether it can be told which cells are specific: there was a control, and there were instances enough."""
        return bool(self.matched["specific"].notna().any())

    @property
    def n(self) -> int:
        return int(self.matched["n"].max())

    @property
    def groups(self) -> int:
        return int(self.matched["n_groups"].max())

    @property
    def place(self) -> str:
        return f"{self.site} at {position_name(self.position)}"


@dataclass(frozen=True, slots=True)
class Interventions:
    """The files of one run.

    Attributes:
        command: ``patch`` or ``ablate``.
        arms: ``base`` first, then the adapters.
        heads: of each layer, None where a layer has none to cut.
        sweeps: of a patching study.
    """

    command: str
    resolved: dict[str, Any]
    environment: dict[str, Any]
    results: dict[str, Any]
    tables: dict[str, pd.DataFrame]
    arms: tuple[str, ...]
    heads: tuple[int | None, ...]
    sweeps: tuple[Sweep, ...] = ()

    def of(self, table: str, arm: str, **where: Any) -> pd.DataFrame:
        """The rows of one arm, with these values; none where the table was not made."""
        found = self.tables[table]
        for name, value in {"arm": arm, **where}.items():
            if len(found):
                found = found[found[name] == value]
        return found

    @property
    def layers(self) -> int:
        return len(self.heads)

    def is_last(self, layer: int) -> bool:
        return layer == self.layers - 1

    @property
    def kind(self) -> str:
        """The kind of pair that findings speak of: the first of ``KINDS`` with effects."""
        known = {sweep.kind for sweep in self.sweeps if sweep.measured}
        return next((kind for kind in KINDS if kind in known), ALL)

    @property
    def main(self) -> list[Sweep]:
        """The sweeps of that kind."""
        return [sweep for sweep in self.sweeps if sweep.kind == self.kind]


def command_of(run: RunDirectory) -> str:
    """Which command made a run: ``run``, ``patch``, ``ablate`` or ``eval``."""
    return str(run.read_json("resolved.json").get("command", "run"))


def read(run: RunDirectory) -> Interventions:
    """Read a run.

    Raises:
        RunError: the run was made by another command, or a file is missing.
    """
    import pandas as pd

    command = command_of(run)
    if command not in NEEDED:
        raise RunError(f"{run.path} is not of `probe patch` or `probe ablate`: give the folder of such a run")
    run.table(NEEDED[command])
    tables = {
        name: run.table(name, columns=COLUMNS.get(name, ())) if run.has_table(name) else pd.DataFrame()
        for name in TABLES
    }
    for name, column in (("patch_effects", "group"), ("transplant", "presentation")):
        tables[name] = _overall(tables[name], column)
    results = run.read_json("results.json", keys=("arms", "model"))
    return Interventions(
        command=command,
        resolved=run.read_json("resolved.json"),
        environment=run.read_json("environment.json"),
        results=results,
        tables=tables,
        arms=tuple(results["arms"]),
        heads=tuple(results["model"]["heads"]),
        sweeps=tuple(_sweeps(tables["patch_effects"])),
    )


def of_study(source: Source) -> Interventions:
    """The interventions of a whole study, from what its own report has read."""
    import pandas as pd

    tables = {name: source.tables.get(name, pd.DataFrame()) for name in TABLES}
    tables["patch_effects"] = _overall(tables["patch_effects"], "group")
    return Interventions(
        command="run",
        resolved=source.resolved,
        environment=source.environment,
        results=source.results,
        tables=tables,
        arms=source.arms,
        heads=(None,) * source.layers,
        sweeps=tuple(_sweeps(tables["patch_effects"])),
    )


def _overall(table: pd.DataFrame, column: str) -> pd.DataFrame:
    """The rows over all settings, or all presentations."""
    return table[table[column] == ALL].reset_index(drop=True) if column in table else table


def _sweeps(table: pd.DataFrame) -> Iterator[Sweep]:
    """Every arm, direction, kind, site and position with rows, in the order of the table."""
    if table.empty:
        return
    for key, rows in table.groupby(["arm", "direction", "kind", "site", "position"], sort=False):
        by_donor = {str(donor): one for donor, one in rows.groupby("donor", sort=False)}
        if MATCHED in by_donor:
            matched = by_donor[MATCHED].sort_values(["layer", "head"], kind="stable").reset_index(drop=True)
            controls = {
                name: matched[["layer", "head"]].merge(by_donor[name], on=["layer", "head"], how="left")
                for name in CONTROLS
                if name in by_donor
            }
            arm, direction, kind, site, position = map(str, key)
            yield Sweep(arm, direction, kind, site, position, matched, controls)


def in_order(positions: Sequence[str]) -> list[str]:
    """Numbered spans first, then other spans, then the answer and all positions, as they mostly stand in a prompt."""

    def place(position: str) -> tuple[int, str, int]:
        name, _, end = position.partition(":")
        if position in ("answer", "all"):
            return (2 + (position == "all"), "", 0)
        return (0, name, int(end)) if end.isdecimal() else (1, "", 0)

    return sorted(dict.fromkeys(positions), key=place)


def exceeding(source: Interventions, sweep: Sweep) -> list[int]:
    """Places in ``cut.matched`` of the specific cells, without the layer that restores by construction."""
    return [
        number
        for number, row in enumerate(sweep.matched.to_dict("records"))
        if truth(row["specific"]) and not (sweep.monotone and source.is_last(int(row["layer"])))
    ]


def nearest(sweep: Sweep, number: int) -> tuple[str, dict[str, Any]] | None:
    """The control that the matched donor exceeds least in a cell, with its row; None where nothing was compared."""
    import pandas as pd

    found = [
        (name, sweep.controls[name].iloc[number].to_dict())
        for name in DECIDING
        if name in sweep.controls and pd.notna(sweep.controls[name]["above"].iat[number])
    ]
    return min(found, key=lambda one: float(one[1]["above"]), default=None)


def strongest(source: Interventions, sweep: Sweep, among: Sequence[int] | None = None) -> int | None:
    """The cell in which the matched donor exceeds its nearest control most (by effect, where there is no control).

    Cells with an effect toward the donor's answer come first: elsewhere only the control has moved.
    """
    import pandas as pd

    chosen = range(len(sweep.matched)) if among is None else among
    allowed = [
        number for number in chosen
        if pd.notna(sweep.matched["effect"].iat[number])
        and not (sweep.monotone and len(sweep.matched) > 1 and source.is_last(int(sweep.matched["layer"].iat[number])))
    ]  # fmt: skip

    def size(number: int) -> float:
        control = nearest(sweep, number)
        return float(sweep.matched["effect"].iat[number] if control is None else control[1]["above"])

    toward = [number for number in allowed if sweep.matched["effect"].iat[number] > 0]
    return max(toward or allowed, key=size, default=None)


def position_name(position: str) -> str:
    """A position as a reader names it."""
    name = shown(position).removeprefix("span:")
    return {"answer": "the answer position", "all": "all positions"}.get(name, name)


def cell_name(row: Any) -> str:
    """``layer 3``, or ``3.1`` for a head."""
    import pandas as pd

    return f"layer {int(row['layer'])}" if pd.isna(row["head"]) else f"{int(row['layer'])}.{int(row['head'])}"


def truth(value: Any) -> bool:
    """A flag of a table, where nothing stands for false."""
    return value is True or (hasattr(value, "dtype") and bool(value == True))  # noqa: E712


def number(value: Any) -> float | None:
    """A number of a table, None where it is undefined."""
    import pandas as pd

    return None if pd.isna(value) else float(value)
