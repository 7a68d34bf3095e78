"""What the report is made of: the files of one finished run, read once.

The report formats; it measures nothing. Headline numbers come from ``results.json``, curves from the tidy tables, the
prompts from ``items.jsonl``. Nothing else goes in, no clock and no environment, so a page written twice is the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from experiments.groups import Group, groups
from experiments.inside import PAIR
from experiments.link import current, whole
from experiments.report.text import clean
from experiments.rundir import RunDirectory

if TYPE_CHECKING:
    import pandas as pd

TABLES = ("behaviour", "readout", "attribution", "probes", "transfer", "components", "attribution_shares",
          "attribution_calibration", "lens", "patch")  # fmt: skip
# Made by later versions, or only if asked for: empty where they are missing.
ASKED = ("patch_effects", "head_effects", "head_grid", "ablation", "ablation_above", "ablation_notes")


@dataclass(frozen=True, slots=True)
class Source:
    """The files of a run.

    Attributes:
        arms: ``base`` first, then the adapters.
        settings: labels in the order of the items file; a single setting appears once, and nowhere as "all".
        items: records of items.jsonl.
    """

    results: dict[str, Any]
    resolved: dict[str, Any]
    environment: dict[str, Any]
    items: list[dict[str, Any]]
    tables: dict[str, pd.DataFrame]
    arms: tuple[str, ...]
    settings: tuple[str, ...]

    def arm(self, name: str) -> dict[str, Any]:
        """The results of one arm."""
        found: dict[str, Any] = self.results["arms"][name]
        return found

    def profile(self, arm: str, setting: str = "all") -> dict[str, Any]:
        found: dict[str, Any] = self.arm(arm)["behaviour"]["profile"][setting]
        return found

    def of(self, table: str, arm: str) -> pd.DataFrame:
        """The rows of one arm in a tidy table."""
        whole = self.tables[table]
        return whole[whole["arm"] == arm] if len(whole) else whole

    @property
    def groups(self) -> list[Group]:
        """Over what curves and decompositions are pooled, ``all`` first."""
        return groups(self.resolved["params"], self.resolved["table"]["rows"])

    @property
    def layers(self) -> int:
        return int(self.tables["lens"]["layer"].max()) + 1

    def is_last(self, layer: int) -> bool:
        """Whether a layer is the last, whose residual at the answer position decides the answer by itself."""
        return layer == self.layers - 1

    @property
    def axis(self) -> str:
        """What the settings vary, if it is one parameter: its name. Otherwise "setting"."""
        names = {label.split("=")[0] for label in self.settings if "=" in label and "," not in label}
        single = len(names) == 1 and all("=" in label and "," not in label for label in self.settings)
        return names.pop() if single else "setting"

    def tick(self, setting: str) -> str:
        """The label of a setting on an axis that is named ``axis``."""
        return setting if self.axis == "setting" else setting.split("=", 1)[1]

    @property
    def unpaired(self) -> tuple[str, ...]:
        """Presentations that were asked beside the pair."""
        return tuple(kind for kind in self.tables["readout"]["presentation"].unique() if kind not in PAIR)


def read(run: RunDirectory) -> Source:
    """Read a run.

    Raises:
        RunError: a table, rows or items are missing or damaged, or an earlier version made them.
    """
    import pandas as pd

    results = run.read_json("results.json")
    tables = {name: run.table(name) for name in TABLES}
    current(tables["attribution"], run.path)
    items = whole(run, tables)
    tables |= {name: run.table(name) if run.has_table(name) else pd.DataFrame() for name in ASKED}
    return Source(
        results=results,
        resolved=run.read_json("resolved.json"),
        environment=run.read_json("environment.json"),
        items=items,
        tables=tables,
        arms=tuple(results["arms"]),
        settings=tuple(dict.fromkeys(str(item["setting"]) for item in items)),
    )


def shown(name: str) -> str:
    """A name from outside (an arm, a setting), fit for one line."""
    return " ".join(clean(name).split())
