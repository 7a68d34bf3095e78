"""What capturing costs on top of the forward passes it needs anyway.

    python benchmarks/capture.py [--model M] [--json]

The bare pass runs the network below its unembedding on the very same padded batches and keeps nothing. Capture runs
them too, copies the answer position of every layer and leaves a checked, synced store on the disk; it is measured with
and without the readout, which is work of its own. The three alternate, in changing order, so that a machine that slows
down slows all; a claim is the median over rounds of the ratio to the bare pass.

On a GPU the ratio is of wall time, and the extra memory of capture is measured too, against two buffers
[layer, row, d_model]. On a CPU it is of processor time, all threads together, because other work may run on the
machine; the wall time is shown beside it. Without --model a random Llama is made here, and nothing is downloaded.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

# The script's own folder comes first on the path, and a benchmark may bear the name of a package.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from activations.batching import batches, forward_arguments, pad
from activations.capturing import Plan, backbone, capture
from activations.model import Model
from activations.prompts import Prompt
from activations.readout import AnswerTokens

OVERHEAD, OVERHEAD_READOUT = 0.03, 0.05


def random_llama(device: str, dtype: str) -> Model:
    """A Llama of 25 million parameters below its unembedding, with random weights and a small tokenizer."""
    from tokenizers import Tokenizer, models
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    from activations.model import from_modules

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=8192,
        hidden_size=512,
        intermediate_size=1408,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=4096,
    )
    vocabulary = {f"w{i}": i for i in range(8192)}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(vocabulary, unk_token="w0")),
        eos_token="w1",
        chat_template="{{ messages[0].content }}",
    )
    place = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
    kind = torch.float32 if dtype == "auto" else getattr(torch, dtype)
    return from_modules(LlamaForCausalLM(config).to(place, kind).eval().requires_grad_(False), tokenizer, name="random")


def random_prompts(model: Model, n: int, tokens: int) -> list[Prompt]:
    """Prompts of `tokens` tokens give or take a third; which ids they hold does not matter for speed."""
    draw = random.Random(0)
    top = min(model.d_vocab, 5000)
    lengths = [draw.randint(tokens * 2 // 3, tokens * 4 // 3) for _ in range(n)]
    return [Prompt(tuple(draw.randrange(5, top) for _ in range(length)), "") for length in lengths]


def timed(model: Model, work: Callable[[], object]) -> tuple[float, float]:
    """Wall and processor seconds until the work is done, on the device too."""
    start, used = time.perf_counter(), time.process_time()
    work()
    if model.device.type == "cuda":
        torch.cuda.synchronize(model.device)
    return time.perf_counter() - start, time.process_time() - used


def measure(model: Model, prompts: list[Prompt], plan: Plan, rounds: int) -> tuple[dict[str, Any], dict[str, int]]:
    """(wall, processor) seconds of each kind of pass, round by round, and its peak GPU memory."""
    answers = AnswerTokens(("yes", "no"), ((5, 6), (7, 8)))
    cuts = batches([len(prompt.ids) for prompt in prompts], plan.batch_tokens)
    network = backbone(model)

    def bare() -> None:
        with torch.inference_mode():
            for rows in cuts:
                padded = pad([prompts[row] for row in rows], model.device, model.pad_id)
                network(**forward_arguments(network, padded))

    seconds: dict[str, list[tuple[float, float]]] = {"bare": [], "capture": [], "readout": []}
    peak = dict.fromkeys(seconds, 0)
    for number in range(rounds + 1):
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            works: dict[str, Callable[[], object]] = {
                "bare": bare,
                "capture": partial(capture, model, prompts, plan, folder / "a"),
                "readout": partial(capture, model, prompts, plan, folder / "b", answers=answers),
            }
            for kind in list(works)[number % 3 :] + list(works)[: number % 3]:
                if model.device.type == "cuda":
                    torch.cuda.reset_peak_memory_stats(model.device)
                took = timed(model, works[kind])
                if number:  # the first round warms up
                    seconds[kind].append(took)
                    if model.device.type == "cuda":
                        peak[kind] = max(peak[kind], torch.cuda.max_memory_allocated(model.device))
    return seconds, peak


def ratio(seconds: dict[str, list[tuple[float, float]]], kind: str, clock: int) -> float:
    """Median over rounds of the extra share of one kind of pass over the bare one."""
    pairs = zip(seconds[kind], seconds["bare"], strict=True)
    return statistics.median(one[clock] / other[clock] - 1 for one, other in pairs)


def main() -> int:
    """Measure and print; exit code 1 if a bound is missed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", help="hub id, folder or alias; without it a random Llama")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--store-dtype", default="float32")
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--tokens", type=int, default=200, help="mean prompt length")
    parser.add_argument("--batch-tokens", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if options.model:
        from activations import load

        model = load(options.model, device=options.device, dtype=options.dtype, verify=False)
    else:
        model = random_llama(options.device, options.dtype)
    prompts = random_prompts(model, options.prompts, options.tokens)
    plan = Plan(dtype=options.store_dtype, batch_tokens=options.batch_tokens)
    seconds, peak = measure(model, prompts, plan, options.rounds)
    on_gpu = model.device.type == "cuda"
    clock = 0 if on_gpu else 1
    claims: list[tuple[str, float, float]] = [
        ("capture of all layers into a store, over the bare forward", ratio(seconds, "capture", clock), OVERHEAD),
        ("the same with the readout", ratio(seconds, "readout", clock), OVERHEAD_READOUT),
    ]
    if on_gpu:
        rows = max(len(rows) for rows in batches([len(prompt.ids) for prompt in prompts], plan.batch_tokens))
        buffer = model.n_layers * rows * model.d_model * torch.empty(0, dtype=model.dtype).element_size()
        claims.append(("extra GPU memory of capture, in buffers", (peak["capture"] - peak["bare"]) / buffer, 2.0))
    results = [{"claim": c, "value": round(v, 4), "bound": bound, "ok": v <= bound} for c, v, bound in claims]
    if options.json:
        print(json.dumps(results))
    else:
        wall = {kind: statistics.median(took for took, _ in rounds) for kind, rounds in seconds.items()}
        print(f"{model.name} on {model.device}, {len(prompts)} prompts, {options.rounds} rounds")
        print("wall time: " + ", ".join(f"{kind} {took:.3f} s" for kind, took in wall.items()), end="; ")
        print(f"capture {len(prompts) / wall['capture']:.1f} prompts/s, over bare {ratio(seconds, 'capture', 0):+.3f}")
        for row in results:
            print(f"{'ok  ' if row['ok'] else 'MISS'} {row['claim']}: {row['value']} (bound {row['bound']})")
    return 0 if all(row["ok"] for row in results) else 1


if __name__ == "__main__":
    raise SystemExit(main())
