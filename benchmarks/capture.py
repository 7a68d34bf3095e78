"""What capturing costs on top of the forward passes it needs anyway, and what others take for the same.

    python benchmarks/capture.py [--model M] [--json] [--quick]

One table, in one run on one machine:

* capture of every layer at the answer position into a checked, synced store, readout included, over the bare forward
  pass with `logits_to_keep=1`; and without the readout, over the bare pass below the unembedding. The bare passes run
  the very same padded batches and keep nothing;
* the same tensors through TransformerLens `run_with_cache` and nnsight `trace`, saved with numpy, over ours: same
  prompts, same batches, same weights, each library with its own attention;
* extra memory in units of one buffer [layer, row, d_model], and its growth over 200 batches;
* reading one layer of 10,000 rows from a store, over reading a plain file of the same bytes;
* switching the built-in model's adapter on and off, and whether the base is the same bit for bit afterwards.

Kinds of passes alternate, in changing order, so that a machine that slows down slows all; a claim is the median over
rounds of a ratio within one round. On a GPU times are wall times. On a CPU they are processor times, all threads
together, because other work may run on the machine; wall times are shown beside them. Without --model a random Llama is
made here (25 million parameters on a CPU, about a billion on a GPU), and nothing is downloaded.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

# The script's own folder comes first on the path, and a benchmark may bear the name of a package.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch

from activations.batching import batches, forward_arguments, pad
from activations.capturing import Plan, capture
from activations.model import Model
from activations.prompts import Prompt
from activations.readout import AnswerTokens
from activations.store import ActivationStore, StoreWriter
from activations.taps import backbone

OVERHEAD, MEMORY, GROWTH, READING, SWITCH = 1.05, 2.0, 0.5, 1.5, 50.0
ANSWERS = AnswerTokens(("yes", "no"), ((5, 6), (7, 8)))
Times = dict[str, list[tuple[float, float]]]
Row = dict[str, Any]


def row(claim: str, value: float, bound: float, *, least: bool = False, note: str = "") -> Row:
    """One line of the table; ``least`` says that the bound is a lower one."""
    ok = value >= bound if least else value <= bound
    return {"claim": claim, "value": round(value, 4), "bound": bound, "ok": bool(ok), "note": note}


def random_llama(device: str, dtype: str, *, large: bool) -> Model:
    """A Llama with random weights and a tokenizer of numbered words."""
    from tokenizers import Tokenizer, models
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    from activations.model import from_modules

    torch.manual_seed(0)
    small = {"hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 8, "num_attention_heads": 8}
    big = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32}
    config = LlamaConfig(
        vocab_size=8192, num_key_value_heads=4, max_position_embeddings=4096, **(big if large else small)
    )
    vocabulary = {f"w{i}": i for i in range(8192)}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(vocabulary, unk_token="w0")),
        eos_token="w1",
        chat_template="{{ messages[0].content }}",
    )
    kind = torch.float32 if dtype == "auto" else getattr(torch, dtype)
    return from_modules(
        LlamaForCausalLM(config).to(device, kind).eval().requires_grad_(False), tokenizer, name="random"
    )


def random_prompts(model: Model, n: int, tokens: int) -> list[Prompt]:
    """Prompts of `tokens` tokens give or take a third; which ids they hold does not matter for speed."""
    draw = random.Random(0)
    top = min(model.d_vocab, 5000)
    lengths = [draw.randint(tokens * 2 // 3, tokens * 4 // 3) for _ in range(n)]
    return [Prompt(tuple(draw.randrange(9, top) for _ in range(length)), "") for length in lengths]


def on_gpu(model: Model) -> bool:
    return model.device.type == "cuda"


def timed(model: Model, work: Callable[[], object]) -> tuple[float, float]:
    """Wall and processor seconds until the work is done, on the device too."""
    start, used = time.perf_counter(), time.process_time()
    work()
    if on_gpu(model):
        torch.cuda.synchronize(model.device)
    return time.perf_counter() - start, time.process_time() - used


def cut(model: Model, prompts: Sequence[Prompt], plan: Plan) -> list[list[Prompt]]:
    return [[prompts[n] for n in members] for members in batches([len(p.ids) for p in prompts], plan.batch_tokens)]


def bare(model: Model, groups: list[list[Prompt]], *, logits: bool) -> None:
    """The forward passes alone."""
    network = model.hf_model if logits else backbone(model)
    with torch.inference_mode():
        for group in groups:
            padded = pad(group, model.device, model.pad_id)
            network(**forward_arguments(network, padded, keep=1 if logits else None))


class Peers:
    """The same through other libraries, each on a copy of the network, made once and not timed."""

    def __init__(self, model: Model, groups: list[list[Prompt]], wanted: Sequence[str]) -> None:
        self.model, self.groups = model, groups
        self.works: dict[str, Callable[[Path], None]] = {}
        self.left_out: dict[str, str] = {}
        for name in wanted:
            try:
                self.works[name] = {"transformer_lens": self._lens, "nnsight": self._nnsight}[name]()
            except Exception as error:  # a library that is not there or cannot take the model is shown, not fatal
                self.left_out[name] = " ".join(str(error).split())[:120]

    def _lens(self) -> Callable[[Path], None]:
        from transformer_lens.model_bridge import TransformerBridge

        network = copy.deepcopy(self.model.hf_model)
        network.config.architectures = network.config.architectures or [type(network).__name__]
        with tempfile.TemporaryDirectory() as folder:
            self.model.tokenizer.save_pretrained(folder)
            bridge = TransformerBridge.boot_transformers(
                self.model.name,
                hf_model=network,
                tokenizer=type(self.model.tokenizer).from_pretrained(folder),
                dtype=self.model.dtype,
                device=str(self.model.device),
            )
        names = [f"blocks.{layer}.hook_resid_post" for layer in range(self.model.n_layers)]

        def work(folder: Path) -> None:
            for number, group in enumerate(self.groups):
                padded = pad(group, self.model.device, self.model.pad_id)
                with torch.inference_mode():
                    _, cache = bridge.run_with_cache(
                        padded.input_ids, attention_mask=padded.attention_mask, names_filter=names
                    )
                    kept = torch.stack([cache[name][:, -1] for name in names]).float().cpu()
                np.save(folder / f"{number}.npy", kept.numpy())

        return work

    def _nnsight(self) -> Callable[[Path], None]:
        import nnsight
        from nnsight.modeling.transformers import TransformersModel

        traced: Any = TransformersModel(
            copy.deepcopy(self.model.hf_model), tokenizer=copy.deepcopy(self.model.tokenizer)
        )
        blocks: list[Any] = []
        for name in self.model.structure.blocks:
            place = traced
            for part in name.split("."):
                place = place[int(part)] if part.isdigit() else getattr(place, part)
            blocks.append(place)

        def first(output: Any) -> Any:
            return output[0] if isinstance(output, tuple) else output

        def work(folder: Path) -> None:
            for number, group in enumerate(self.groups):
                padded = pad(group, self.model.device, self.model.pad_id)
                inputs = dict(padded._asdict())
                with torch.inference_mode(), traced.trace(inputs, use_cache=False, logits_to_keep=1):
                    seen = nnsight.save([first(block.output)[:, -1] for block in blocks])
                np.save(folder / f"{number}.npy", torch.stack(list(seen)).float().cpu().numpy())

        return work


def passes(
    model: Model, prompts: list[Prompt], plan: Plan, rounds: int, peers: Sequence[str]
) -> tuple[Times, Any, int]:
    """(wall, processor) seconds of each kind of pass, round by round; why libraries are left out; GPU bytes of capture."""
    groups = cut(model, prompts, plan)
    others = Peers(model, groups, peers)
    kinds = ["bare", "bare below", "capture", "capture, no readout", *others.works]
    seconds: Times = {kind: [] for kind in kinds}
    peak = dict.fromkeys(kinds, 0)
    for number in range(rounds + 1):
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            works: dict[str, Callable[[], object]] = {
                "bare": partial(bare, model, groups, logits=True),
                "bare below": partial(bare, model, groups, logits=False),
                "capture": partial(capture, model, prompts, plan, folder / "a", answers=ANSWERS),
                "capture, no readout": partial(capture, model, prompts, plan, folder / "b"),
            }
            for kind, work in others.works.items():
                (folder / kind).mkdir()
                works[kind] = partial(work, folder / kind)
            turn = number % len(kinds)
            for kind in kinds[turn:] + kinds[:turn]:
                if on_gpu(model):
                    torch.cuda.reset_peak_memory_stats(model.device)
                took = timed(model, works[kind])
                if number:  # the first round warms up
                    seconds[kind].append(took)
                    if on_gpu(model):
                        peak[kind] = max(peak[kind], torch.cuda.max_memory_allocated(model.device))
            if not number:
                _compare(model, prompts, plan, folder, list(others.works))
    return seconds, others.left_out, peak["capture, no readout"] - peak["bare below"]


def _compare(model: Model, prompts: list[Prompt], plan: Plan, folder: Path, kinds: Sequence[str]) -> None:
    """What the others saved is what we stored, or the comparison is void."""
    ours = ActivationStore.open(folder / "b").stack("resid_post")
    members = batches([len(p.ids) for p in prompts], plan.batch_tokens)
    for kind in kinds:
        for number, rows in enumerate(members):
            theirs = np.load(folder / kind / f"{number}.npy")
            gap = float(np.abs(theirs - ours[:, rows]).max() / max(1.0, float(np.abs(theirs).max())))
            if gap > (1e-3 if model.dtype == torch.float32 else 5e-2):
                print(f"note: {kind} differs from ours by {gap:.1e} in batch {number}", file=sys.stderr)


def middle(seconds: Times, kind: str, over: str, clock: int) -> float:
    """Median over rounds of one kind's time over another's."""
    pairs = zip(seconds[kind], seconds[over], strict=True)
    return statistics.median(one[clock] / other[clock] for one, other in pairs)


def resident() -> int:
    """Bytes of this process in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def memory(model: Model, n_batches: int, gpu_bytes: int, rows_a_batch: int) -> list[Row]:
    """Extra memory in buffers: on a GPU what its allocator saw; on a CPU what capture's own tensors hold, and growth."""
    from activations import taps

    made: list[taps.Buffers] = []
    init = taps.Buffers.__init__

    def noted(self: taps.Buffers, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        made.append(self)

    short = [Prompt(tuple(9 + (n + i) % 100 for i in range(2)), "") for n in range(n_batches * 64)]
    plan = Plan(batch_tokens=128)
    seen: list[int] = []
    taps.Buffers.__init__ = noted  # type: ignore[method-assign]
    try:
        with tempfile.TemporaryDirectory() as folder:
            capture(model, short, plan, folder, progress=lambda _: seen.append(resident()))
    finally:
        taps.Buffers.__init__ = init  # type: ignore[method-assign]
    width = torch.empty(0, dtype=made[0].dtype).element_size()
    buffer = model.n_layers * 64 * model.d_model * width
    held = sum(tensor.numel() * width for tensor in made[0]._flat.values())
    growth = (statistics.median(seen[-20:]) - statistics.median(seen[20:40])) / buffer
    found = [row(f"growth of memory, batch 30 to {n_batches}, in buffers", growth, GROWTH)]
    if on_gpu(model):
        one = model.n_layers * rows_a_batch * model.d_model * width
        return [row("peak extra GPU memory of capture, in buffers", gpu_bytes / one, MEMORY), *found]
    return [row("extra memory of capture's tensors, in buffers", held / buffer, MEMORY), *found]


def reading(rounds: int) -> Row:
    """One layer of 10,000 rows out of a store with several, over `numpy.fromfile` of the same bytes; both from cache."""
    n, width, each = 10_000, 2048, 64  # shards as a plan of 8192 tokens cuts prompts of 128
    rng = np.random.default_rng(0)
    order = np.random.default_rng(1).permutation(n)  # batches sorted by length scatter the rows
    shards = [np.sort(order[start : start + each]).tolist() for start in range(0, n, each)]
    columns: dict[str, list[Any]] = {
        "key": [str(i) for i in range(n)], "presentation": [""] * n, "label": ["answer"] * n,
        "position": [7] * n, "n_tokens": [8] * n,
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as name:
        folder, plain = Path(name) / "store", Path(name) / "plain.bin"
        places = {("resid_post", layer): width for layer in range(2)}
        writer = StoreWriter(
            folder, datasets=places, dtype="float32", n_layers=2, shards=shards, rows=columns, content={}
        )
        whole = rng.standard_normal((n, width), dtype=np.float32)
        for number, members in enumerate(shards):
            writer.write(number, dict.fromkeys(places, whole[members]))
        whole.tofile(plain)
        store = ActivationStore.open(folder)
        assert np.array_equal(store["resid_post", 1], whole)
        ratios = []
        for _ in range(3 * rounds):  # wall time: the store reads with several threads
            started = time.perf_counter()
            np.fromfile(plain, dtype=np.float32).reshape(n, width)
            halfway = time.perf_counter()
            _ = store["resid_post", 1]
            ratios.append((time.perf_counter() - halfway) / (halfway - started))
    return row("reading one layer of 10,000 rows, over a plain file", statistics.median(ratios), READING)


def switching(rounds: int) -> list[Row]:
    """Milliseconds to switch the built-in model's adapter on and off again; the base before and after."""
    from activations.model import load

    model = load("builtin", adapters=["builtin"], verify=False)
    name = model.adapter_names[0]
    ids = torch.tensor([[5, 6, 7, 8]])

    def logits() -> torch.Tensor:
        with torch.inference_mode():
            found: torch.Tensor = model.hf_model(input_ids=ids, use_cache=False).logits
        return found

    before, took = logits(), []
    for _ in range(rounds * 4):
        started = time.perf_counter()
        with model.use(name):
            took.append((time.perf_counter() - started) * 1e3)
            during = logits()
    same = torch.equal(before, logits()) and not torch.equal(before, during)
    return [
        row("adapter switch on the built-in model, ms", statistics.median(took), SWITCH),
        row("base equal bit for bit after it, 1 = yes", float(same), 1.0, least=True),
    ]


def main() -> int:
    """Measure and print; exit code 1 if a bound is missed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", help="hub id, folder or alias; without it a random Llama")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", help="default: float32 on a CPU, bfloat16 on a GPU")
    parser.add_argument("--store-dtype", help="default: the model's")
    parser.add_argument("--prompts", type=int, help="default: 20 on a CPU, 1024 on a GPU")
    parser.add_argument("--tokens", type=int, default=160, help="mean prompt length")
    parser.add_argument("--batch-tokens", type=int, help="default: 1024 on a CPU, 16384 on a GPU")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--peers", default="transformer_lens,nnsight", help="libraries to compare with, or none")
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    gpu = options.device.startswith("cuda") or (options.device == "auto" and torch.cuda.is_available())
    device = ("cuda" if gpu else "cpu") if options.device == "auto" else options.device
    dtype = options.dtype or ("bfloat16" if gpu else "float32")
    if options.model:
        from activations import load

        model = load(options.model, device=device, dtype=dtype, verify=False)
    else:
        model = random_llama(device, dtype, large=gpu)
    prompts = random_prompts(model, options.prompts or (1024 if gpu else 20), options.tokens)
    stored = options.store_dtype or str(model.dtype).removeprefix("torch.")
    plan = Plan(dtype=stored, batch_tokens=options.batch_tokens or (16384 if gpu else 1024))
    rounds = 3 if options.quick else max(5, options.rounds)
    peers = [name for name in options.peers.split(",") if name and name != "none"]
    seconds, left_out, gpu_bytes = passes(model, prompts, plan, rounds, peers)
    gc.collect()
    clock = 0 if gpu else 1
    rows = [
        row("capture with readout, over the bare forward", middle(seconds, "capture", "bare", clock), OVERHEAD),
        row("capture, over the bare forward below the unembedding",
            middle(seconds, "capture, no readout", "bare below", clock), OVERHEAD),
    ]  # fmt: skip
    for peer in peers:
        if peer in left_out:
            print(f"note: {peer} is left out: {left_out[peer]}", file=sys.stderr)
        else:
            ratio = middle(seconds, peer, "capture, no readout", clock)
            rows.append(row(f"{peer}, over capture", ratio, 1.0, least=True))
    most = max(len(group) for group in cut(model, prompts, plan))
    rows += memory(model, 60 if options.quick else 200, gpu_bytes, most)
    rows += [reading(rounds), *switching(rounds)]
    if options.json:
        print(json.dumps(rows))
        return 0 if all(one["ok"] for one in rows) else 1
    tokens, size = sum(len(prompt.ids) for prompt in prompts), sum(p.numel() for p in model.hf_model.parameters())
    where = torch.cuda.get_device_name(model.device) if gpu else f"CPU, {torch.get_num_threads()} threads"
    print(f"{model.name}, {size / 1e6:.0f} M parameters, {dtype}, {where}; {len(prompts)} prompts, {tokens} tokens, "
          f"batches of {plan.batch_tokens}, {rounds} rounds, ratios of {'wall' if gpu else 'processor'} time")  # fmt: skip
    for kind, took in seconds.items():
        wall, used = (statistics.median(one[n] for one in took) for n in (0, 1))
        print(f"     {kind:<22} {wall:9.3f} s wall {used:9.3f} s processor {tokens / wall:11,.0f} tokens/s")
    for one in rows:
        print(f"{'ok  ' if one['ok'] else 'MISS'} {one['claim']:<56} {one['value']:>9} bound {one['bound']}")
    return 0 if all(one["ok"] for one in rows) else 1


if __name__ == "__main__":
    raise SystemExit(main())
