"""Statistics of answers: resampling many pairs, each figure beside a plain per-item Python loop in the same run.

``python benchmarks/statistics.py [--json] [--quick]``

* 10,000 paired bootstrap resamples of 1,800 pairs in two arms: under 2 s on one core, also with nine sizes, strata and
  every statistic there is, and with clusters;
* 2,000 resamples of the full catalog (31 relations × 9 sizes × 200 instances), the rows of an instance drawn together;
* memory does not grow with the number of resamples.

The loop draws pairs one by one and counts them in Python; it is timed on a few resamples and scaled up, and has to find
the same intervals. Figures depend on an otherwise idle machine.
"""

from __future__ import annotations

import sys

if __name__ == "statistics":
    # A script beside this one asked for the module of the standard library, which this file's name hides from it.
    import importlib.util
    import sysconfig

    found = importlib.util.spec_from_file_location(__name__, f"{sysconfig.get_path('stdlib')}/statistics.py")
    assert found is not None and found.loader is not None
    sys.modules[__name__] = importlib.util.module_from_spec(found)
    found.loader.exec_module(sys.modules[__name__])

import argparse
import json
import os
import random
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
ROOT = Path(__file__).resolve().parents[1]
STATISTICS = ("accuracy_original", "accuracy_equivalent", "invariance", "robust", "kappa")
SIZES, INSTANCES, RELATIONS = [2**k for k in range(2, 11)], 200, 31


def study(rows: int, seed: int = 0) -> tuple[Any, Any, list[str]]:
    """Two arms and gold: three of four answers right, half of the second answers repeat the first, 1% missing."""
    import numpy as np

    from experiments.statistics import Arm

    rng, words = np.random.default_rng(seed), np.array(["no", "yes", None], dtype=object)
    gold = rng.integers(0, 2, rows)
    arms = []
    for right, agree in ((0.72, 0.5), (0.8, 0.7)):
        first, fresh = (np.where(rng.random(rows) < right, gold, 1 - gold) for _ in range(2))
        second = np.where(rng.random(rows) < agree, first, fresh)
        shown = (np.where(rng.random(rows) < 0.01, 2, one) for one in (first, second))
        arms.append(Arm(*(words[one].tolist() for one in shown)))
    return arms[0], arms[1], words[gold].tolist()


def by_hand(arm: Any, gold: list[str], drawn: list[int]) -> list[float]:
    """The statistics of one resample, pair by pair."""
    right_first = right_second = both = agree = robust = yes = 0
    for i in drawn:
        first, second, truth = arm.original[i], arm.equivalent[i], gold[i]
        right_first += first == truth
        right_second += second == truth
        if first is not None and second is not None:
            both += 1
            agree += first == second
            robust += first == second == truth
            yes += (first == "yes") + (second == "yes")
    iota, q = agree / both, yes / (2 * both)
    chance = q * q + (1 - q) * (1 - q)
    return [right_first / len(drawn), right_second / len(drawn), iota, robust / both, (iota - chance) / (1 - chance)]


def loop(before: Any, after: Any, gold: list[str], blocks: list[list[int]], resamples: int) -> list[list[float]]:
    """Resample within blocks of row numbers, one row at a time."""
    rng, changes = random.Random(0), []
    for _ in range(resamples):
        drawn = [rng.choice(block) for block in blocks for _ in block]
        one, other = by_hand(before, gold, drawn), by_hand(after, gold, drawn)
        changes.append([b - a for a, b in zip(one, other, strict=True)])
    return changes


def clustered_loop(before: Any, after: Any, gold: list[str], keys: list[int], resamples: int) -> list[list[float]]:
    """Resample keys, with all rows of each."""
    members: dict[int, list[int]] = {}
    for row, key in enumerate(keys):
        members.setdefault(key, []).append(row)
    rng, changes, names = random.Random(0), [], list(members)
    for _ in range(resamples):
        drawn = [row for _ in names for row in members[rng.choice(names)]]
        one, other = by_hand(before, gold, drawn), by_hand(after, gold, drawn)
        changes.append([b - a for a, b in zip(one, other, strict=True)])
    return changes


def seconds(call: Callable[[], Any], times: int = 3) -> tuple[float, Any]:
    """Median time of some calls after one that warms up, and what the last returned."""
    took, result = [], call()
    for _ in range(times):
        started = time.perf_counter()
        result = call()
        took.append(time.perf_counter() - started)
    return sorted(took)[len(took) // 2], result


def peak_mb(call: Callable[[], Any]) -> float:
    import tracemalloc

    tracemalloc.start()
    call()
    peak = tracemalloc.get_traced_memory()[1] / 1e6
    tracemalloc.stop()
    return peak


class Claims:
    """Rows of what was measured and the bound it is held to."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    def below(self, claim: str, value: float, bound: float) -> None:
        self.rows.append({"claim": claim, "value": round(float(value), 3), "bound": bound, "ok": bool(value < bound)})

    def above(self, claim: str, value: float, bound: float) -> None:
        self.rows.append({"claim": claim, "value": round(float(value), 3), "bound": bound, "ok": bool(value > bound)})


def resampled(claims: Claims, few: int) -> None:
    """1,800 pairs: plain, within sizes, with strata and every statistic, by clusters; and memory."""
    import numpy as np

    from experiments.statistics import STATISTICS as EVERY
    from experiments.statistics import compare_arms

    sizes = [size for size in SIZES for _ in range(INSTANCES)]
    n = len(sizes)
    before, after, gold = study(n)
    blocks = [[row for row, one in enumerate(sizes) if one == size] for size in SIZES]
    strata, keys = [row % RELATIONS for row in range(n)], list(range(n))

    def ours(resamples: int = 10_000, **how: Any) -> dict[str, Any]:
        return compare_arms(before, after, gold, resamples=resamples, seed=0, **{"statistics": STATISTICS, **how})

    in_blocks = partial(loop, before, after, gold, blocks, few)
    cases = (
        ("", {}, partial(loop, before, after, gold, [keys], few)),
        (", 9 sizes", {"sizes": sizes}, in_blocks),
        (", 9 sizes, 31 strata, every statistic", {"sizes": sizes, "strata": strata, "statistics": EVERY}, in_blocks),
        (", clusters", {"clusters": keys}, partial(clustered_loop, before, after, gold, keys, few)),
    )
    for name, how, plain in cases:
        took, found = seconds(partial(ours, **how))
        loop_took, changes = seconds(plain, times=1)
        whole = loop_took * 10_000 / few
        claims.below(f"10,000 resamples of 1,800 pairs{name}, s (loop {whole:.0f} s)", took, 2.0)
        claims.above(f"times faster than the loop{name}, at least", whole / took, 10.0)
        errors = np.array([(found[one].high - found[one].low) / (2 * 1.96) for one in STATISTICS])
        ratio = errors / np.std(changes, axis=0)
        claims.below(f"standard errors against the loop's{name}, largest ratio", max(*ratio, *(1 / ratio)), 2.0)
    small, large = (peak_mb(partial(ours, resamples, clusters=keys)) for resamples in (10_000, 100_000))
    claims.below(f"100,000 resamples by clusters, peak MB ({small:.0f} MB for 10,000)", large, 200.0)


def catalog(claims: Claims) -> None:
    """Every relation, size and instance, as for the paper's catalog tables."""
    from experiments.statistics import compare_arms, pair_profile

    n = len(SIZES) * INSTANCES
    keys, relation = list(range(n)) * RELATIONS, [number for number in range(RELATIONS) for _ in range(n)]
    sizes = [SIZES[key // INSTANCES] for key in keys]
    before, after, gold = study(len(keys), seed=1)
    loop_took, _ = seconds(partial(clustered_loop, before, after, gold, keys, 1), times=1)
    for name, clusters in (("by instance", keys), ("each row by itself", None)):
        took, _ = seconds(
            partial(compare_arms, before, after, gold, statistics=STATISTICS, sizes=sizes, strata=relation,
                    clusters=clusters, resamples=2000, seed=0)
        )  # fmt: skip
        of = f"2,000 resamples of 55,800 pairs in 31 relations, {name}"
        claims.below(f"{of}, s (loop {2000 * loop_took:.0f} s)", took, 5.0)
    took, profile = seconds(partial(pair_profile, *before, gold), times=10)
    loop_took, by_loop = seconds(partial(by_hand, before, gold, list(range(len(keys)))))
    assert abs(profile.kappa.value - by_loop[-1]) < 1e-9
    claims.below(f"profile of 55,800 pairs, s (loop, five numbers only, {loop_took:.3f} s)", took, 0.2)


def crossings(claims: Claims, few: int) -> None:
    """A crossing of nine sizes, 4,000 resamples."""
    from experiments.statistics import crossing

    iota, counts = [0.99, 0.97, 0.93, 0.88, 0.86, 0.845, 0.83, 0.7, 0.6], [INSTANCES] * len(SIZES)
    took, found = seconds(partial(crossing, SIZES, iota, counts, threshold=0.85, seed=0))

    def plain() -> float:
        rng, same = random.Random(0), 0
        for _ in range(few):
            shares = [sum(rng.random() < p for _ in range(k)) / k for p, k in zip(iota, counts, strict=True)]
            same += next((size for size, p in zip(SIZES, shares, strict=True) if p < 0.85), None) == found.size
        return same / few

    loop_took, _ = seconds(plain, times=1)
    claims.below(f"4,000 resamples of a crossing, s (loop {loop_took * 4000 / few:.1f} s)", took, 0.1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--quick", action="store_true", help="fewer resamples of the plain loop")
    chosen = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    claims, few = Claims(), 10 if chosen.quick else 40
    resampled(claims, few)
    catalog(claims)
    crossings(claims, few)
    rows = claims.rows
    if chosen.json:
        print(json.dumps(rows, indent=1))
    else:
        for row in rows:
            print(f"{'ok  ' if row['ok'] else 'MISS'} {row['claim']:<92} {row['value']:>9}  bound {row['bound']}")
    sys.exit(not all(row["ok"] for row in rows))


if __name__ == "__main__":
    main()
