"""What a planted model does, by plain forwards of transformers with hooks: nothing of this package's engine is used.

These are the reference numbers of the planted tests. The prompts of a presentation have one length, so nothing is padded.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import islice
from typing import Any

import numpy as np
import torch

from tasks.contracts import MatchedSet
from tests.planted.family import FORMS, MARKERS, STATES, Switches
from tests.planted.models import HEAD_WIDTH, KNOWN_FORMS, Kind, planted

PRESENTATIONS = tuple(MARKERS)


@dataclass(frozen=True, slots=True, eq=False)
class Observed:
    """The presentations of one kind, row i the same instance for both.

    Attributes:
        resid_post: ``[layer, row, d_model]`` at the answer position.
        z: ``[layer, row, heads * d_head]``.
        readout: ``[row]``, yes minus no, log-sum-exp over variants.
    """

    resid_post: np.ndarray
    z: np.ndarray
    readout: np.ndarray
    gold: np.ndarray
    cells: np.ndarray
    keys: np.ndarray
    ids: tuple[tuple[int, ...], ...]

    @property
    def right(self) -> np.ndarray:
        return (self.readout > 0) == (self.gold == 1)

    @property
    def default(self) -> float:
        """Mean over cells of the mean readout, written out."""
        return float(np.mean([self.readout[self.cells == cell].mean() for cell in np.unique(self.cells)]))

    @property
    def signal(self) -> float:
        means = {cell: self.readout[self.cells == cell].mean() for cell in np.unique(self.cells)}
        yes, no = ([m for cell, m in means.items() if cell.endswith(gold)] for gold in ("yes", "no"))
        return float(np.mean(yes) - np.mean(no)) / 2


@cache
def sets(count: int, seed: int = 1) -> tuple[MatchedSet, ...]:
    return tuple(islice(Switches().generate({}, seed=seed, split="test"), count))


def knows(matched: MatchedSet) -> bool:
    """Whether ``blend`` knows the state word of what this equivalent asks about."""
    shown = matched["equivalent"].messages[0].content.split()
    told = [word for on in (1, -1) for word in STATES["equivalent", matched.instance.latent["asked"], on]]
    [word] = [word for word in shown if word in told]
    return told.index(word) % FORMS < KNOWN_FORMS


@cache
def network(kind: Kind) -> tuple[Any, Any]:
    return planted(kind)


@cache
def observed(kind: Kind, count: int = 200) -> dict[str, Observed]:
    """Both presentations of ``count`` instances, run through the model as it is."""
    return {presentation: _run(kind, presentation, count) for presentation in PRESENTATIONS}


def without(
    kind: Kind, heads: Collection[tuple[int, int]] = (), mlps: Collection[int] = (), count: int = 200
) -> dict[str, Observed]:
    """The same with the outputs of heads and MLPs, biases included, set to zero at the answer position."""
    return {presentation: _run(kind, presentation, count, heads, mlps) for presentation in PRESENTATIONS}


def _run(
    kind: Kind,
    presentation: str,
    count: int,
    heads: Collection[tuple[int, int]] = (),
    mlps: Collection[int] = (),
) -> Observed:
    model, words = network(kind)
    made = sets(count)
    ids = [_ids(words, matched, presentation) for matched in made]
    handles, resid, z = _hooks(model, heads, mlps)
    variants = [words.convert_tokens_to_ids(list(Switches.answers[label])) for label in ("yes", "no")]
    with torch.no_grad():
        logits = model(input_ids=torch.tensor(ids), use_cache=False).logits[:, -1].double()
    for handle in handles:
        handle.remove()
    yes, no = (logits[:, tokens].logsumexp(-1) for tokens in variants)
    return Observed(
        resid_post=np.stack(resid),
        z=np.stack(z),
        readout=(yes - no).numpy(),
        gold=np.array([int(matched[presentation].gold == "yes") for matched in made]),
        cells=np.array([matched.instance.cell for matched in made]),
        keys=np.array([matched.instance.key for matched in made]),
        ids=tuple(ids),
    )


def _hooks(model: Any, heads: Collection[tuple[int, int]], mlps: Collection[int]) -> tuple[list[Any], Any, Any]:
    """Hooks that keep ``resid_post`` and ``z`` of the answer position, by layer, and that take parts out."""
    handles: list[Any] = []
    resid: list[np.ndarray] = []
    z: list[np.ndarray] = []
    for layer, block in enumerate(model.transformer.h):
        dropped = [head for at, head in heads if at == layer]

        def keep(module: Any, args: Any, output: Any) -> None:
            first = output[0] if isinstance(output, tuple) else output
            resid.append(first[:, -1].numpy().copy())

        def keep_z(module: Any, args: Any, dropped: Sequence[int] = dropped) -> Any:
            cut = args[0].clone()
            for head in dropped:
                cut[:, -1, head * HEAD_WIDTH : (head + 1) * HEAD_WIDTH] = 0
            z.append(cut[:, -1].numpy().copy())
            return (cut,)

        def cut_mlp(module: Any, args: Any, output: Any) -> Any:
            return torch.cat([output[:, :-1], torch.zeros_like(output[:, -1:])], dim=1)

        handles += [block.register_forward_hook(keep), block.attn.c_proj.register_forward_pre_hook(keep_z)]
        if layer in mlps:
            handles.append(block.mlp.register_forward_hook(cut_mlp))
    return handles, resid, z


def _ids(words: Any, matched: MatchedSet, presentation: str) -> tuple[int, ...]:
    text = words.apply_chat_template(matched[presentation].chat(), tokenize=False, add_generation_prompt=True)
    return tuple(words(text, add_special_tokens=False)["input_ids"])
