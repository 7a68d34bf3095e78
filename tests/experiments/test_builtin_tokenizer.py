"""The words of the shipped model don't change with the catalog."""

from __future__ import annotations

import json
from pathlib import Path

from experiments.builtin import tokenizer


def test_the_vocabulary_is_the_committed_one() -> None:
    file = Path(__file__).parents[2] / "activations" / "builtin" / "base" / "tokenizer.json"
    assert tokenizer.words() == list(json.loads(file.read_text())["model"]["vocab"])
