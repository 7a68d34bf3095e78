"""Stores for tests of `probe fit`: of the built-in pair beside a run on its prompts, and of invented activations."""

from __future__ import annotations

import io
import json
import shutil
import sys
from contextlib import redirect_stderr, redirect_stdout
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from activations.store import StoreWriter
from experiments.cli import _guarded
from tasks.files import to_record
from tasks.ordering import Ordering

PENALTY = 0.03
FAST = ("--penalty", str(PENALTY), "--shuffles", "19", "--folds", "3", "--resamples", "100", "--json")
ORDERING = Ordering()


def probe(*words: Any) -> tuple[int, str, str]:
    """The command in this process, behind its error boundary."""
    out, err, before = io.StringIO(), io.StringIO(), sys.argv
    sys.argv = ["probe", *map(str, words)]
    try:
        with redirect_stdout(out), redirect_stderr(err):
            code = _guarded()
    finally:
        sys.argv = before
    return code, out.getvalue(), err.getvalue()


def fitted(*words: Any) -> dict[str, Any]:
    code, out, err = probe("fit", *FAST, *words)
    assert code == 0, err
    return json.loads(out)


def refused(said: str, *words: Any, code: int = 2) -> None:
    found, out, err = probe("fit", *words)
    assert (found, out) == (code, ""), (found, out, err)
    assert err.count("\n") == 1 and err.startswith("probe: ")
    assert said in err, err


def captured(path: Path) -> Path:
    """A run on the built-in pair, and stores of its prompts: base and adapter, and those of both in the run."""
    about = ("--set", "n=4,6", "--limit", "20", "--seed", "4")
    assert probe("eval", *about, "--set", "resamples=100", "--out", path / "run")[0] == 0
    for arm in ("base", "grpo"):
        options = ("--arm", arm, "--sites", "embed,resid_post", "--positions", "answer,query/mean")
        code, _, err = probe("capture", *about, *options, "--out", path / arm)
        assert code == 0, err
        shutil.copytree(path / arm, path / "run/activations" / arm, ignore=shutil.ignore_patterns("items.jsonl"))
    return path


def made(
    path: Path, relations: tuple[str, ...] = ("front_behind",), count: int = 24, turned: str = "", **change: Any
) -> Path:
    """A store of invented activations: layer 1 holds gold, layer 0 nothing. ``change`` gives positions by presentation.

    In the presentation ``turned`` gold has the opposite direction.
    """
    draws = np.random.default_rng(0)
    records, listed = [], []
    for relation in relations:
        params = ORDERING.validate({"n": 4, "relation": relation})
        for matched in islice(ORDERING.generate(params, seed=1, split="test"), count):
            records.append({"setting": f"relation={relation}", **to_record(matched, version=ORDERING.version)})
            for shown in matched.presentations:
                for label in change.get(shown.kind, ("answer",)):
                    listed.append((matched.instance.key, shown.kind, label, shown.gold == "yes"))
    keys, kinds, labels, gold = zip(*listed, strict=True)
    index = {
        "key": keys,
        "presentation": kinds,
        "label": labels,
        "position": [1] * len(keys),
        "n_tokens": [9] * len(keys),
    }
    noise = draws.normal(size=(2, len(keys), 8))
    noise[1, :, 0] += 4 * np.array(gold) * np.where(np.array(kinds) == turned, -1, 1)
    with StoreWriter(
        path, datasets={("resid_post", layer): 8 for layer in (0, 1)}, dtype="float32", n_layers=2,
        shards=[list(range(len(keys)))], rows=index, content={"model": {"weights": "abc"}}, notes={"adapter": None},
    ) as writer:  # fmt: skip
        for shard in writer.missing:
            writer.write(shard, {("resid_post", layer): noise[layer].astype(np.float32) for layer in (0, 1)})
    (path / "items.jsonl").write_text("".join(json.dumps(one) + "\n" for one in records))
    return path
