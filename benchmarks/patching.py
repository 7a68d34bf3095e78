"""What a layer sweep at the answer position costs, and how far it is from plain forward passes.

    python benchmarks/patching.py [--model M] [--items N] [--rounds R] [--json]

Without ``--model`` a random Llama of eight layers is built in memory, with prompts of about 200 tokens: cost and
exactness need no trained weights. With a model, sentences it can read are asked. All layers are swept together, the donor
being a random direction with the norm of the recipient's own residual.

Two prices are held to a bound, both in plain forward passes an item: tokens put through the model, and wall time,
against one bare forward pass of the same prompts in batches of the same size (no hooks, last-column logits only).
Rounds are interleaved and the median ratio is taken, since other work may run on the machine. The proof that comes with
every sweep costs about 30 further passes, however many items there are; the time with it is printed beside. The largest
difference is over random (item, layer) pairs recomputed alone, unpadded, from the logits the model itself returns, relative
to the largest of those logits where that is above 1. A head sweep is timed beside it and shown, without a bound.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
import torch

from activations import AnswerTokens, Model, ModelError, Prompt, answer_tokens, from_modules, load
from activations.batching import batches, forward_arguments, pad
from activations.structure import first, hooks
from patching import (
    SweepResult,
    branch,
    forward,
    head_cells,
    head_map,
    layer_cells,
    norm_matched_random,
    prefix,
    sweep,
    sweep_plan,
)
from patching.donors import check_donors_fit
from patching.plan import item_batches
from patching.runs import Runs

NAMES = ("Amy", "Bob", "Cara", "Dan", "Eve", "Finn", "Gus", "Hana")
ANSWERS = {"yes": ("Yes", "yes"), "no": ("No", "no")}
PRICE_BOUND, DIFFERENCE_BOUND = 1.5, 1e-4
BUDGET = 256


def random_model() -> Model:
    """Eight layers of width 256 and a word-level tokenizer with a chat template."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    words = ("<pad>", "<unk>", *NAMES, "is", "taller", "than", ".", "?", "Is", "Yes", "yes", "No", "no")
    raw = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.Whitespace()
    template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=raw, pad_token="<pad>", unk_token="<unk>", chat_template=template, model_max_length=1024
    )
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=8192,
        hidden_size=256,
        intermediate_size=1024,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=1024,
        initializer_range=0.06,
    )
    return from_modules(LlamaForCausalLM(config).eval(), tokenizer, name="random llama, 8 layers of 256")


def prompts_of(model: Model, items: int, tokens: int) -> list[Prompt]:
    """Ordering questions of near ``tokens`` tokens and unequal length; bare ids where the model cannot read them."""
    rng = np.random.default_rng(0)
    result = []
    for _ in range(items):
        text, prompt = "", None
        goal = tokens - int(rng.integers(0, 24))
        while prompt is None or len(prompt.ids) < goal:
            one, two = rng.choice(NAMES, size=2, replace=False)
            text += f"{one} is taller than {two} . "
            try:
                prompt = model.encode([[{"role": "user", "content": f"{text}Is {one} taller than {two} ?"}]])[0]
            except ModelError:
                prompt = Prompt(tuple(int(token) for token in rng.integers(0, model.d_vocab, size=goal)), "")
        result.append(prompt)
    return result


def plain(model: Model, prompts: list[Prompt], batch_tokens: int) -> None:
    """One bare forward pass of every prompt."""
    for rows in batches([len(prompt.ids) for prompt in prompts], batch_tokens):
        padded = pad([prompts[row] for row in rows], model.device, model.pad_id)
        with torch.no_grad():
            model.hf_model(**forward_arguments(model.hf_model, padded, keep=1)).logits.float().cpu()


def residuals(model: Model, prompts: list[Prompt]) -> np.ndarray:
    """``[item, layer, d_model]``: the recipients' own residual stream at the answer position."""
    kept = np.empty((len(prompts), model.n_layers, model.d_model), dtype=np.float32)
    rows: list[int] = []

    def keep(layer: int) -> Any:
        def after(module: Any, args: Any, output: Any) -> None:
            kept[rows, layer] = first(output)[:, -1].float().cpu().numpy()

        return after

    blocks = [model.module(name) for name in model.structure.blocks]
    with hooks([block.register_forward_hook(keep(layer)) for layer, block in enumerate(blocks)]), torch.no_grad():
        for batch in batches([len(prompt.ids) for prompt in prompts], 8192):
            rows[:] = batch
            padded = pad([prompts[row] for row in batch], model.device, model.pad_id)
            model.hf_model(**forward_arguments(model.hf_model, padded, keep=1))
    return kept


def seconds(work: Any) -> tuple[float, Any]:
    start = time.perf_counter()
    result = work()
    return time.perf_counter() - start, result


def measure(model: Model, *, items: int, rounds: int, tokens: int, batch_tokens: int, checks: int) -> dict[str, Any]:
    prompts = prompts_of(model, items, tokens)
    try:
        answers = answer_tokens(model, ANSWERS)
    except ModelError:
        answers = AnswerTokens(("yes", "no"), ((10,), (11,)))
    keys = [str(item) for item in range(items)]
    donors = {"random": norm_matched_random({"resid_post": residuals(model, prompts)}, keys=keys, seed=0)}
    layers = layer_cells(model.n_layers, source="random")
    heads = head_cells(head_map(model))

    def run(cells: list[Any], checks: int) -> SweepResult:
        return sweep(
            model,
            prompts,
            cells,
            answers=answers,
            donors=donors,
            batch_tokens=batch_tokens,
            check_cells=checks,
            seed=0,
        )

    result = run(layers, checks)
    change = np.abs(result.difference - result.unpatched[:, None])
    vectors = check_donors_fit(model, layers, donors, items)
    runs = Runs(model, prompts, layers, vectors, answers)
    engines = {
        "branch": lambda group, cells: branch.evaluate(runs, group, cells, cell_budget=BUDGET),
        "prefix": lambda group, cells: prefix.evaluate(runs, group, cells, cell_budget=BUDGET),
        "forward": lambda group, cells: forward.evaluate(runs, group, cells, batch_tokens=batch_tokens),
    }
    groups = item_batches(
        result.engine, runs.lengths(range(items)), len(layers), cell_budget=BUDGET, batch_tokens=batch_tokens
    )

    def unchecked() -> None:
        for group in groups:
            engines[result.engine](group, range(len(layers))).cpu()

    bare, swept, checked = [], [], []
    for _ in range(rounds):
        bare.append(seconds(lambda: plain(model, prompts, batch_tokens))[0])
        swept.append(seconds(unchecked)[0] / bare[-1])
        checked.append(seconds(lambda: run(layers, 20))[0] / bare[-1])
    head_seconds, head_result = seconds(lambda: run(heads, 20)) if heads else (float("nan"), None)
    return {
        "plan": str(sweep_plan(model, prompts, layers, batch_tokens=batch_tokens)),
        "engine": result.engine,
        "tokens": result.forward_passes,
        "wall": statistics.median(swept),
        "wall_rounds": swept,
        "wall_checked": statistics.median(checked),
        "plain_seconds": statistics.median(bare),
        "difference": result.check_max_abs,
        "relative": result.check_max_abs / (result.check_bound / DIFFERENCE_BOUND),
        "checked": result.checked,
        "change": float(change.mean()),
        "head_cells": len(heads),
        "head_tokens": head_result.forward_passes if head_result else float("nan"),
        "head_wall": head_seconds / statistics.median(bare),
        "head_difference": head_result.check_max_abs if head_result else float("nan"),
    }


def claims(found: dict[str, Any]) -> list[dict[str, Any]]:
    rows = [
        ("layer sweep, tokens: forward passes an item", found["tokens"], PRICE_BOUND),
        ("layer sweep, wall time: forward passes an item", found["wall"], PRICE_BOUND),
        ("layer sweep: largest difference from plain forward passes", found["relative"], DIFFERENCE_BOUND),
    ]
    return [{"claim": name, "value": value, "bound": bound, "ok": bool(value <= bound)} for name, value, bound in rows]


def main() -> int:
    parser = argparse.ArgumentParser(description="Price and exactness of patching sweeps.")
    parser.add_argument("--model", help="hub id, folder, smollm2 or builtin; without it a random model is built")
    parser.add_argument("--items", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=200, help="prompt length")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--checks", type=int, default=200, help="pairs recomputed for the largest difference")
    parser.add_argument("--batch-tokens", type=int, default=8192)
    parser.add_argument("--json", action="store_true", help="print the claims as JSON and nothing else")
    options = parser.parse_args()
    model = load(options.model) if options.model else random_model()
    found = measure(
        model,
        items=options.items,
        rounds=options.rounds,
        tokens=options.tokens,
        batch_tokens=options.batch_tokens,
        checks=options.checks,
    )
    rows = claims(found)
    if options.json:
        print(json.dumps(rows, indent=1))
    else:
        print(f"{model.name}: {found['plan']}")
        for row in rows:
            print(f"{'ok  ' if row['ok'] else 'FAIL'} {row['claim']}: {row['value']:.3g} (bound {row['bound']:g})")
        spread = ", ".join(f"{ratio:.2f}" for ratio in found["wall_rounds"])
        print(
            f"rounds {spread}; with all checks {found['wall_checked']:.2f}; one plain pass of all prompts "
            f"{found['plain_seconds']:.2f} s; engine {found['engine']}"
        )
        print(
            f"mean change of the readout {found['change']:.2f} logits; {found['checked']} pairs recomputed, "
            f"largest difference {found['difference']:.1e} logits"
        )
        print(
            f"{found['head_cells']} heads zeroed one by one: {found['head_tokens']:.2f} forward passes in tokens, "
            f"{found['head_wall']:.2f} in time, difference {found['head_difference']:.1e}"
        )
    return 0 if all(row["ok"] for row in rows) else 1


if __name__ == "__main__":
    raise SystemExit(main())
