"""What is known about each question of a run, for tables whose rows count answers.

Problem. A behaviour table says what was answered; by what a study breaks that down (question form, inference pattern,
negation, names) stands in the items. Mechanism: `facts_of` reads the items of a run and gives each question its facts:
those of its instance (`latent`), those of its presentation (`meta`), and two that hold in every family with yes and no:

* `validity`: ``valid`` where the answer to the original is yes, ``invalid`` where it is no;
* `polarity`: ``negated`` where the presentation flips that answer, else ``affirmative``.

Together they are the four cells of `experiments.statistics.polarity`. Nothing here knows a family by name.

Constraints. Facts belong to the version of the family that made the items: items of another version are refused, since
its templates and forms may be others under the same names. A fact is one word or number; of a list its members are
joined. Values stand in the order in which the family lists them among the choices of a parameter, else in the order of
the items.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from experiments.errors import RunError
from experiments.rundir import RunDirectory, damaged

if TYPE_CHECKING:
    import pandas as pd

    from tasks.contracts import Family

# A number of millions or billions as names have it: 0.6B, -135M, :4b, _e2b.
SIZE = re.compile(r"[-_:.]?(?<![a-zA-Z0-9.])[eE]?\d+(?:\.\d+)?[bBmM](?![a-zA-Z0-9])")
IDENTITY = ("setting", "key", "presentation")
VALIDITY, POLARITY = ("valid", "invalid"), ("affirmative", "negated")


@dataclass(frozen=True, slots=True)
class Facts:
    """Facts of every question of a run.

    Attributes:
        table: one row a question: setting, key, presentation, then the facts.
        names: of the facts.
        choices: values that the family allows, by parameter; the order in which facts are shown.
    """

    table: pd.DataFrame
    names: tuple[str, ...]
    choices: Mapping[str, tuple[str, ...]]

    def order(self, name: str) -> list[Any]:
        """The values of a fact, in the order in which they are shown."""
        return in_order(self.table[name].drop_duplicates().tolist(), self.choices)


def facts_of(run: RunDirectory) -> Facts:
    """The facts of a run's questions, from its items.

    Raises:
        RunError: the items were made by another version of their family, or are damaged.
    """
    import pandas as pd

    from tasks.registry import family as family_named

    asked = run.read_json("resolved.json", keys=("family", "family_version"))
    family = family_named(asked["family"])
    same_version(str(run.path), asked["family_version"], family)
    rows: list[dict[str, Any]] = []
    keys = ("setting", "key", "version", "gold", "latent", "presentations")
    for number, record in enumerate(run.records(run.items, keys=keys), 1):
        same_version(str(run.items), record["version"], family)
        try:
            rows += questions(record)
        except (AttributeError, KeyError, TypeError):  # a part is missing or of another kind
            raise damaged(run.items, "make the run again, or put the file back", line=number) from None
    if not rows:
        raise damaged(run.items, "it has no items: put the file back")
    # A fact that only some presentations have is "none" in the others; a number stays one beside it.
    every = dict.fromkeys(name for row in rows for name in row)
    table = pd.DataFrame([{name: row.get(name, plain_fact(None)) for name in every} for row in rows], dtype=object)
    names = tuple(name for name in table if name not in IDENTITY)
    return Facts(table, names, choices_of(family))


def questions(record: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Identity and facts of each presentation of an item, which is one line of an items file.

    A fact that both the presentation and its instance have is the presentation's.
    """
    latent = {name: plain_fact(value) for name, value in record["latent"].items()}
    found = []
    for shown in record["presentations"]:
        flipped = shown["gold"] != record["gold"]
        found.append({
            "setting": record.get("setting", ""), "key": record["key"], "presentation": shown["kind"], **latent,
            **{name: plain_fact(value) for name, value in shown["meta"].items()},
            "validity": VALIDITY[record["gold"] != "yes"], "polarity": POLARITY[flipped],
        })  # fmt: skip
    return found


def plain_fact(value: Any) -> Any:
    """A fact that can stand in a table."""
    if isinstance(value, (list, tuple)):
        return ",".join(str(plain_fact(one)) for one in value)
    if isinstance(value, Mapping):
        return ",".join(f"{name}={plain_fact(one)}" for name, one in value.items())
    return "none" if value is None else value


def same_version(what: str, version: Any, family: Family) -> None:
    """Refuse items of another version of their family.

    Raises:
        RunError: naming both versions.
    """
    if version != family.version:
        raise RunError(
            f"{what} was made with version {version} of {family.name} and this is version {family.version}, whose "
            "questions may differ: make the table with the version that asked, or ask again"
        )


def choices_of(family: Family) -> dict[str, tuple[str, ...]]:
    """What the family's parameters may say, as words."""
    found: dict[str, tuple[str, ...]] = {"validity": VALIDITY, "polarity": POLARITY}
    for parameter in family.parameters():
        if parameter.choices is not None:
            found[parameter.name] = tuple(map(str, parameter.choices))
    return found


def in_order(values: Sequence[Any], choices: Mapping[str, Sequence[str]]) -> list[Any]:
    """Values in the order of the parameter that lists them all; as they come where none does."""
    for listed in choices.values():
        place = {word: rank for rank, word in enumerate(listed)}
        if all(value in place for value in values):
            return sorted(values, key=lambda value: place[value])
    return list(values)


def arm_facts(run: RunDirectory, arms: Sequence[str]) -> dict[str, dict[str, Any]]:
    """What is known about each arm of a run.

    `model` is its name as it was asked for, `series` that name without its size, `n_parameters` the number of its
    parameters where the run recorded it.
    """
    model = run.read_json("resolved.json", keys=("model",))["model"]
    known: dict[str, Any] = {"model": model, "series": series(model)}
    if math.isfinite(count := recorded_size(run)):
        known |= {"n_parameters": int(count)}
    return {arm: dict(known) for arm in arms}


def recorded_size(run: RunDirectory) -> float:
    """The number of parameters of a run's model, as the run recorded it; NaN where it recorded none."""
    path = run.path / "environment.json"
    model = run.read_json("environment.json").get("model", {}) if path.exists() else {}
    if not isinstance(model, Mapping):
        raise damaged(path)
    count = model.get("n_parameters", math.nan)
    if isinstance(count, bool) or not isinstance(count, (int, float)) or count <= 0:
        raise damaged(path, "its n_parameters is no number above 0")
    return float(count)


def series(model: str) -> str:
    """The name of a model without its size: models of several sizes that share it are drawn as one line."""
    return SIZE.sub("", model.rpartition("/")[2]) or model
