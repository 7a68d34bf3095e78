"""The same numbers on a CUDA device as on the CPU: capture, generation, sweeps, a whole run.

Needs a CUDA device: ``make test-gpu``.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch

from activations import from_modules
from activations.backends import PEERS
from activations.capturing import Plan, capture
from activations.checks import check
from activations.generation import generate
from activations.model import Model, load
from activations.readout import answer_tokens, read
from activations.sampling import Sampling
from patching.edits import Cell, Edit, head_cells, head_map
from patching.sweeping import sweep
from tasks.ordering import Ordering
from tests.tiny_models import BUILDERS, MESSAGES, tiny_adapter

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device; lifted on a machine that has one"),
]
# Float32 on both, but products are summed in another order; residuals are of the order of 10.
CLOSE = {"rtol": 1e-4, "atol": 5e-4}


@pytest.fixture(scope="module")
def models() -> dict[str, Model]:
    return {device: load("builtin", adapters=("builtin",), device=device) for device in ("cpu", "cuda")}


@pytest.fixture(scope="module")
def chats() -> list[list[dict[str, str]]]:
    sets = [
        matched
        for n in (4, 7)
        for matched in islice(Ordering().generate({"n": n, "names": "builtin"}, seed=1, split="test"), 24)
    ]
    return [shown.chat() for matched in sets for shown in matched.presentations]


@pytest.mark.parametrize("arm", [None, "grpo"])
def test_capture_gives_the_same_store(models, chats, tmp_path: Path, arm: str | None) -> None:
    stores = {}
    for device, model in models.items():
        prompts, answers = model.encode(chats), answer_tokens(model, Ordering.answers)
        plan = Plan(sites=("resid_post", "z"), batch_tokens=1000)
        with model.use(arm):
            stores[device] = capture(model, prompts, plan, tmp_path / device, answers=answers)
    for site in ("resid_post", "z"):
        for layer in range(4):
            np.testing.assert_allclose(stores["cuda"][site, layer], stores["cpu"][site, layer], **CLOSE)
    np.testing.assert_allclose(stores["cuda"].readout["logit"], stores["cpu"].readout["logit"], **CLOSE)


@pytest.mark.parametrize("sampling", [None, Sampling(temperature=1.0, top_p=0.95, top_k=20, seed=1)])
def test_generation_gives_the_same_text(models, chats, sampling: Sampling | None) -> None:
    texts = {}
    names = [("chat", str(number)) for number in range(len(chats))]
    for device, model in models.items():
        answered: dict[int, str] = {}
        how = {"sampling": sampling, "names": names, "max_tokens": 4, "batch_tokens": 1000}
        for part in generate(model, model.encode(chats), **how):
            answered.update({index: generated.text for index, generated in part})
        texts[device] = [answered[index] for index in range(len(chats))]
    assert texts["cuda"] == texts["cpu"]


def test_sweeps_give_the_same_numbers_and_pass_their_own_check(models, chats) -> None:
    results = {}
    for device, model in models.items():
        prompts, answers = model.encode(chats), answer_tokens(model, Ordering.answers)
        with model.use("grpo"):
            results[device] = sweep(model, prompts, head_cells(head_map(model)), answers=answers, seed=0)
    assert results["cuda"].engine == "branch"
    assert results["cuda"].check_max_abs <= 1e-4
    np.testing.assert_allclose(results["cuda"].difference, results["cpu"].difference, **CLOSE)


def test_half_precision_runs_and_stays_near(models, chats) -> None:
    half = load("builtin", adapters=("builtin",), device="cuda", dtype="bfloat16")
    prompts, answers = half.encode(chats), answer_tokens(half, Ordering.answers)
    full = read(models["cuda"], models["cuda"].encode(chats), answers).difference.cpu().numpy()
    near = read(half, prompts, answers).difference.cpu().numpy()
    assert np.corrcoef(full, near)[0, 1] > 0.999
    cells = [Cell("off", (Edit("z", 1, 0),))]
    assert np.isfinite(sweep(half, prompts, cells, answers=answers, seed=0).difference).all()


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma3", "gpt_oss"])
def test_every_check_and_every_library_hold_on_the_device(name: str, tmp_path: Path) -> None:
    hf_model, tokenizer = BUILDERS[name]()
    folder = tiny_adapter(hf_model, tmp_path / "one", seed=2)
    model = from_modules(hf_model.cuda(), tokenizer, adapters=[str(folder)])
    table = check(model, model.encode(MESSAGES), backends=PEERS)
    assert {row.name: (row.value, row.note) for row in table if not row.ok} == {}


def test_memory_does_not_grow_with_the_number_of_batches(models, chats, tmp_path: Path) -> None:
    """Peak allocation after 60 batches equals that after 6."""
    model = models["cuda"]
    prompts = model.encode(chats[:16])
    peaks = []
    for count in (6, 60):
        torch.cuda.reset_peak_memory_stats()
        plan = Plan(batch_tokens=1)
        capture(model, (prompts * 4)[:count], plan, tmp_path / str(count))
        peaks.append(torch.cuda.max_memory_allocated())
    assert peaks[1] <= peaks[0] * 1.02


def test_a_whole_run_on_the_device(tmp_path: Path) -> None:
    root = Path(__file__).parents[2]
    code = "from experiments.cli import main; main()"
    words = ["run", "--device", "cuda", "--set", "n=4", "--limit", "40", "--out", str(tmp_path / "run")]
    result = subprocess.run(
        [sys.executable, "-c", code, *words],
        capture_output=True,
        text=True,
        check=False,
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(root)},
    )
    assert result.returncode == 0, result.stderr
    results = json.loads((tmp_path / "run" / "results.json").read_text())
    assert results["arms"]["grpo"]["patching"]["largest_difference"] <= 1e-4
