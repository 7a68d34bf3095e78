"""``probe capture``: the family's prompts in a store, each row at the words that the family marked."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from experiments.capture import CaptureConfig, capture_family, layer_numbers, words
from experiments.config import load_as
from experiments.errors import UsageError
from experiments.progress import Reporter
from tasks.registry import family

ROOT = Path(__file__).parents[2]
ASKED = ["params.n=4", "limit=5", "seed=3"]


class Said(Reporter):
    def __init__(self) -> None:
        super().__init__(quiet=True)
        self.lines: list[str] = []
        self.log = self.lines.append


def captured(
    directory: Path, *, chosen: bool = False, pairs: list[str] | None = None, **flags: Any
) -> tuple[Any, list[str]]:
    said = Said()
    config = load_as(CaptureConfig, None, pairs or ASKED, flags)
    return capture_family(config, directory, said, chosen=chosen), said.lines


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("stores")
    flags = {"positions": ("answer", "query", "premise:1/mean"), "layers": (-1, 0)}
    base, said = captured(folder / "base", **flags)
    tuned, _ = captured(folder / "tuned", arm="grpo", **flags)
    return {"base": base, "tuned": tuned, "said": said, "folder": folder, "flags": flags}


def test_rows_are_the_words_that_the_family_marked(stores: dict[str, Any]) -> None:
    from activations.model import load

    model = load("builtin", verify=False)
    made = family("ordering")
    params = made.validate({"n": 4, "names": "builtin"})
    shown = [
        (matched.instance.key, one)
        for matched in islice(made.generate(params, seed=3, split="test"), 5)
        for one in matched.presentations
    ]
    table = stores["base"].rows
    assert len(table) == len(shown) * 3 == 30
    for n, (key, presentation) in enumerate(shown):
        prompt = model.encode([presentation.chat()])[0]
        with torch.inference_mode():
            states = model.hf_model(input_ids=torch.tensor([prompt.ids]), output_hidden_states=True).hidden_states
        spans = {
            span.label: presentation.messages[span.message].content[span.start : span.end]
            for span in presentation.spans
        }
        words = [model.tokenizer.decode([token]) for token in prompt.ids]
        for i, label in enumerate(("answer", "query", "premise:1/mean")):
            row = table.iloc[3 * n + i]
            assert (row["key"], row["presentation"], row["label"]) == (key, presentation.kind, label)
            name = label.removesuffix("/mean")
            count = len(model.tokenizer(spans[name], add_special_tokens=False)["input_ids"]) if name in spans else 1
            if label == "answer":
                tokens = [len(words) - 1]
            else:  # found by decoding the tokens, not by offsets
                text = "".join(spans[name].split())
                tokens = next(
                    list(range(start, start + count))
                    for start in range(len(words))
                    if "".join("".join(words[start : start + count]).split()) == text
                )
            expected = states[1][0, tokens if label.endswith("mean") else tokens[-1:]].mean(0)
            np.testing.assert_allclose(stores["base"]["resid_post", 0][3 * n + i], expected.numpy(), atol=5e-5)


def test_arm_is_switched_on_and_recorded(stores: dict[str, Any]) -> None:
    base, tuned = stores["base"], stores["tuned"]
    assert np.abs(base["resid_post", 3] - tuned["resid_post", 3]).max() > 1e-3
    assert (base.manifest["notes"]["adapter"], tuned.manifest["notes"]["adapter"]) == (None, "grpo")
    assert list(tuned.readout["logit"].shape) == [30, 2]


def test_plan_is_said_before_it_runs(stores: dict[str, Any]) -> None:
    plan = next(line for line in stores["said"] if "rows" in line)
    for part in (
        "builtin: 10 prompts",
        "resid_post layers 0,3 at answer, query, premise:1/mean",
        "30 rows",
        "under a second",
    ):
        assert part in plan
    assert stores["said"].index(plan) < next(n for n, line in enumerate(stores["said"]) if "capture base" in line)


def test_same_command_resumes_and_another_is_refused(stores: dict[str, Any]) -> None:
    from activations.errors import StoreError

    before = {path: path.stat().st_mtime_ns for path in (stores["folder"] / "base").glob("shard*")}
    captured(stores["folder"] / "base", **stores["flags"])
    assert before == {path: path.stat().st_mtime_ns for path in (stores["folder"] / "base").glob("shard*")}
    with pytest.raises(StoreError, match=r"was captured under other settings: .*positions"):
        captured(stores["folder"] / "base", **{**stores["flags"], "positions": ("answer",)})
    with pytest.raises(StoreError, match=r"was captured under other settings: .*adapter"):
        captured(stores["folder"] / "base", arm="grpo", **stores["flags"])


def test_arms_are_chosen_by_name(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="arm is 'sft': choose from base, grpo"):
        captured(tmp_path / "s", arm="sft")
    store, _ = captured(tmp_path / "s", chosen=True, adapter=("builtin",), layers=(0,))
    assert store.manifest["notes"]["adapter"] == "grpo"


def test_values_that_no_model_takes_are_usage_errors(tmp_path: Path) -> None:
    for flags, said in (
        ({"sites": ("resid",)}, "unknown site 'resid'"),
        ({"positions": ("query/first",)}, "position 'query/first' is none"),
        ({"sites": ("blocks.1.hook_z",), "layers": (0,)}, "leave layers out"),
        ({"backend": "jax"}, "backend is 'jax': input should be 'hf', 'transformer_lens' or 'nnsight'"),
    ):
        with pytest.raises(UsageError, match=said):
            captured(tmp_path / "s", **flags)
    assert not (tmp_path / "s").exists()


def test_a_missing_span_names_the_prompt(tmp_path: Path) -> None:
    from activations.errors import StoreError

    for position in ("premise:9", "premise:9/all"):
        with pytest.raises(StoreError, match=r"prompt 0 \(\w{16} original\) has no span 'premise:9'"):
            captured(tmp_path / "s", positions=(position,))


def test_flags_are_read() -> None:
    assert layer_numbers("0-3, 8,-1") == (0, 1, 2, 3, 8, -1)
    assert layer_numbers("all") is None is layer_numbers(None)
    assert words("z, resid_post,") == ("z", "resid_post")
    for bad in ("x", "3-1", "1-", "--1"):
        with pytest.raises(UsageError, match="give numbers and ranges"):
            layer_numbers(bad)


def test_the_command_itself(tmp_path: Path) -> None:
    probe = [sys.executable, "-c", "from experiments.cli import main; main()", "capture"]
    run = [*probe, "--set", "n=4", "--limit", "2", "--sites", "blocks.1.attn.hook_pattern,z", "--layers", "0",
           "--positions", "answer,query/all", "--dtype-store", "bfloat16", "--out", str(tmp_path / "s")]  # fmt: skip
    result = subprocess.run([*run, "--json"], capture_output=True, text=True, check=False, cwd=ROOT)
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    assert found["layers"] == {"pattern": [1], "z": [0]}
    assert found["dtype"] == "bfloat16"
    assert found["rows"] > 8


def test_an_empty_directory_name_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from typer.testing import CliRunner

    from experiments.cli import app

    monkeypatch.chdir(tmp_path)
    error = CliRunner().invoke(app, ["capture", "--out", ""]).exception
    assert isinstance(error, UsageError)
    assert str(error) == "out is empty: give a path, or . for the current directory"
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"sites": ("embed",), "layers": (2,)}, r"layers is \[2\] and embed is the input of layer 0 alone"),
        ({"layers": (40,)}, "no layer 40 in builtin; it has layers 0 to 3"),
        ({"pattern_keys": 50}, "pattern_keys is 50 and the plan has no pattern"),
        ({"sites": ("pattern",), "pattern_keys": 3}, r"pattern_keys is 3 and the longest prompt has \d+ tokens"),
    ],
)
def test_what_the_model_or_the_prompts_lack_is_a_usage_error(tmp_path: Path, flags: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        captured(tmp_path / "s", **flags)
    assert not (tmp_path / "s").exists()


def test_sigterm_ends_like_an_interrupt_and_the_same_command_resumes(tmp_path: Path) -> None:
    probe = [sys.executable, "-c", "from experiments.cli import main; main()", "capture"]
    run = [*probe, "--set", "n=8", "--limit", "400", "--set", "batch_tokens=64", "--out", str(tmp_path / "s")]
    with subprocess.Popen(run, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT) as process:
        deadline = time.monotonic() + 120
        while len(list((tmp_path / "s").glob("shard-*.h5"))) < 3 and time.monotonic() < deadline:
            assert process.poll() is None, process.communicate()
            time.sleep(0.01)
        process.send_signal(signal.SIGTERM)
        _, said = process.communicate(timeout=60)
    assert process.returncode == 130
    assert said.splitlines()[-1] == "probe: interrupted: the same command goes on from here"
    stored = {path.name: path.stat().st_ino for path in (tmp_path / "s").glob("shard-*.h5")}
    total = len(json.loads((tmp_path / "s/manifest.json").read_text())["shards"])
    assert 3 <= len(stored) < total
    assert not list((tmp_path / "s").glob(".*"))  # nothing half written
    result = subprocess.run(run, capture_output=True, text=True, check=False, cwd=ROOT)
    assert result.returncode == 0, result.stderr
    after = {path.name: path.stat().st_ino for path in (tmp_path / "s").glob("shard-*.h5")}
    assert len(after) == total
    assert stored.items() <= after.items()  # what was there was not made again
