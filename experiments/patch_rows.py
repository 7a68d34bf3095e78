"""Who is patched with what: pairs by kind, both directions, the donors of every control, and the tokens they stand at.

Pairs are taken in their keyed order: first those whose two readouts disagree, then as many that agree (right or wrong) to
show what a donor does where nothing is to be restored. A direction turns a pair into a *move*: a recipient prompt and the
prompts that it gets activations from.

- *matched*: the other presentation of the same instance;
- *unrelated*: the presentation that the matched donor is, of another instance under the same setting;
- *same cell*: the same of another instance that is asked in the same way and has the same answer.

Donor and recipient need equally many tokens at a position, since token k goes to token k. An unrelated donor that does not
fit is passed over for the next in the keyed order; a move whose matched donor does not fit, or that has no control left,
is left out at that position and counted. What is left has every donor, so that controls are paired row by row.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from experiments.errors import UsageError
from experiments.inside import PAIR, rows_of
from experiments.intervention_stage import IDENTITY, Arm, Pair, Transfer, pairs, row_name
from experiments.patch_options import ALL, ANSWER, DIRECTIONS, PatchSettings

if TYPE_CHECKING:
    import pandas as pd

    from activations.model import Model
    from activations.prompts import Prompt
    from experiments.items import Row

SAME_CELL, UNRELATED = "same cell", "unrelated"
LEAST_CONTROLS = 8  # agreeing pairs, even where fewer disagree


@dataclass(frozen=True, slots=True)
class Move:
    """One recipient with its donors, as row numbers of the run.

    ``kind`` is one of ``patch_options.KINDS``; ``same_cell`` is -1 where that control is not asked for.
    """

    transfer: Transfer
    direction: str
    kind: str
    same_cell: int


class Tokens:
    """The token numbers of positions in the prompts of a run, found when they are first needed."""

    def __init__(self, model: Model, asked: Sequence[Row], prompts: Sequence[Prompt], positions: Sequence[str]) -> None:
        self.model, self.asked, self.prompts = model, asked, prompts
        self.spans = [one for one in positions if one not in (ANSWER, ALL)]
        self._found: dict[int, Mapping[str, tuple[int, ...]]] = {}

    def at(self, row: int, position: str) -> tuple[int, ...]:
        """Tokens of a position in a prompt; none where the prompt has no such span.

        Raises:
            StoreError: the chat template alters the message, so that its spans can't be found.
        """
        if position == ANSWER:
            return (self.prompts[row].answer,)
        if position == ALL:
            return tuple(range(len(self.prompts[row].ids)))
        if row not in self._found:
            self._found[row] = self._resolved(row)
        return self._found[row].get(position, ())

    def _resolved(self, row: int) -> Mapping[str, tuple[int, ...]]:
        from activations.positions import Conversation, resolve

        shown = self.asked[row].presentation
        have = {span.label for span in shown.spans}
        wanted = [one for one in self.spans if one in have]
        spots = resolve(
            self.model,
            [self.prompts[row]],
            [f"{one}/all" for one in wanted],
            [Conversation(shown.chat(), shown.spans)],
            lambda _: f"prompt {row} ({self.asked[row].matched.instance.key[:16]} {shown.kind})",
        )[0]
        found: dict[str, list[int]] = {}
        for spot in spots:
            found.setdefault(spot.label.rpartition("/")[0], []).append(spot.position)
        return {label: tuple(tokens) for label, tokens in found.items()}


def kinds(arm: Arm, of: Sequence[Pair]) -> list[str]:
    """The kind of each pair, by its readouts and gold answer."""
    from patching.studies import pair_kind

    readout, first = arm.table["difference"].to_numpy(), arm.answers.labels[0]
    gold = np.where(arm.table["gold"].to_numpy() == first, 1, -1)
    original, equivalent = (np.array([pair[which] for pair in of], dtype=np.int64) for which in (0, 1))
    return pair_kind(readout[equivalent], readout[original], gold[original]) if len(of) else []


def chosen_pairs(arm: Arm, patch: PatchSettings) -> list[tuple[Pair, str]]:
    """The pairs that are patched, with their kinds: disagreeing ones first."""
    every = pairs(arm)
    named = [(pair, kind) for pair, kind in zip(every, kinds(arm, every), strict=True) if kind in patch.kinds]
    if "disagreement" not in patch.kinds:
        return [one for kind in patch.kinds for one in [each for each in named if each[1] == kind][: patch.pairs]]
    disagreeing = [one for one in named if one[1] == "disagreement"][: patch.pairs]
    # Where nothing disagrees, the controls alone still show what patching does.
    agreeing = [one for one in named if one[1] != "disagreement"]
    return [*disagreeing, *agreeing[: max(len(disagreeing), min(LEAST_CONTROLS, patch.pairs))]]


def moves(arm: Arm, patch: PatchSettings, position: str, tokens: Tokens) -> tuple[list[Move], pd.DataFrame]:
    """The moves at a position, and a row with the reason for each that is left out there.

    Raises:
        UsageError: a control needs another instance and there is none.
    """
    import pandas as pd

    from patching.controls import derangement

    place = {kind: rows_of(arm.table, kind) for kind in PAIR}
    check_controls(patch, arm.table)
    names = [row_name(arm.table, int(row)) for row in place[PAIR[0]]]
    others = {
        name: derangement(names, _alike(name, arm.table), seed=arm.config.seed)
        for name in (UNRELATED, SAME_CELL)
        if name in patch.controls
    }
    number = {int(row): at for kind in PAIR for at, row in enumerate(place[kind])}
    found: list[Move] = []
    left: list[dict[str, Any]] = []
    for (original, equivalent, agree), kind in chosen_pairs(arm, patch):
        for direction in patch.directions:
            # The recipient's presentation is what a direction is named after; the donor is the other one.
            into_equivalent = DIRECTIONS[direction] == PAIR[1]
            recipient, donor = (equivalent, original) if into_equivalent else (original, equivalent)
            width = len(tokens.at(recipient, position))
            reason = _misfit(width, len(tokens.at(donor, position)), position)
            strangers: dict[str, int] = {}
            for name, following in others.items():
                if reason:
                    break
                rows = place[PAIR[0]] if into_equivalent else place[PAIR[1]]
                fits = _first_fitting(following, number[recipient], rows, tokens, position, width)
                if fits is None:
                    reason = f"no {name} donor has {width} tokens at {position}"
                else:
                    strangers[name] = fits
            if reason:
                about = {name: arm.table[name].iat[recipient] for name in IDENTITY}
                left.append({**about, "direction": direction, "kind": kind, "position": position, "reason": reason})
                continue
            transfer = Transfer(recipient, donor, strangers.get(UNRELATED, donor), agree)
            found.append(Move(transfer, direction, kind, strangers.get(SAME_CELL, -1)))
    columns = [*IDENTITY, "direction", "kind", "position", "reason"]
    return found, pd.DataFrame(left, columns=columns).astype({"n": "Int64"})


def _misfit(width: int, given: int, position: str) -> str:
    if not width or not given:
        return f"no {position} in {'the recipient' if not width else 'the donor'}"
    return "" if width == given else f"{given} tokens of {position} in the donor, {width} in the recipient"


def check_controls(patch: PatchSettings, table: pd.DataFrame) -> None:
    """Refuse a control that takes from another instance where there is none.

    Args:
        table: identity of all prompts.

    Raises:
        UsageError: naming the control and the group.
    """
    for name in (UNRELATED, SAME_CELL):
        counts = Counter(_alike(name, table)) if name in patch.controls else Counter()
        for group, count in counts.items():
            if count < 2:
                where = group if isinstance(group, str) else f"cell {group[1]} of {group[0]}"
                raise UsageError(
                    f"controls is {', '.join(patch.controls)}: {where} has one instance and {name!r} takes from another; "
                    f"raise --limit, or leave {name!r} out"
                )


def _alike(name: str, table: pd.DataFrame) -> list[Any]:
    """What a control's donor has in common with the recipient, for each pair."""
    shown = table[table["presentation"] == PAIR[0]]
    settings = shown["setting"].tolist()
    return settings if name == UNRELATED else list(zip(settings, shown["cell"], strict=True))


def _first_fitting(
    following: np.ndarray, start: int, rows: np.ndarray, tokens: Tokens, position: str, width: int
) -> int | None:
    """The first donor after ``start`` with this many tokens; None once the order has gone round."""
    at = int(following[start])
    while at != start:
        if len(tokens.at(int(rows[at]), position)) == width:
            return int(rows[at])
        at = int(following[at])
    return None


def check_spans(tokens: Tokens, table: pd.DataFrame, positions: Sequence[str]) -> None:
    """Refuse a position at which no pair has equally many tokens in both presentations.

    Args:
        table: the column ``presentation``, rows as the prompts.

    Raises:
        UsageError: naming the position.
    """
    couples = list(zip(*(rows_of(table, kind) for kind in PAIR), strict=True))
    for position in positions:
        sizes = [tuple(len(tokens.at(int(row), position)) for row in couple) for couple in couples]
        if not any(one == two and one for one, two in sizes):
            one, two = max(sizes)
            raise UsageError(
                f"positions is {position}: in none of {len(couples)} pairs do both presentations have equally many tokens "
                f"there (in one of them {one} and {two}), so none can be put in place of the other: name another position"
            )
