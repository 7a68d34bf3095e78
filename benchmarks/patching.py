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

How the ratio to the peers depends on length. Their price is ``cells × (a pass with their hooks)``, ours is about
``1 + cells / T + constant / T`` passes of T tokens, the constant being what Python spends on one pass. So the ratio grows
with length while the last two terms count, and then stands at ``cells × (a peer's pass / a plain pass)``, which is its
cap; it goes on growing only where a peer's pass gets dearer than a plain one, as TransformerLens's does, whose attention
keeps the pattern. Ours in passes, a peer's cell in passes and the cap are printed for each length.

All ratios are of one run: rounds are interleaved, each round times everything once, ratios are taken within the round, and
their median is reported, because other work may run on the machine. On a CPU the time is that of this process, so that
waiting for a core does not count; on a GPU it is the clock's. Our times are of the engine. The proof that comes with every
sweep is not in them: 20 cells and a self-check for each group of cells, about 30 passes however many items there are,
which one pair alone would not earn back. They are printed beside, with what a sweep over 100 pairs pays.
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
from dataclasses import asdict, dataclass
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


def rounds_of(jobs: dict[str, Work], rounds: int, clock: Callable[[], float]) -> dict[str, list[float]]:
    """Seconds of each job in each round; one round beforehand warms up and is dropped.

    The plain pass is timed before and after the other jobs, some of which are long; their mean is the round's unit.
    """
    taken: dict[str, list[float]] = {name: [] for name in jobs}
    for number in range(rounds + 1):
        again: list[float] = []
        for name, job in [*jobs.items(), ("plain", jobs["plain"])]:
            start = clock()
            job()
            once = clock() - start
            if name == "plain":
                again.append(once)
            elif number:
                taken[name].append(once)
        if number:
            taken["plain"].append(statistics.mean(again))
    return taken


def median_ratio(over: list[float], under: list[float]) -> float:
    return statistics.median(one / two for one, two in zip(over, under, strict=True))


@dataclass(frozen=True)
class Claim:
    """One figure, and the bound that it is held to: at most that, or at least."""

    name: str
    value: float
    bound: float
    least: bool = False

    @property
    def ok(self) -> bool:
        return self.value >= self.bound if self.least else self.value <= self.bound


def measure(
    model: Model, *, rounds: int, checks: int, peers: list[Any], peer_cells: int
) -> tuple[list[Claim], list[str]]:
    """The claims, and lines that are shown without a bound."""
    rows: list[Claim] = []
    lines: list[str] = []
    paid: dict[int, float] = {}
    cell: dict[str, dict[int, float]] = {type(peer).__name__: {} for peer in peers}
    ratios: dict[str, dict[int, float]] = {type(peer).__name__: {} for peer in peers}
    agreement = 0.0
    clock = time.process_time if model.device.type == "cpu" else time.perf_counter
    chosen = sorted({round(x) for x in np.linspace(0, model.n_layers - 1, min(peer_cells, model.n_layers))})
    for tokens in LENGTHS if peers else (MAIN,):
        ours = Ours(model, tokens)
        jobs: dict[str, Work] = {"plain": ours.plain, "layers": ours.work(ours.layers)}
        if tokens == MAIN:
            jobs |= {"heads": ours.work(ours.heads), "everywhere": ours.work(ours.head_everywhere)}
        for peer in peers:
            jobs[type(peer).__name__] = lambda peer=peer, ours=ours: peer.run(ours, chosen)
        taken = rounds_of(jobs, rounds, clock)
        price = {name: median_ratio(times, taken["plain"]) for name, times in taken.items()}
        paid[tokens] = price["layers"]
        for peer in peers:
            name = type(peer).__name__
            cell[name][tokens] = price[name] / len(chosen)
            ratios[name][tokens] = median_ratio(taken[name], taken["layers"]) * model.n_layers / len(chosen)
            expected = ours.sweep(ours.layers, 0).difference[0, chosen]
            agreement = max(agreement, float(np.abs(np.array(peer.run(ours, chosen)) - expected).max()))
        if tokens == MAIN:
            one = price["everywhere"] / len(ours.head_everywhere)
            rows.append(Claim(f"all {len(ours.layers)} layers, answer position: forward passes", paid[MAIN], 1.5))
            rows.append(
                Claim(f"all {len(ours.heads)} heads zeroed, answer position: forward passes", price["heads"], 5.0)
            )
            rows.append(Claim("one head at all positions, mean over layers: forward passes", one, 0.6))
            result = ours.sweep([*ours.layers, *ours.heads, *ours.head_everywhere], checks)
            relative = result.check_max_abs / (result.check_bound / DIFFERENCE)
            rows.append(
                Claim(f"largest difference to plain passes, {result.checked} random cells", relative, DIFFERENCE)
            )
            proof = ours.sweep(ours.layers, checks).check_passes
            alone, hundred = paid[MAIN] + proof, paid[MAIN] + proof / 100
            lines.append(
                f"engines {result.engine}; one plain pass {statistics.median(taken['plain']):.2f} s; the checks of the "
                f"layer sweep cost {proof:.0f} passes more, whatever its size: {alone:.1f} passes for one pair, "
                f"{hundred:.2f} a pair for 100 pairs, checks included"
            )
    for name, found in ratios.items():
        rows.append(Claim(f"{name} over ours, same cells, {MAIN} tokens", found[MAIN], 10.0, least=True))
        first, last = LENGTHS[0], LENGTHS[-1]
        growth = found[last] / found[first]
        rows.append(Claim(f"{name} over ours, {last} tokens against {first}", growth, 1.0, least=True))
        lines.append(
            f"{name} over ours: " + ", ".join(f"{ratio:.1f} at {n} tokens" for n, ratio in found.items())
            + f"; cap {model.n_layers} cells x its pass: "
            + ", ".join(f"{model.n_layers * cell[name][n]:.1f}" for n in found)
            + "; its pass in plain passes: " + ", ".join(f"{cell[name][n]:.2f}" for n in found)
        )  # fmt: skip
    if peers:
        lines.append("ours in plain passes: " + ", ".join(f"{price:.2f} at {n} tokens" for n, price in paid.items()))
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
    if options.json:
        print(json.dumps([{**asdict(claim), "ok": claim.ok} for claim in found], indent=1))
    else:
        print(
            f"{model.name}, pair of {MAIN - 3} and {MAIN} tokens, load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores"
        )
        for claim in found:
            bound = f"at {'least' if claim.least else 'most'} {claim.bound:g}"
            print(f"{'ok  ' if claim.ok else 'FAIL'} {claim.name:<66} {claim.value:>9.3g}  {bound}")
        print("\n".join(lines))
    return 0 if all(claim.ok for claim in found) else 1


if __name__ == "__main__":
    raise SystemExit(main())
