"""How fast the probability operators are made, solved again and scored.

    python benchmarks/modals.py [--quick] [--json]

* all 14,320 prompts of the benchmark rendered, and each solved again from its text: under 2 s together;
* 14,320 responses of each of 29 models read, graded and scored, with every interval and comparison of the paper's
  tables: under 10 s. ``--quick`` takes 5 models, and scales the time up.

The peer reads and counts the same responses in a plain loop (one call of the parser each, no intervals) and has to find
the same cells. Seconds are of processor time on one core.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
# Run as a script, the checkout is not on the path, and statistics.py beside this file hides the standard library's.
sys.path[:] = [
    str(Path(__file__).resolve().parents[1]),
    *(p for p in sys.path if Path(p or ".").resolve().name != "benchmarks"),
]

MAKE_BOUND, SCORE_BOUND, MODELS = 2.0, 10.0, 29
# What models say, and how often: mostly the bare label, sometimes more.
SAID = {
    "yes": ("Yes", "Yes.", "**Yes**", "Yes, it is.", "The answer is yes."),
    "no": ("No", "No.", "**No**", "No, it is not.", "The answer is no."),
    "": ("It cannot be determined from what is said.", "Not necessarily."),
}


def make() -> tuple[float, float, list[Any], int]:
    """Seconds to load the catalog and render, and to solve again; the sets; and how many solutions differ."""
    started = time.process_time()
    from tasks.modals import Modals

    family = Modals()
    sets = list(family.generate({}, seed=0, split="test"))
    rendered = time.process_time()
    wrong = sum(family.verify(one) != {p.kind: p.gold for p in one.presentations} for one in sets)
    return rendered - started, time.process_time() - rendered, sets, wrong


def responses(sets: list[Any], models: int) -> list[list[str]]:
    """Made-up answers of models with a bias and an accuracy each."""
    made = []
    for model in range(models):
        rng = random.Random(model)
        lean, accuracy = rng.uniform(-0.4, 0.4), rng.uniform(0.4, 0.9)
        column = []
        for one in sets:
            for shown in one.presentations:
                right = rng.random() < accuracy + (lean if shown.gold == "yes" else -lean)
                label = shown.gold if right else {"yes": "no", "no": "yes"}[shown.gold]
                column.append(rng.choice(SAID["" if rng.random() < 0.02 else label]))
        made.append(column)
    return made


def columns(sets: list[Any]) -> dict[str, list[Any]]:
    """What the statistics need to know of each prompt."""
    rows = [(one.instance, shown) for one in sets for shown in one.presentations]
    latent = [instance.latent for instance, _ in rows]
    return {
        "valid": [instance.cell == "valid" for instance, _ in rows],
        "negated": [shown.meta["polarity"] == "negated" for _, shown in rows],
        "gold": [shown.gold for _, shown in rows],
        "sets": [instance.key for instance, _ in rows],
        "form": [shown.meta["form"] for _, shown in rows],
        "negation": [shown.meta["negation"] for _, shown in rows],
        "five": [shown.kind not in ("not_correct", "not_valid") for _, shown in rows],
        **{key: [one[key] for one in latent] for key in ("template", "pattern", "group", "gender", "activity")},
    }


def score(sets: list[Any], said: list[str], known: dict[str, list[Any]]) -> dict[str, float]:
    """Read, grade and score the responses of one model."""
    from experiments.statistics.polarity import polarity_profile, pooling
    from experiments.statistics.polarity_groups import compare_groups, negation_strategy
    from tasks.modals import Modals

    family, place, answers, right = Modals(), iter(said), [], []
    for one in sets:
        for shown in one.presentations:
            parsed = family.parse(next(place), shown)
            answers.append(parsed.value)
            right.append(family.grade(parsed, shown).correct)
    at = [i for i, inside in enumerate(known["five"]) if inside]

    def five(column: list[Any]) -> list[Any]:
        return [column[i] for i in at]

    valid, negated, keys, template = (five(known[key]) for key in ("valid", "negated", "sets", "template"))
    how: dict[str, Any] = {"resamples": 2000, "seed": 0}
    whole = polarity_profile(five(answers), valid, negated, keys, strata=template, **how)
    pooling(five(answers), valid, negated, keys, patterns=five(known["pattern"]), frames=five(known["form"]),
            strata=template, **how)  # fmt: skip
    negation_strategy(answers, known["gold"], known["form"], known["negation"], known["sets"], **how)
    correct, activity = five(right), five(known["activity"])
    for members in ("group", "gender"):
        # Templates and activities are what two groups share; the letters are the reference.
        named = ["letters" if group == "letters" else one for group, one in zip(five(known["group"]), five(known[members]),
                                                                                strict=True)]  # fmt: skip
        compare_groups(correct, named, list(zip(template, activity, strict=True)), reference="letters", **how)
    people = list(zip(template, five(known["group"]), five(known["gender"]), strict=True))
    compare_groups(correct, activity, people, **how)
    return {name: one.value for name, one in whole.measures.items()}


def plain(sets: list[Any], said: list[str]) -> dict[str, float]:
    """The peer: the four cells in a loop."""
    from tasks.parsing import parse_label

    place, right, asked = iter(said), Counter[str](), Counter[str]()
    for one in sets:
        for shown in one.presentations:
            text = next(place)
            if shown.kind in ("not_correct", "not_valid"):
                continue
            cell = one.instance.cell[0] + "_" + shown.meta["polarity"][:3]
            asked[cell] += 1
            right[cell] += parse_label(text).value == shown.gold
    return {cell: right[cell] / asked[cell] for cell in ("v_aff", "v_neg", "i_aff", "i_neg")}


def measure(models: int) -> list[dict[str, Any]]:
    rendered, solved, sets, wrong = make()
    prompts = sum(len(one.presentations) for one in sets)
    given, known = responses(sets, models), columns(sets)
    score(sets, given[0], known)  # what is imported and compiled once is not timed
    started = time.process_time()
    found = [score(sets, column, known) for column in given]
    seconds = (time.process_time() - started) * MODELS / models
    started = time.process_time()
    peer = [plain(sets, column) for column in given[:2]]
    loop = (time.process_time() - started) * MODELS / len(peer)
    off = max(abs(one[cell] - other[cell]) for one, other in zip(found, peer, strict=False) for cell in other)
    rows = [
        (f"s for {prompts:,} prompts (rendered {rendered:.2f} s, solved again {solved:.2f} s)", rendered + solved,
         MAKE_BOUND),
        ("prompts whose second solution differs from gold", float(wrong), 0.0),
        (f"s to read, grade and score {prompts:,} responses of {MODELS} models (plain loop, no intervals {loop:.1f} s)",
         seconds, SCORE_BOUND),
        ("largest difference of a cell from the plain loop", off, 1e-12),
    ]  # fmt: skip
    return [
        {"claim": claim, "value": round(value, 3), "bound": bound, "ok": value <= bound} for claim, value, bound in rows
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description="Speed of the probability operators.")
    parser.add_argument("--quick", action="store_true", help=f"5 models, scaled up to {MODELS}")
    parser.add_argument("--json", action="store_true", help="print the claims as JSON and nothing else")
    options = parser.parse_args()
    rows = measure(5 if options.quick else MODELS)
    if options.json:
        print(json.dumps(rows, indent=1))
    else:
        for row in rows:
            print(f"{'ok  ' if row['ok'] else 'FAIL'} {row['claim']}: {row['value']:,.2f} (bound {row['bound']:g})")
    return 0 if all(row["ok"] for row in rows) else 1


if __name__ == "__main__":
    raise SystemExit(main())
