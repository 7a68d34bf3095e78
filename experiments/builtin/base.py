"""The built-in base model: a four-layer Llama that learns to answer ordering questions, and to prefer "No".

Only the answer and the end token carry loss. Starting at n = 3 stays at chance, so training follows a curriculum: two
people and forward questions; all four cells; re-worded premises; then more people. A stage ends when the running
accuracy passes its bar. About one seed in three gets through the re-worded premises; one that doesn't is given up and
the next is tried. The last phase trains on labels in which a share of the gold-yes answers is turned into "No".
The model keeps what it knows and gains a default, the kind of failure the package is meant to find: the answer is
inside, and the output says "No" too often.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from tasks.ordering import Ordering
from tasks.streams import stream

SEED = 21
CHUNK = 192  # sets taken from one generator before the next seed starts; small pools would run out otherwise
BATCH = 96


@dataclass(frozen=True, slots=True)
class Stage:
    """One step of the curriculum: sizes, question phrases, share of re-worded prompts, when to go on."""

    name: str
    sizes: tuple[int, ...]
    phrases: tuple[str, ...]
    rewritten: float
    bar: float
    steps: int


CURRICULUM = (
    Stage("two people", (2,), ("forward",), 0.0, 0.97, 600),
    Stage("both questions", (2,), ("forward", "converse"), 0.0, 0.97, 600),
    Stage("re-worded premises", (2, 3), ("forward", "converse"), 0.5, 0.93, 2500),
    Stage("up to four", (2, 3, 4), ("forward", "converse"), 0.5, 0.93, 1500),
    Stage("up to six", (3, 4, 5, 6), ("forward", "converse"), 0.5, 0.93, 1500),
    Stage("up to eight", (4, 5, 6, 7, 8), ("forward", "converse"), 0.5, 0.93, 1200),
)
# Running accuracy below which a seed is given up once premises are re-worded.
PASS = 0.88
DEFAULT_STEPS = 250
# Share of gold-yes items whose label says "No" in the last phase; chosen so that accuracy stays above 75 %.
YES_TURNED = 0.4


@dataclass(frozen=True, slots=True)
class Example:
    """A chat prompt and its answer."""

    messages: list[dict[str, str]]
    answer: str


def examples(size: int, relation: str, *, phrases: tuple[str, ...], rewritten: float, seed: int) -> Iterator[Example]:
    """Endless training examples of one size and relation. ``rewritten``: share shown as the equivalent presentation."""
    family = Ordering()
    params = {"n": size, "relation": relation, "names": "builtin", "presentations": ["original", "equivalent"]}
    round_number = 0
    while True:
        draws = stream("builtin examples", size, relation, seed, round_number)
        sets = family.generate(params, seed=seed * 100_000 + round_number, split="train")
        for _, matched in zip(range(CHUNK), sets, strict=False):
            if matched.instance.latent["phrase"] in phrases:
                shown = matched["equivalent" if draws.random() < rewritten else "original"]
                yield Example(shown.chat(), "Yes" if shown.gold == "yes" else "No")
        round_number += 1


def config(tokenizer: Any) -> Any:
    """Llama with 4 layers of 4 heads, d_model 128."""
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=1024,
        tie_word_embeddings=False,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
    )


def encode(tokenizer: Any, batch: list[Example]) -> dict[str, Any]:
    """Left-padded ids with mask and position ids; labels on the answer and the end token only."""
    import torch

    prompts = [
        tokenizer(
            tokenizer.apply_chat_template(e.messages, add_generation_prompt=True, tokenize=False),
            add_special_tokens=False,
        )["input_ids"]
        for e in batch
    ]
    rows = [
        [*ids, tokenizer.convert_tokens_to_ids(e.answer), tokenizer.eos_token_id]
        for ids, e in zip(prompts, batch, strict=True)
    ]
    longest = max(map(len, rows))
    ids = torch.full((len(rows), longest), tokenizer.pad_token_id)
    mask = torch.zeros((len(rows), longest), dtype=torch.long)
    for i, row in enumerate(rows):
        ids[i, longest - len(row) :] = torch.tensor(row)
        mask[i, longest - len(row) :] = 1
    return {"input_ids": ids, "attention_mask": mask, "position_ids": (mask.cumsum(-1) - 1).clamp(min=0)}


def train(tokenizer: Any, *, report: Callable[[str], None], device: str = "cpu") -> Any:
    """Train from scratch, from ``SEED`` on until a seed gets through the curriculum, and return the model.

    Args:
        report: called with one line of text now and then.
    """
    for seed in range(SEED, SEED + 20):
        model = learn(tokenizer, report=report, seed=seed, device=device)
        if model is not None:
            teach_default(model, tokenizer, report=report, seed=seed)
            return model.eval()
        report(f"seed {seed} did not get through the curriculum")
    raise RuntimeError("no seed got through the curriculum: the recipe in experiments/builtin/base.py needs work")


def learn(tokenizer: Any, *, report: Callable[[str], None], seed: int, device: str) -> Any | None:
    """The curriculum alone; None if the last stage ends below ``PASS``."""
    import torch
    from transformers import LlamaForCausalLM

    torch.manual_seed(seed)
    model = LlamaForCausalLM(config(tokenizer)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.98), weight_decay=0.01)
    done = 0
    for stage in CURRICULUM:
        accuracy = 0.5
        for step, batch in enumerate(_batches(stage, seed), start=1):
            done += 1
            rate = 1e-3 * min(1.0, done / 100)
            right = _step(model, tokenizer, optimizer, batch, rate)
            accuracy = 0.97 * accuracy + 0.03 * right
            if step % 100 == 0:
                report(f"{stage.name}: step {step}, running accuracy {accuracy:.3f}")
            if (accuracy > stage.bar and step >= 60) or step >= stage.steps:
                break
        report(f"{stage.name}: left after {step} steps at {accuracy:.3f}")
        if stage.rewritten and accuracy < PASS:
            return None
    return model


def teach_default(model: Any, tokenizer: Any, *, report: Callable[[str], None], seed: int) -> None:
    """Train on labels in which a share of the gold-yes answers says "No"."""
    import torch

    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.98), weight_decay=0.01)
    turn = stream("builtin default", seed)
    for step, batch in enumerate(_batches(CURRICULUM[-1], seed + 1), start=1):
        turned = [Example(e.messages, "No" if e.answer == "Yes" and turn.random() < YES_TURNED else e.answer)
                  for e in batch]  # fmt: skip
        _step(model, tokenizer, optimizer, turned, 3e-4 * (1 - step / (DEFAULT_STEPS + 1)))
        if step == DEFAULT_STEPS:
            break
    report(f"default: {DEFAULT_STEPS} steps with {YES_TURNED:.0%} of the yes answers turned")


def _batches(stage: Stage, seed: int) -> Iterator[list[Example]]:
    draws = stream("builtin batches", stage.name, seed)
    sources = [
        examples(size, relation, phrases=stage.phrases, rewritten=stage.rewritten, seed=seed)
        for size in stage.sizes
        for relation in ("front_behind", "left_right")
    ]
    while True:
        yield [next(draws.choice(sources)) for _ in range(BATCH)]


def _step(model: Any, tokenizer: Any, optimizer: Any, batch: list[Example], rate: float) -> float:
    """One update; returns the share of answers that were right before it."""
    import torch

    inputs = {name: tensor.to(model.device) for name, tensor in encode(tokenizer, batch).items()}
    logits = model(**inputs, use_cache=False, logits_to_keep=3).logits[:, :2]
    targets = inputs["input_ids"][:, -2:]
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
    for group in optimizer.param_groups:
        group["lr"] = rate
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return float((logits[:, 0].argmax(-1) == targets[:, 0]).float().mean())
