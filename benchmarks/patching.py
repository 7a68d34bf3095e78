"""What exact sweeps cost, in forward passes, against plain passes and against other libraries' patching.

    python benchmarks/patching.py [--model M] [--rounds R] [--peers all|none] [--json]

Without ``--model`` a random Llama of 16 layers is built in memory: cost and exactness need no trained weights. One pair of
prompts is patched. Its shorter prompt gives the donor, which is at hand as it would be from a store; the longer one is the
recipient, and one bare forward pass of it (no hooks, last-column logits only) is the unit of every price:

- all layers: ``resid_post`` at the answer position from the donor, one cell a layer, the unpatched run included;
- all heads: every head zeroed at the answer position, one cell a head;
- one head at all positions: one cell a layer, the mean price of a cell, the unpatched run included.

The peers run the layer cells, each by one pass: TransformerLens by ``patching.generic_activation_patch`` on a
``TransformerBridge``, nnsight by a trace a cell. Their cells cost the same each, so of many a few spread over the layers
are timed and the time is scaled (``--peer-cells``); their numbers are compared with ours on those cells.

All ratios are of one run: rounds are interleaved, each round times everything once, ratios are taken within the round, and
their median is reported, because other work may run on the machine. Our times are of the engine; what the proof adds that
comes with every sweep (about 30 passes, however many items there are) is printed beside.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import io
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
import torch

from activations import AnswerTokens, Model, ModelError, Prompt, answer_tokens, from_modules, load
from activations.batching import forward_arguments, pad
from activations.structure import first, hooks
from patching import Cell, Edit, head_cells, head_map, layer_cells, sweep, sweep_plan
from patching.plan import Options
from patching.sweeping import evaluator, prepared

NAMES = ("Amy", "Bob", "Cara", "Dan", "Eve", "Finn", "Gus", "Hana")
ANSWERS = {"yes": ("Yes", "yes"), "no": ("No", "no")}
LENGTHS = (100, 400, 1600)
MAIN = 400
DIFFERENCE = 1e-4
OPTIONS = Options(cell_budget=256, batch_tokens=8192)

Work = Callable[[], Any]


def random_model() -> Model:
    """Sixteen layers of width 256 and a word-level tokenizer with a chat template."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    words = ("<pad>", "<unk>", *NAMES, "is", "taller", "than", ".", "?", "Is", "Yes", "yes", "No", "no")
    raw = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.Whitespace()
    template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=raw, pad_token="<pad>", unk_token="<unk>", chat_template=template, model_max_length=2048
    )
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=8192,
        hidden_size=256,
        intermediate_size=1024,
        num_hidden_layers=16,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=2048,
        initializer_range=0.06,
    )
    return from_modules(LlamaForCausalLM(config).eval(), tokenizer, name="random llama, 16 layers of 256")


def pair(model: Model, tokens: int) -> tuple[Prompt, Prompt]:
    """A donor prompt and a recipient of exactly ``tokens`` tokens; made-up ids where the model cannot read the words."""
    rng = np.random.default_rng(tokens)
    made = []
    for size in (tokens - 3, tokens):
        text = "".join(f"{' is taller than '.join(rng.choice(NAMES, 2, replace=False))} . " for _ in range(tokens))
        try:
            ids = model.encode([[{"role": "user", "content": f"{text[: 12 * tokens]} Is Amy taller than Bob ?"}]])[
                0
            ].ids
        except ModelError:
            ids = tuple(int(token) for token in rng.integers(0, model.d_vocab, size=size))
        made.append(Prompt(ids[-size:], ""))
    return made[0], made[1]


def residuals(model: Model, prompt: Prompt) -> dict[int, np.ndarray]:
    """``resid_post`` of each layer at the answer position, ``[1, d_model]``."""
    kept: dict[int, np.ndarray] = {}

    def keep(layer: int) -> Any:
        def after(module: Any, args: Any, output: Any) -> None:
            kept[layer] = first(output)[:, -1].float().cpu().numpy()

        return after

    blocks = [model.module(name) for name in model.structure.blocks]
    with hooks([block.register_forward_hook(keep(layer)) for layer, block in enumerate(blocks)]), torch.no_grad():
        model.hf_model(**forward_arguments(model.hf_model, pad([prompt], model.device, model.pad_id), keep=1))
    return kept


class Ours:
    """The sweeps over one pair, and the plain pass they are priced in."""

    def __init__(self, model: Model, tokens: int) -> None:
        self.model = model
        self.donor, self.recipient = pair(model, tokens)
        try:
            self.answers = answer_tokens(model, ANSWERS)
        except ModelError:
            self.answers = AnswerTokens(("yes", "no"), ((10,), (11,)))
        self.vectors = residuals(model, self.donor)
        self.layers = layer_cells(model.n_layers, source="donor")
        counts = head_map(model)
        self.heads = head_cells(counts)
        self.head_everywhere = [
            Cell(f"{layer}", (Edit("z", layer, layer % count, position="all"),))
            for layer, count in enumerate(counts)
            if count
        ]

    def work(self, cells: list[Cell]) -> Work:
        """The engine that a sweep of these cells would take, ready to run."""
        runs = prepared(self.model, [self.recipient], cells, answers=self.answers, donors=self._donors())
        engine = sweep_plan(self.model, [self.recipient], cells).engine
        evaluate = evaluator(runs, engine, OPTIONS)
        return lambda: evaluate([0], range(len(cells))).cpu()

    def sweep(self, cells: list[Cell], checks: int) -> Any:
        return sweep(
            self.model,
            [self.recipient],
            cells,
            answers=self.answers,
            donors=self._donors(),
            check_cells=checks,
            seed=0,
        )

    def plain(self) -> None:
        """One bare forward pass of the recipient."""
        padded = pad([self.recipient], self.model.device, self.model.pad_id)
        with torch.no_grad():
            self.model.hf_model(**forward_arguments(self.model.hf_model, padded, keep=1)).logits.float().cpu()

    def difference(self, logits: torch.Tensor) -> float:
        """First label minus second, from a row of logits."""
        one, two = (logits[list(ids)].float().logsumexp(0) for ids in self.answers.ids)
        return float(one - two)

    def _donors(self) -> Any:
        return {"donor": {"resid_post": self.vectors}}


class TransformerLens:
    """Layer cells by ``generic_activation_patch`` on a bridge around a copy of the network."""

    def __init__(self, model: Model) -> None:
        from transformer_lens.model_bridge import TransformerBridge

        network = copy.deepcopy(model.hf_model)
        network.config.architectures = [type(network).__name__]
        self.bridge = TransformerBridge.boot_transformers(
            "benchmark", hf_model=network, tokenizer=copy.deepcopy(model.tokenizer), dtype=model.dtype,
            device=str(model.device),
        )  # fmt: skip

    def run(self, ours: Ours, layers: list[int]) -> list[float]:
        import pandas as pd
        from transformer_lens import patching

        ids = torch.tensor([ours.recipient.ids], device=ours.model.device)
        last = ids.shape[1] - 1
        cache = {}
        for layer in layers:
            clean = torch.zeros(1, last + 1, ours.model.d_model, device=ids.device)
            clean[:, last] = torch.from_numpy(ours.vectors[layer]).to(ids.device)
            cache[f"blocks.{layer}.hook_resid_post"] = clean
        with torch.no_grad(), contextlib.redirect_stderr(io.StringIO()):
            values = patching.generic_activation_patch(
                self.bridge,
                ids,
                cache,
                lambda logits: torch.tensor(ours.difference(logits[0, -1])),
                patching.layer_pos_patch_setter,
                "resid_post",
                index_df=pd.DataFrame({"layer": layers, "pos": [last] * len(layers)}),
            )
        return [float(value) for value in values]


class NNsight:
    """Layer cells by one trace each on a copy of the network."""

    def __init__(self, model: Model) -> None:
        import nnsight

        self.traced = nnsight.NNsight(copy.deepcopy(model.hf_model))

    def run(self, ours: Ours, layers: list[int]) -> list[float]:
        ids = torch.tensor([ours.recipient.ids], device=ours.model.device)
        values = []
        for layer in layers:
            vector = torch.from_numpy(ours.vectors[layer][0]).to(ids.device)
            block = self.traced.get(ours.model.structure.blocks[layer])
            with torch.no_grad(), self.traced.trace(ids, use_cache=False, logits_to_keep=1):
                block.output[:, -1, :] = vector
                logits = self.traced.output.logits[0, -1].save()
            values.append(ours.difference(logits))
        return values


def seconds(work: Work) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def rounds_of(jobs: dict[str, Work], rounds: int) -> dict[str, list[float]]:
    """Seconds of each job in each round; one round beforehand warms up and is dropped."""
    taken: dict[str, list[float]] = {name: [] for name in jobs}
    for number in range(rounds + 1):
        for name, job in jobs.items():
            once = seconds(job)
            if number:
                taken[name].append(once)
    return taken


def median_ratio(over: list[float], under: list[float]) -> float:
    return statistics.median(one / two for one, two in zip(over, under, strict=True))


def measure(
    model: Model, *, rounds: int, checks: int, peers: list[Any], peer_cells: int
) -> tuple[list[Any], list[str]]:
    """Claims as (name, value, bound), and lines that are shown without a bound."""
    rows: list[Any] = []
    lines: list[str] = []
    ratios: dict[str, dict[int, float]] = {type(peer).__name__: {} for peer in peers}
    agreement = 0.0
    chosen = sorted({round(x) for x in np.linspace(0, model.n_layers - 1, min(peer_cells, model.n_layers))})
    for tokens in LENGTHS if peers else (MAIN,):
        ours = Ours(model, tokens)
        jobs: dict[str, Work] = {"layers": ours.work(ours.layers)}
        if tokens == MAIN:
            jobs |= {"plain": ours.plain, "heads": ours.work(ours.heads), "everywhere": ours.work(ours.head_everywhere)}
        for peer in peers:
            jobs[type(peer).__name__] = lambda peer=peer, ours=ours: peer.run(ours, chosen)
        if tokens == MAIN:
            jobs["plain again"] = ours.plain  # long jobs stand between the two, whose mean is the unit of the round
        taken = rounds_of(jobs, rounds)
        if tokens == MAIN:
            both = zip(taken["plain"], taken.pop("plain again"), strict=True)
            taken["plain"] = [(one + two) / 2 for one, two in both]
        for peer in peers:
            name = type(peer).__name__
            ratio = median_ratio(taken[name], taken["layers"]) * model.n_layers / len(chosen)
            ratios[name][tokens] = ratio
            expected = ours.sweep(ours.layers, 0).difference[0, chosen]
            agreement = max(agreement, float(np.abs(np.array(peer.run(ours, chosen)) - expected).max()))
        if tokens == MAIN:
            price = {name: median_ratio(times, taken["plain"]) for name, times in taken.items()}
            one = price["everywhere"] / len(ours.head_everywhere)
            rows.append((f"all {len(ours.layers)} layers, answer position: forward passes", price["layers"], 1.5))
            rows.append((f"all {len(ours.heads)} heads zeroed, answer position: forward passes", price["heads"], 5.0))
            rows.append(("one head at all positions, mean over layers: forward passes", one, 0.6))
            result = ours.sweep([*ours.layers, *ours.heads, *ours.head_everywhere], checks)
            relative = result.check_max_abs / (result.check_bound / DIFFERENCE)
            rows.append((f"largest difference to plain passes, {result.checked} random cells", relative, DIFFERENCE))
            lines.append(
                f"engines {result.engine}; one plain pass {statistics.median(taken['plain']):.2f} s; the checks of a sweep "
                f"cost {result.check_passes:.0f} passes more"
            )
    for name, found in ratios.items():
        rows.append((f"{name} over ours, same cells, {MAIN} tokens", found[MAIN], 10.0))
        lines.append(f"{name} over ours: " + ", ".join(f"{ratio:.1f} at {n} tokens" for n, ratio in found.items()))
    if peers:
        lines.append(
            f"peers timed on {len(chosen)} of {model.n_layers} cells; they differ from ours by {agreement:.1e} logits"
        )
    return rows, lines


def main() -> int:
    parser = argparse.ArgumentParser(description="Price and exactness of patching sweeps.")
    parser.add_argument("--model", help="hub id, folder, smollm2 or builtin; without it a random model is built")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--checks", type=int, default=20, help="cells recomputed for the largest difference")
    parser.add_argument("--peers", choices=("all", "none"), default="all", help="none where they are not installed")
    parser.add_argument("--peer-cells", type=int, default=4, help="cells of the peers that are timed")
    parser.add_argument("--json", action="store_true", help="print the claims as JSON and nothing else")
    options = parser.parse_args()
    model = load(options.model) if options.model else random_model()
    peers = [TransformerLens(model), NNsight(model)] if options.peers == "all" else []
    found, lines = measure(
        model, rounds=options.rounds, checks=options.checks, peers=peers, peer_cells=options.peer_cells
    )
    rows = []
    for name, value, bound in found:
        ok = value >= bound if "over ours" in name else value <= bound
        rows.append({"claim": name, "value": value, "bound": bound, "ok": bool(ok)})
    if options.json:
        print(json.dumps(rows, indent=1))
    else:
        print(
            f"{model.name}, pair of {MAIN - 3} and {MAIN} tokens, load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores"
        )
        for row in rows:
            least = "at least" if "over ours" in row["claim"] else "at most"
            print(
                f"{'ok  ' if row['ok'] else 'FAIL'} {row['claim']:<66} {row['value']:>9.3g}  {least} {row['bound']:g}"
            )
        print("\n".join(lines))
    return 0 if all(row["ok"] for row in rows) else 1


if __name__ == "__main__":
    raise SystemExit(main())
