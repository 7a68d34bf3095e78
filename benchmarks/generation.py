"""How fast ordering items are made, and that the whole catalog streams without being held in memory.

    python benchmarks/generation.py [--full] [--json]

* matched sets a second on one core, two presentations each, at n = 8 and n = 1024;
* the whole catalog, 31 relations at 9 sizes (4 … 1024): seconds, and how far the peak of resident memory rises above
  that of one relation. ``--full`` takes 200 pairs a size as a study does, otherwise 10. It runs in a process of its own,
  since a peak never falls.

The peer is what a script would do: one ``random.Random(seed + i)`` an item, shuffles and f-strings. It makes the same
texts in kind, but no spans, keys, splits or records, and its neighbouring seeds share items. Both take turns in the same
run, and the median of the rounds counts. Seconds are of processor time: generation is one thread that never waits, so
this is what one core gives, whatever else runs on the machine.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# Run as a script, the checkout is not on the path.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tasks.names import census
from tasks.ordering import Ordering
from tasks.relations import catalog, relation_named

SIZES = (4, 8, 16, 32, 64, 128, 256, 512, 1024)
SHORT_BOUND, LONG_BOUND, GROWTH_BOUND = 10_000.0, 40.0, 16.0
ROUNDS = 5
FULL_PAIRS, PAIRS = 200, 10


def plain(n: int, relation: str, *, seed: int) -> Iterator[dict[str, Any]]:
    """The peer: original and equivalent of one item after the other."""
    words, pool = relation_named(relation), census()
    forward, converse = words.forward, words.converse
    for i in itertools.count():
        rng = random.Random(seed + i)
        order = rng.sample(pool, n)
        answer = ("yes", "no")[i % 2]
        first, last = (order[0], order[-1]) if answer == "yes" else (order[-1], order[0])
        question = words.forward_query.format(x=first, y=last)
        reworded = set(rng.sample(range(n - 1), rng.randint(max(1, (n - 1) // 5), n - 1)))
        texts = []
        for chosen in (set(), reworded):
            names = order[:]
            rng.shuffle(names)
            premises = []
            for link in range(n - 1):
                if link in chosen:
                    premises.append(converse.format(x=order[link + 1], y=order[link]))
                else:
                    premises.append(forward.format(x=order[link], y=order[link + 1]))
            rng.shuffle(premises)
            listed, told = ", ".join(names), "\n".join(premises)
            texts.append(f"{words.scene}: {listed}.\n\n{told}\n\n{question} Answer with Yes or No only.")
        yield {"answer": answer, "texts": texts}


def ours(n: int, relation: str, *, seed: int) -> Iterator[Any]:
    return Ordering().generate({"n": n, "relation": relation}, seed=seed, split="test")


def rate(items: Iterator[Any], count: int) -> float:
    """Items a second of the next ``count``."""
    started = time.process_time()
    for _ in itertools.islice(items, count):
        pass
    return count / (time.process_time() - started)


def rates(n: int, count: int) -> tuple[float, float]:
    """Median sets a second of ours and of the peer, by turns."""
    both = ours(n, "front_behind", seed=0), plain(n, "front_behind", seed=0)
    for items in both:  # what is made once is not timed
        next(items)
    found = [(rate(both[0], count), rate(both[1], count)) for _ in range(ROUNDS)]
    return statistics.median(one for one, _ in found), statistics.median(other for _, other in found)


def stream_catalog(pairs: int) -> dict[str, float]:
    """Seconds of ours and the peer for the catalog, and the rise of peak memory in MB after the first relation."""
    names = catalog()
    seconds, peer, characters = 0.0, 0.0, 0
    before = 0.0
    for place, relation in enumerate(names):
        for n in SIZES:
            started = time.process_time()
            for matched in itertools.islice(ours(n, relation, seed=1), pairs):
                characters += sum(len(shown.messages[0].content) for shown in matched.presentations)
            seconds += time.process_time() - started
            started = time.process_time()
            for _ in itertools.islice(plain(n, relation, seed=1), pairs):
                pass
            peer += time.process_time() - started
        if place == 0:
            before = _peak()
    return {"seconds": seconds, "peer": peer, "growth": _peak() - before, "peak": _peak(), "text": characters / 1e6}


def _peak() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1000


def measure(pairs: int) -> dict[str, Any]:
    child = subprocess.run(
        [sys.executable, __file__, "--catalog-only", str(pairs)], check=True, capture_output=True, text=True
    )
    return {
        "pairs": pairs,
        "short": rates(8, 4_000),
        "long": rates(1024, 60),
        "catalog": json.loads(child.stdout),
    }


def claims(found: dict[str, Any]) -> list[dict[str, Any]]:
    """One row a claim; rates are to be at least their bound, memory at most."""
    (short, short_peer), (long, long_peer), whole = found["short"], found["long"], found["catalog"]
    catalog_is = f"{len(catalog())} relations, {len(SIZES)} sizes, {found['pairs']} pairs each"
    rows = [
        (f"sets/s at n = 8 (plain loop {short_peer:,.0f})", short, SHORT_BOUND, short >= SHORT_BOUND),
        (f"sets/s at n = 1024 (plain loop {long_peer:,.0f})", long, LONG_BOUND, long >= LONG_BOUND),
        (
            f"times as long as the plain loop for {catalog_is} ({whole['seconds']:.1f} s, plain {whole['peer']:.1f} s)",
            whole["seconds"] / whole["peer"],
            3.0,
            whole["seconds"] <= 3.0 * whole["peer"],
        ),
        (
            f"MB by which peak memory rises from the first relation to all of them ({whole['text']:.0f} MB of text "
            f"streamed, peak {whole['peak']:.0f} MB)",
            whole["growth"],
            GROWTH_BOUND,
            whole["growth"] <= GROWTH_BOUND,
        ),
    ]
    return [
        {"claim": name, "value": round(value, 3), "bound": bound, "ok": bool(ok)} for name, value, bound, ok in rows
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description="Speed and memory of generation.")
    parser.add_argument("--full", action="store_true", help=f"{FULL_PAIRS} pairs a size instead of {PAIRS}")
    parser.add_argument("--json", action="store_true", help="print the claims as JSON and nothing else")
    parser.add_argument("--catalog-only", type=int, metavar="PAIRS", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.catalog_only:
        print(json.dumps(stream_catalog(options.catalog_only)))
        return 0
    rows = claims(measure(FULL_PAIRS if options.full else PAIRS))
    if options.json:
        print(json.dumps(rows, indent=1))
    else:
        for row in rows:
            print(f"{'ok  ' if row['ok'] else 'FAIL'} {row['claim']}: {row['value']:,.2f} (bound {row['bound']:,g})")
    return 0 if all(row["ok"] for row in rows) else 1


if __name__ == "__main__":
    raise SystemExit(main())
