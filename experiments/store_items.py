"""A store's rows beside the items they were captured from: what each row is about, and so what it can be labelled with.

A store knows the key and the presentation of each row and nothing of the problem. The items are found in one of three
places: in the run that the store belongs to, in ``items.jsonl`` inside the store, where `probe capture` puts it, or in a
file that the user names. Behaviour comes from a run's table.

Rows and items are put together by place where store and file have the same prompts in the same order. Otherwise they are
joined by key and presentation, which works for a part of the items, but not where one instance stands under two settings
(two relations): which of them a row is about then cannot be told, and it is refused.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from experiments.errors import RunError, UsageError
from experiments.groups import swept
from experiments.items import Item, Row, frame, rows
from experiments.probe_units import with_template
from experiments.rundir import RunDirectory, atomic, record_of
from tasks.files import from_record, to_record

if TYPE_CHECKING:
    import pandas as pd

    from activations.store import ActivationStore

BASE = "base"
ITEMS = "items.jsonl"
SHOWN = 8  # labels or presentations named in a message


@dataclass(frozen=True, slots=True)
class Opened:
    """A complete store with the run it belongs to, if any, and the file that its items are in.

    Attributes:
        arm: of the run, or of the model that the manifest names.
        family: as the run's configuration names it, which may be a file; None where there is no run.
    """

    store: ActivationStore
    arm: str
    items: Path
    run: RunDirectory | None
    family: str | None


@dataclass(frozen=True, slots=True)
class Asked:
    """The rows of a store at one position.

    Attributes:
        table: setting, n, key, presentation, cell and gold of each, and its ``place`` in the store; ``template`` where the
            family has templates.
        rows: what was asked, in the same order.
        params: family parameters by setting.
        family, version: the family's own name, and its version when the items were made.
    """

    table: pd.DataFrame
    rows: Sequence[Row]
    params: Mapping[str, Mapping[str, Any]]
    family: str
    version: int

    def within(self, chosen: np.ndarray) -> Asked:
        """The chosen rows, one True or False each."""
        kept = [row for row, keep in zip(self.rows, chosen, strict=True) if keep]
        return Asked(self.table[chosen].reset_index(drop=True), kept, self.params, self.family, self.version)


def write_items(path: Path, asked: Sequence[Row], *, version: int) -> None:
    """Keep the items of a capture, a matched set a line with its setting."""
    seen: set[tuple[str, str]] = set()
    with atomic(path) as file:
        for row in asked:
            name = (row.setting, row.matched.instance.key)
            if name not in seen:
                seen.add(name)
                record = {"setting": row.setting, **to_record(row.matched, version=version)}
                file.write((json.dumps(record, ensure_ascii=False) + "\n").encode())


def open_store(
    path: Path, *, run: Path | None = None, items: Path | None = None, arm: str | None = None, family: str | None = None
) -> Opened:
    """Open a store, one of a run, or the store of an arm of a run.

    Args:
        path: run directory, ``RUN/activations/ARM``, or a store.
        run: of the same prompts and model, for a store that belongs to none.
        items: file of `probe generate` or of a capture, likewise.
        arm: of the run directory.
        family: name or file of the family, where the items' own name does not find it.

    Raises:
        UsageError: something that can't apply, or is missing.
        RunError, StoreError: no run, or no complete store.
    """
    from activations.store import ActivationStore

    if run is not None and items is not None:
        raise UsageError("--run and --items were both given, and each says where the items are: leave one out")
    if (path / "resolved.json").exists():
        own = RunDirectory(path)
        arms = sorted(one.parent.name for one in own.activations.glob("*/manifest.json"))
        name = BASE if arm is None else arm
        if not arms:
            raise RunError(
                f"{path} keeps no activations, as runs of `probe eval` do: give a run of `probe run`, or a store"
            )
        if name not in arms:
            raise UsageError(f"--arm is {name!r}: {path} has {', '.join(arms)}")
        _refuse(path, run=run, items=items)
        return _of_run(own, name, family)
    if not (path / "manifest.json").exists():
        raise RunError(f"{path} is no run and no activation store: give the folder of one, see `probe capture`")
    if arm is not None:
        raise UsageError(f"--arm is {arm!r} but {path} is one arm's store: leave it out, or give the run's folder")
    above = path.absolute().parent
    if above.name == "activations" and (above.parent / "resolved.json").exists():
        _refuse(path, run=run, items=items)
        return _of_run(RunDirectory(above.parent), path.absolute().name, family)
    store = ActivationStore.open(path)
    own_name = store.manifest["notes"].get("adapter") or BASE
    if run is not None:
        if not (run / "resolved.json").exists():
            raise RunError(f"{run} has no resolved.json: give the folder of a run")
        directory = RunDirectory(run)
        found = directory.read_json("resolved.json").get("family")
        return Opened(store, _arm_of(store, directory), directory.items, directory, family or found)
    if items is None and not (path / ITEMS).exists():
        raise UsageError(
            f"{path} holds no {ITEMS}, so nothing says what its rows are about: give the file that `probe generate` writes "
            "with the same parameters as --items, a run on the same prompts as --run, or repeat `probe capture`"
        )
    return Opened(store, str(own_name), items or path / ITEMS, None, family)


def rows_at(opened: Opened, position: str) -> Asked:
    """The rows at a position with what was asked there.

    Raises:
        UsageError: no row is at this position, or rows can't be told apart.
        RunError: a row has no item, or a line of the items is damaged.
    """
    store = opened.store
    labels = store.manifest["rows"]["label"]
    if position not in labels:
        raise UsageError(_no_position(position, list(dict.fromkeys(labels))))
    places = np.flatnonzero([label == position for label in labels])
    prompts, number = _prompts(store)
    made, params, family, version = _items(opened.items)
    asked = rows(made)
    if prompts == [_name(row) for row in asked]:
        asked = [asked[number[place]] for place in places]
    else:
        asked = _joined([prompts[number[place]] for place in places], asked, opened)
    table = with_template(frame(asked), asked)
    table["place"] = places
    return Asked(table, asked, params, family, version)


def answers(opened: Opened, asked: Asked) -> pd.DataFrame:
    """What was answered to each row, ``answer`` and ``correct``, in the same order.

    Raises:
        UsageError: no run is known.
        RunError: its table lacks a row.
    """
    if opened.run is None:
        raise UsageError(
            "this target is about answers, which a store does not hold: give a run on its prompts as --run"
        )
    row = ["setting", "key", "presentation"]
    said = opened.run.table("behaviour")
    said = said[said["arm"] == opened.arm]
    found = asked.table[row].merge(
        said[[*row, "answer", "correct"]], on=row, how="left", validate="one_to_one", indicator=True
    )
    lost = found[found["_merge"] != "both"]
    if len(lost):
        one = lost.iloc[0]
        raise RunError(
            f"{len(lost)} of {len(found)} rows of the store have no answer of {opened.arm} in {opened.run.path} (the first "
            f"is {one['setting']}, {one['key'][:12]} {one['presentation']}): give the run on the prompts of this store"
        )
    return found[["answer", "correct"]]


def _refuse(path: Path, **given: Path | None) -> None:
    for name, value in given.items():
        if value is not None:
            raise UsageError(
                f"--{name} is {str(value)!r} but {path} belongs to a run, which has its items: leave it out"
            )


def _of_run(run: RunDirectory, arm: str, family: str | None) -> Opened:
    from activations.store import ActivationStore

    asked = run.read_json("resolved.json")
    store = ActivationStore.open(run.activations / arm)
    _check_own(store, run, arm, str(asked.get("command")))
    return Opened(store, arm, run.items, run, family or asked.get("family"))


def _check_own(store: ActivationStore, run: RunDirectory, arm: str, command: str) -> None:
    """Refuse a store that stands in a run's folder and is not what the run captured."""
    asked = run.read_json("environment.json", keys=("asked",))["asked"]
    back = f"put back what the run captured, or make it again with the command in {run.path / 'config.yaml'}"
    content = store.manifest["content"]
    # `probe eval` hashes its prompts in chunks, and a merged store by part: neither can be compared.
    if command == "run" and "parts" not in content and (prompts := content.get("prompts")) != asked.get("token_ids"):
        raise RunError(
            f"{store.directory} holds {len(store)} rows of other prompts (hash {str(prompts)[:12]}) than {run.path} asked "
            f"({str(asked.get('token_ids'))[:12]}): {back}, or give the store from elsewhere"
        )
    try:
        made = _arm_of(store, run)
    except UsageError as error:
        said = str(error).rpartition(": ")[0]
        raise RunError(f"{said}: {back}") from None
    if made != arm:
        raise RunError(f"{store.directory} holds activations of {made}, not of {arm}: {back}")


def _arm_of(store: ActivationStore, run: RunDirectory) -> str:
    """The arm of a run that the store's model is."""
    model = run.read_json("environment.json", keys=("model",))["model"]
    content = store.manifest["content"]
    made, asked = (content.get("model") or {}).get("weights"), model.get("weights")
    if made != asked:
        raise UsageError(
            f"{store.directory} was made by the model {str(made)[:12]} and {run.path} asked the model {str(asked)[:12]} "
            "(hashes of the weights): give a run of the same model"
        )
    adapter = (content.get("adapter") or {}).get("weights")
    if adapter is None:
        return BASE
    for name, one in model["adapters"].items():
        if one["weights"] == adapter:
            return str(name)
    known = ", ".join(model["adapters"]) or "none"
    raise UsageError(
        f"{store.directory} was made with an adapter ({str(adapter)[:12]}) that {run.path} did not ask (it asked {known}): "
        "give a run of it"
    )


def _no_position(position: str, there: list[str]) -> str:
    if position.endswith((":", "/")) and any(label.startswith(position) for label in there):
        return (
            f"--position is {position!r}, which stands for several: name one of them, such as {_first(position, there)}"
        )
    near = get_close_matches(position, there, n=1)
    hint = f" (did you mean {near[0]}?)" if near else ""
    more = f" and {len(there) - SHOWN} more" if len(there) > SHOWN else ""
    return f"--position is {position!r}: the store has {', '.join(there[:SHOWN])}{more}{hint}"


def _first(prefix: str, there: list[str]) -> str:
    return next(label for label in there if label.startswith(prefix))


def _items(path: Path) -> tuple[list[Item], dict[str, Mapping[str, Any]], str, int]:
    """The items of a file, the parameters of each setting, and the family's name and version."""
    if not path.is_file():
        raise RunError(f"there is no file of items {str(path)!r}: give the one that `probe generate` wrote")
    with path.open("rb") as file:
        records = [
            record_of(path, number, line, keys=("key", "params", "presentations", "version"), advice="make it again")
            for number, line in enumerate(file, 1)
        ]
    if not records:
        raise RunError(f"{path} holds no items: give the file that `probe generate` wrote")
    if len(about := {(one.get("family"), one["version"]) for one in records}) > 1:
        raise RunError(f"{path} holds items of {len(about)} families or versions: give a file of one")
    settings = [record.get("setting") for record in records]
    if None in settings:
        settings = _settings([record["params"] for record in records])
    made = [Item(str(setting), from_record(record)) for setting, record in zip(settings, records, strict=True)]
    params = {item.setting: item.matched.instance.params for item in made}
    return made, params, made[0].matched.instance.family, int(records[0]["version"])


def _settings(params: Sequence[Mapping[str, Any]]) -> list[str | None]:
    """A label for the parameters of each item, as a run would give it."""
    different = {json.dumps(one, sort_keys=True): one for one in params}
    named = swept(different) or tuple(params[0])[:1]
    return [", ".join(f"{name}={one.get(name)}" for name in named) for one in params]


def _prompts(store: ActivationStore) -> tuple[list[tuple[str, str]], list[int]]:
    """Key and presentation of each prompt of a store, and the number of each row's prompt.

    A prompt's rows follow each other and are at different positions.
    """
    prompts: list[tuple[str, str]] = []
    numbers: list[int] = []
    seen: set[str] = set()
    columns = store.manifest["rows"]
    for key, kind, label in zip(columns["key"], columns["presentation"], columns["label"], strict=True):
        if not prompts or prompts[-1] != (key, kind) or label in seen:
            prompts.append((key, kind))
            seen = set()
        seen.add(label)
        numbers.append(len(prompts) - 1)
    return prompts, numbers


def _name(row: Row) -> tuple[str, str]:
    return row.matched.instance.key, row.presentation.kind


def _joined(have: Sequence[tuple[str, str]], asked: Sequence[Row], opened: Opened) -> list[Row]:
    """The item of each row by key and presentation."""
    of: dict[tuple[str, str], Row] = {}
    for row in asked:
        if _name(row) in of:
            both = f"{of[_name(row)].setting} and {row.setting}"
            raise UsageError(
                f"an instance of {opened.items} stands under {both}, and the rows of {opened.store.directory} are others "
                "or in another order, so they can't be told apart: give the items in the order of the capture"
            )
        of[_name(row)] = row
    if len(lost := [name for name in have if name not in of]):
        raise RunError(
            f"{len(lost)} of {len(have)} rows of {opened.store.directory} have no item in {opened.items} (the first is "
            f"{lost[0][0][:12]} {lost[0][1]}): give the items that it was captured from"
        )
    return [of[name] for name in have]
