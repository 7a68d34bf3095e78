"""Measures the built-in pair and writes its model card and its committed readouts.

The readouts are what ties the shipped weights to the shipped numbers: a test loads the weights and expects them.
"""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path
from typing import Any

from tasks.ordering import Ordering

READOUTS = "readouts.json"
PROMPTS = 8
FOLDER = Path(__file__).parents[2] / "activations" / "builtin"


def reference_chats() -> list[list[dict[str, str]]]:
    """The prompts whose readouts are committed: both presentations of the first test sets at n = 6."""
    sets = islice(Ordering().generate({"n": 6, "names": "builtin"}, seed=0, split="test"), PROMPTS)
    return [shown.chat() for matched in sets for shown in matched.presentations]


def readouts() -> dict[str, list[float]]:
    """Readout (yes minus no, logits) of the reference prompts, by arm."""
    from activations.model import load
    from activations.readout import answer_tokens, read

    model = load("builtin", adapters=("builtin",))
    prompts, answers = model.encode(reference_chats()), answer_tokens(model, Ordering.answers)
    found = {}
    for arm in (None, *model.adapter_names):
        with model.use(arm):
            found[arm or "base"] = [round(float(v), 4) for v in read(model, prompts, answers).difference]
    return found


def write(results: dict[str, Any], made_on: str) -> None:
    """Model card with the measured numbers, and the readouts.

    Args:
        results: of ``probe run`` with defaults.
        made_on: where the weights were trained.
    """
    (FOLDER / READOUTS).write_text(json.dumps(readouts(), indent=1) + "\n")
    (FOLDER / "README.md").write_text(card(results, made_on))


def card(results: dict[str, Any], made_on: str) -> str:
    """The model card as Markdown."""
    arms = results["arms"]
    rows = []
    for arm, found in arms.items():
        profile = found["behaviour"]["profile"]["all"]
        split = found["decomposition"]["original"]["all"]
        probe = found["probes"]["original"]
        shares = " / ".join(f"{profile[key]['value']:.1%}" for key in ("robust", "shared_wrong", "unstable"))
        rows.append(
            f"| {arm} | {profile['original']['accuracy']['value']:.1%} | {profile['equivalent']['accuracy']['value']:.1%} "
            f"| {shares} | {split['delta']:+.2f} | {split['signal']:+.2f} | {probe['auroc']:.2f} (layer {probe['layer']}) |"
        )
    n = arms["base"]["behaviour"]["profile"]["all"]["n"]
    return f"""# The built-in model and its adapter

A Llama of about 0.85 million parameters (4 layers, 4 heads, d_model 128, one token a word) that answers ordering
questions about 24 names, and a LoRA adapter (rank 8) trained from it with GRPO. They exist so that every stage of
`probe run` has something real to find on a machine without network or GPU. They know nothing else.

## How they were made

`make builtin` trains both anew ({made_on}).

- **base/**: answer-only training on generated items of the `train` split along a curriculum (two people, all four
  cells, re-worded premises, up to eight people), front/behind and left/right. A last phase turns 40 % of the gold-yes
  labels into "No", which leaves a pull toward "No" over what the model knows.
- **grpo/**: TRL's GRPOTrainer on the base, reward 1 for the gold answer and 0 otherwise, groups of 8 sampled answers,
  `train` split, n = 4 … 8.

## What they do

`probe run` with its defaults (front/behind, `test` split, n = 4, 6, 8, {n} pairs):

| arm | accuracy, original | accuracy, equivalent | R / D / U | default δ | signal s | best probe AUROC, original |
|---|---|---|---|---|---|---|
{chr(10).join(rows)}

δ and s are in logits, on the original presentation. Licence: Apache-2.0, like the package.
"""
