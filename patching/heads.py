"""Which heads matter, found on some vocabularies and tested on others; and the sets an ablation is compared with.

Problem. The first of 448 heads by effect is the largest of 448 noisy numbers, so its effect on the rows that ranked it is
too large, and a head that reads one relation's words is taken for one that computes. And "ablating the four best heads
removes 40 % of the signal" says nothing until four other heads have been ablated too.

Mechanism. ``select_heads`` ranks heads by mean effect on the rows of some *units* (relations, vocabularies, settings) and
takes the top k. The same heads' effects on the rows of the held-out units are then plain estimates, with intervals by
instance. How well the two rankings agree is reported over all heads.

``head_sets`` makes what is ablated: the top k; the top k without each of its members in turn (what the member adds to the
others); k random heads; and k random heads of the same layers, head for head, which keeps depth out of the comparison.

Constraints. Rows of an instance that stands in a held-out unit and in a training unit are left out of training, because
the same latent problem in two vocabularies is not two. If nothing is left, hold out instances as well. A layer in which
more than half of the heads were chosen has no other set of as many; that control is then absent, with the reason.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from patching.controls import keyed_generator
from patching.edits import ANSWER, ZERO, Cell, PatchError
from patching.effects import HeadEffect, head_set_cell, random_head_sets, rank_heads

Head = tuple[int, int]
"""(layer, head)."""


@dataclass(frozen=True, slots=True)
class HeadSelection:
    """Heads chosen on some units and tested on others.

    Attributes:
        top: the chosen heads, best first.
        ranked: all heads by their effect on the training rows, best first.
        tested: the same heads in the same order, with their effects on the held-out rows.
        held_out: the held-out units.
        n, n_held_out: rows of each side; ``left_out`` rows were dropped from training (see above).
        spearman: rank correlation of the two sides' effects over all heads.
        overlap: how many of the top heads are also among the top of the held-out rows.
    """

    top: tuple[Head, ...]
    ranked: tuple[HeadEffect, ...]
    tested: tuple[HeadEffect, ...]
    held_out: tuple[str, ...]
    n: int
    n_held_out: int
    left_out: int
    spearman: float
    overlap: int


@dataclass(frozen=True, slots=True)
class HeadSets:
    """Named sets of heads to ablate, ``top`` first; ``absent`` says why a control could not be made."""

    sets: Mapping[str, tuple[Head, ...]]
    absent: Mapping[str, str]

    def family(self, name: str) -> tuple[str, ...]:
        """The names of the sets of one control: ``random``, ``same layers`` or ``top without``."""
        return tuple(one for one in self.sets if one != "top" and one.rpartition(" ")[0] == name)


def select_heads(
    effects: np.ndarray,
    cells: Sequence[Cell],
    units: Sequence[str],
    *,
    held_out: Collection[str],
    k: int,
    groups: Sequence[Any] | None = None,
    seed: int,
    resamples: int = 2000,
    level: float = 0.95,
) -> HeadSelection:
    """Rank heads on the rows of the other units, take the first ``k`` and test all of them on the held-out units.

    Args:
        effects: ``[row, head]`` signed effects, see ``effects.signed_effect``.
        cells: the heads' cells, the columns.
        units: the unit of each row.
        held_out: units that take no part in the ranking.
        groups: the instance of each row, the same in all units.
    """
    rows, heads = effects.shape
    names = list(range(rows)) if groups is None else list(groups)
    if len(units) != rows or len(names) != rows:
        raise PatchError(f"{rows} rows of effects, {len(units)} units and {len(names)} groups; give one of each a row")
    if not 0 < k <= heads:
        raise PatchError(f"k is {k}; give 1 to {heads}, the number of heads swept")
    if unknown := sorted(set(held_out) - set(units)):
        raise PatchError(f"no row is of held-out unit {unknown[0]!r}; units: {', '.join(sorted(set(units)))}")
    outside = np.isin(np.asarray(units, dtype=object), list(held_out))
    shared = {name for name, out in zip(names, outside, strict=True) if out}
    tied = np.array([not out and name in shared for name, out in zip(names, outside, strict=True)])
    inside = ~outside & ~tied
    if not outside.any() or not inside.any():
        raise PatchError(
            f"{int(inside.sum())} rows are left to rank heads on and {int(outside.sum())} to test them "
            f"({int(tied.sum())} share an instance with held-out rows); hold out fewer units, or hold out instances too"
        )

    def ranked(chosen: np.ndarray) -> tuple[HeadEffect, ...]:
        own = [names[row] for row in np.flatnonzero(chosen)]
        return rank_heads(effects[chosen], cells, groups=own, seed=seed, resamples=resamples, level=level)

    first, second = ranked(inside), ranked(outside)
    place = {(one.layer, one.head): one for one in second}
    tested = tuple(place[one.layer, one.head] for one in first)
    top = tuple((one.layer, one.head) for one in first[:k])
    return HeadSelection(
        top=top,
        ranked=first,
        tested=tested,
        held_out=tuple(sorted(set(held_out))),
        n=int(inside.sum()),
        n_held_out=int(outside.sum()),
        left_out=int(tied.sum()),
        spearman=_spearman([one.mean for one in first], [one.mean for one in tested]),
        overlap=len({*top} & {(one.layer, one.head) for one in second[:k]}),
    )


def head_sets(
    heads: Sequence[int | None], top: Sequence[Head], *, count: int = 10, seed: int, leave_one_out: bool = True
) -> HeadSets:
    """The top heads, the same without each one, and ``count`` random sets of each kind.

    Args:
        heads: the model's head map.
        top: the chosen heads; all must exist.
        count: sets of each random control. They are all different, so of few heads there may be fewer of them.
    """
    chosen = list(dict.fromkeys(top))
    if not chosen:
        raise PatchError("no top heads; give at least one (layer, head)")
    for layer, head in chosen:
        if not 0 <= layer < len(heads) or not 0 <= head < (heads[layer] or 0):
            have = heads[layer] or "no heads" if 0 <= layer < len(heads) else "no such layer"
            raise PatchError(f"head {head} of layer {layer} does not exist (the layer has {have}); use head_map(model)")
    sets: dict[str, tuple[Head, ...]] = {"top": tuple(chosen)}
    absent: dict[str, str] = {}
    if leave_one_out and len(chosen) > 1:
        for layer, head in chosen:
            sets[f"top without {layer}.{head}"] = tuple(one for one in chosen if one != (layer, head))
    elif leave_one_out:
        absent["top without"] = "one head is the whole set"
    rest = sum(n or 0 for n in heads) - len(chosen)
    if rest < len(chosen):
        absent["random"] = f"{rest} heads are left beside the top {len(chosen)}"
    else:
        made = random_head_sets(heads, size=len(chosen), count=count, exclude=chosen, seed=seed)
        sets.update({f"random {number}": one for number, one in enumerate(made, start=1)})
    found = _same_layers(heads, chosen, count, seed)
    if isinstance(found, str):
        absent["same layers"] = found
    else:
        sets.update({f"same layers {number}": one for number, one in enumerate(found, start=1)})
    return HeadSets(sets, absent)


def ablation_cells(sets: HeadSets, *, source: str = ZERO, position: str = ANSWER) -> list[Cell]:
    """One cell a set: its heads zeroed, or replaced by a donor (a mean, a resampled run), at ``answer`` or ``all``."""
    return [head_set_cell(name, chosen, source=source, position=position) for name, chosen in sets.sets.items()]


def _same_layers(
    heads: Sequence[int | None], top: Iterable[Head], count: int, seed: int
) -> list[tuple[Head, ...]] | str:
    """Sets with as many heads in each layer as the top ones, none of them top; or why there are none."""
    taken: dict[int, list[int]] = {}
    for layer, head in top:
        taken.setdefault(layer, []).append(head)
    pools = {layer: [h for h in range(heads[layer] or 0) if h not in own] for layer, own in sorted(taken.items())}
    for layer, pool in pools.items():
        if len(pool) < len(taken[layer]):
            return f"layer {layer} has {heads[layer]} heads, {len(taken[layer])} of them in the top set"
    made: dict[tuple[Head, ...], None] = {}
    for index in range(20 * count):  # few heads make few different sets
        rng = keyed_generator("heads.same_layers", seed, index)
        one: list[Head] = []
        for layer, pool in pools.items():
            one += [(layer, pool[int(i)]) for i in rng.choice(len(pool), size=len(taken[layer]), replace=False)]
        made.setdefault(tuple(sorted(one)))
        if len(made) == count:
            break
    return list(made)


def _spearman(one: Sequence[float], two: Sequence[float]) -> float:
    from scipy.stats import spearmanr

    if len(one) < 2 or len(set(one)) < 2 or len(set(two)) < 2:
        return float("nan")
    return float(spearmanr(one, two).statistic)
