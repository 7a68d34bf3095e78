"""The statistics that can be resampled, each as sums over pairs.

A bootstrap computes a statistic thousands of times. Doing that pair by pair is slow, and not needed: each statistic here
is made of totals (how many pairs agree, how many have both answers, …), and a resample changes only how often a pair
counts in them. So a statistic is written down as the totals that it needs and what to do with them. A resample is then
one row of weights, and all resamples of all statistics are one matrix product (`experiments.statistics.resampling`).

`RATIOS` names part and whole of each share, `DIFFERENCES` two shares of the same pairs; κ needs four totals, within each
size for its mean κ̄. Totals are over all pairs of the data, so they include the ones whose answers are missing wherever a
statistic does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from experiments.errors import RunError
from experiments.statistics.columns import MISSING, divide

Values = Callable[[np.ndarray], np.ndarray]

RATIOS: Mapping[str, tuple[str, str]] = {
    "accuracy_original": ("right_first", "all"),
    "accuracy_equivalent": ("right_second", "all"),
    "accuracy_mean": ("right", "asked"),
    "accuracy_parsed_original": ("right_first", "parsed_first"),
    "accuracy_parsed_equivalent": ("right_second", "parsed_second"),
    "accuracy_yes_original": ("right_yes_first", "gold_yes"),
    "accuracy_yes_equivalent": ("right_yes_second", "gold_yes"),
    "accuracy_no_original": ("right_no_first", "gold_no"),
    "accuracy_no_equivalent": ("right_no_second", "gold_no"),
    "yes_rate_original": ("yes_first", "parsed_first"),
    "yes_rate_equivalent": ("yes_second", "parsed_second"),
    "yes_rate": ("yes", "parsed"),
    "unparsed_original": ("unparsed_first", "all"),
    "unparsed_equivalent": ("unparsed_second", "all"),
    "unparsed": ("unparsed", "asked"),
    "invariance": ("agree", "both"),
    "strict_invariance": ("agree", "all"),
    "robust": ("both_right", "both"),
    "shared_wrong": ("both_wrong", "both"),
    "unstable": ("one_right", "both"),
}
DIFFERENCES: Mapping[str, tuple[str, str]] = {
    "accuracy_gap": ("accuracy_original", "accuracy_equivalent"),
    "bias_original": ("accuracy_yes_original", "accuracy_no_original"),
    "bias_equivalent": ("accuracy_yes_equivalent", "accuracy_no_equivalent"),
    "yes_rate_gap": ("yes_rate_original", "yes_rate_equivalent"),
    "unparsed_gap": ("unparsed_original", "unparsed_equivalent"),
}
_KAPPA = ("both", "agree", "yes_first_both", "yes_second_both")
KAPPAS = ("kappa", "kappa_separate", "kappa_bar", "kappa_bar_separate")
STATISTICS = (*RATIOS, *DIFFERENCES, *KAPPAS)


class Measures:
    """The totals that some statistics need, and their values from them.

    `weights` [pattern, total] says what each pattern of answers adds to each total. `values` turns totals
    [..., total] into statistics [..., statistic], NaN where one is undefined; `supports` turns them into how many pairs
    (or prompts, for a statistic over both presentations) counted.
    """

    def __init__(
        self, names: Sequence[str], first: np.ndarray, second: np.ndarray, truth: np.ndarray, size: np.ndarray
    ) -> None:
        if unknown := [name for name in names if name not in STATISTICS]:
            raise RunError(f"statistic {unknown[0]!r} is unknown; allowed: {', '.join(STATISTICS)}")
        self._events, self._size = _events(first, second, truth), size
        self._columns: dict[tuple[str, int | None], int] = {}
        built = [self._statistic(name) for name in names]
        self._values = [values for values, _ in built]
        self._supports = [support for _, support in built]
        self.weights = np.column_stack([self._weight(*key) for key in self._columns])

    def values(self, totals: np.ndarray) -> np.ndarray:
        return np.stack([values(totals) for values in self._values], axis=-1)

    def supports(self, totals: np.ndarray) -> list[int]:
        return [round(float(totals[..., columns].sum())) for columns in self._supports]

    def _statistic(self, name: str) -> tuple[Values, list[int]]:
        """Return how a statistic is computed from totals, and the totals that add up to its support."""
        if name in RATIOS:
            part, whole = (self._total(event) for event in RATIOS[name])
            return lambda totals: divide(totals[..., part], totals[..., whole]), [whole]
        if name in DIFFERENCES:
            (one, support), (other, rest) = (self._statistic(share) for share in DIFFERENCES[name])
            # Two shares of one whole (all prompts) have that whole as support, else both wholes count.
            return lambda totals: one(totals) - other(totals), sorted({*support, *rest})
        separate = name.endswith("separate")
        within = range(int(self._size.max()) + 1) if name.startswith("kappa_bar") else (None,)
        columns = [[self._total(event, size) for event in _KAPPA] for size in within]

        def mean_kappa(totals: np.ndarray) -> np.ndarray:
            each = np.stack([_kappa(*(totals[..., i] for i in one), separate=separate) for one in columns])
            defined = np.isfinite(each)
            return divide(np.where(defined, each, 0.0).sum(axis=0), defined.sum(axis=0))

        return mean_kappa, [one[0] for one in columns]

    def _total(self, event: str, size: int | None = None) -> int:
        return self._columns.setdefault((event, size), len(self._columns))

    def _weight(self, event: str, size: int | None) -> np.ndarray:
        weight = self._events[event]
        return weight if size is None else weight * (self._size == size)


def _events(first: np.ndarray, second: np.ndarray, truth: np.ndarray) -> dict[str, np.ndarray]:
    """Say for each pattern how often each event occurs in it."""
    parsed_first, parsed_second = first != MISSING, second != MISSING
    both, right_first, right_second = parsed_first & parsed_second, first == truth, second == truth
    counts = {
        "all": np.ones(len(truth)),
        "asked": np.full(len(truth), 2),
        "gold_yes": truth == 1,
        "gold_no": truth == 0,
        "parsed_first": parsed_first,
        "parsed_second": parsed_second,
        "unparsed_first": ~parsed_first,
        "unparsed_second": ~parsed_second,
        "yes_first": first == 1,
        "yes_second": second == 1,
        "right_first": right_first,
        "right_second": right_second,
        "right_yes_first": right_first & (truth == 1),
        "right_yes_second": right_second & (truth == 1),
        "right_no_first": right_first & (truth == 0),
        "right_no_second": right_second & (truth == 0),
        "both": both,
        "agree": both & (first == second),
        "yes_first_both": both & (first == 1),
        "yes_second_both": both & (second == 1),
        "both_right": both & right_first & right_second,
        "both_wrong": both & ~right_first & ~right_second,
        "one_right": both & (right_first ^ right_second),
    }
    events = {name: np.asarray(count, dtype=float) for name, count in counts.items()}
    for name in ("right", "yes", "parsed", "unparsed"):
        events[name] = events[f"{name}_first"] + events[f"{name}_second"]
    return events


def _kappa(
    both: np.ndarray, agree: np.ndarray, yes_first: np.ndarray, yes_second: np.ndarray, *, separate: bool
) -> np.ndarray:
    iota, q_first, q_second = (divide(part, both) for part in (agree, yes_first, yes_second))
    if separate:
        iota_e = q_first * q_second + (1 - q_first) * (1 - q_second)
    else:
        q = (q_first + q_second) / 2
        iota_e = q**2 + (1 - q) ** 2
    # A constant output is found by counting: rounding could leave a little of 1 - iota_e.
    yes = yes_first + yes_second
    constant = (yes == 0) | (yes == 2 * both)
    return divide(iota - iota_e, np.where(constant, 0.0, 1 - iota_e))
