"""Where things are inside a transformer, found by watching it run.

Interpretability code needs names: the blocks, the projection that writes attention into the residual stream, the last
norm, the unembedding. Tables of class names rot with every release. This module instead runs one short prompt, looks at
what each module received and returned, and keeps the modules whose *behaviour* is the one meant:

- blocks: the longest ``ModuleList`` whose members each ran once, in order, each handing its ``[batch, token, d]``
  output to the next unchanged (that tensor is the residual stream);
- out-projection of a block: two prompts that end alike but begin differently are run, with the residual at the last
  position forced equal at every block. Inside a block, the first linear map to width d whose input at the last position
  differs between the two must sit behind the only thing that reads other positions: the mixer. This holds for
  sequential and parallel blocks, for GPT-2's Conv1D and for linear attention;
- heads: the number of query heads seen by the attention operation itself, so that grouped keys, a head width that is
  not d / heads, and hybrid models need no special case. A head is a slice of the out-projection's *input*;
- attention and MLP outputs: the two modules whose outputs are literally what is added to the residual (behind the
  second norm in models that have one). A block that scales an addition, or makes a third one (Gemma 4), keeps the parts
  that were found, each by the module that reads the sum next, and the reason why they are not all;
- final norm, scale and softcap: the module between the last block and the unembedding, and the one arrangement of scale
  and softcap that reproduces the model's logits. If none does, the model is refused.

The result holds module *names*. They are resolved at each use, because attaching a LoRA adapter puts a wrapper at the
old name: a hook on the module object kept from before would no longer see the adapter's part.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from activations.errors import ModelError
from activations.watch import Run, plain_forward
from activations.watch import first as first
from activations.watch import hidden_argument as hidden_argument
from activations.watch import hooks as hooks
from activations.watch import replace_hidden as replace_hidden

_LENGTH = 8
FULL = (torch.float32, torch.float64)
"""Precisions in which an identity is held to rounding; the others get loose bounds."""


@dataclass(frozen=True, slots=True)
class Structure:
    """Module names and sizes of one model; tuples have one entry a block, None where the block has no such part."""

    blocks: tuple[str, ...]
    out_projections: tuple[str | None, ...]
    heads: tuple[int | None, ...]
    d_head: tuple[int | None, ...]
    final_norm: str
    head: str
    logit_scale: float
    softcap: float | None
    embedding: str
    attention: tuple[str, ...]
    """``softmax`` or ``other`` (linear attention, recurrence, convolution)."""
    attn_out: tuple[str | None, ...]
    """The module whose output is what attention adds to the residual."""
    mlp_out: tuple[str | None, ...]
    unsplit: tuple[str | None, ...]
    """Why ``resid_pre + attn_out + mlp_out`` is not ``resid_post`` in a layer; None where it is."""
    d_model: int


def text_config(config: Any) -> Any:
    """The language model's part of a configuration (multimodal ones nest it)."""
    return config.get_text_config() if hasattr(config, "get_text_config") else getattr(config, "text_config", config)


def discover(hf_model: nn.Module) -> Structure:
    """Find the structure of a causal language model and verify it numerically; ModelError where that fails."""
    embedding_module, head_module = _ends(hf_model)
    names = {module: name for name, module in hf_model.named_modules()}
    run_a = Run(hf_model, _probe_ids(embedding_module, 0), names)
    blocks = _blocks(hf_model, run_a)
    width = run_a.outputs[blocks[0]].shape[-1]
    run_b = Run(hf_model, _probe_ids(embedding_module, 3), names)
    anchors = [run_a.inputs[name][:, -1:] for name in blocks]
    forced = Run(hf_model, run_b.ids, names, blocks=blocks, anchors=anchors)

    _refuse_lookahead(hf_model, run_a)
    final_norm = _final_norm(run_a, blocks, head_module, names)
    scale, softcap = _scale_and_softcap(hf_model, run_a, names[head_module])
    outs, heads, widths, kinds, parts = [], [], [], [], []
    for block in blocks:
        out = _out_projection(hf_model, run_a, forced, block, width)
        kind, count = _heads(hf_model, run_a, block, out)
        parts.append(_parts(run_a, block, out))
        outs.append(_outer(out))
        kinds.append(kind)
        heads.append(count)
        widths.append(run_a.inputs[out].shape[-1] // count if out and count else None)
    return Structure(
        blocks=tuple(blocks),
        out_projections=tuple(outs),
        heads=tuple(heads),
        d_head=tuple(widths),
        final_norm=final_norm,
        head=_outer(names[head_module]) or "",
        logit_scale=scale,
        softcap=softcap,
        embedding=_outer(names[embedding_module]) or "",
        attention=tuple(kinds),
        attn_out=tuple(part.attn for part in parts),
        mlp_out=tuple(part.mlp for part in parts),
        unsplit=tuple(part.unsplit for part in parts),
        d_model=width,
    )


def _ends(hf_model: Any) -> tuple[nn.Module, nn.Module]:
    name = type(hf_model).__name__
    embedding = hf_model.get_input_embeddings() if hasattr(hf_model, "get_input_embeddings") else None
    head = hf_model.get_output_embeddings() if hasattr(hf_model, "get_output_embeddings") else None
    if embedding is None or head is None:
        raise ModelError(f"{name} has no unembedding, so it is no causal language model; give a ...ForCausalLM model")
    return embedding, head


def _probe_ids(embedding: Any, shift: int) -> Tensor:
    """Ids that differ with ``shift`` everywhere but at the last position."""
    size = int(embedding.weight.shape[0])
    ids = [(11 + 5 * column + shift) % min(size, 4096) for column in range(_LENGTH - 1)]
    return torch.tensor([[*ids, 7 % size]], device=embedding.weight.device)


def _refuse_lookahead(hf_model: nn.Module, run: Run) -> None:
    """A causal model's earlier logits do not depend on a later token."""
    ids = run.ids.clone()
    ids[0, -1] = run.ids[0, 0]
    with torch.inference_mode():
        other = plain_forward(hf_model, ids).logits[:, :-1].float().cpu()
    this = run.logits[:, :-1].float()
    if (this - other).abs().max() > (1e-4 if run.logits.dtype in FULL else 1e-1) * this.abs().max():
        raise ModelError(
            f"{type(hf_model).__name__} lets earlier tokens see later ones, so it is no causal language model; give one"
        )


def _blocks(hf_model: nn.Module, run: Run) -> list[str]:
    found: list[list[str]] = []
    for name, module in hf_model.named_modules():
        members = [f"{name}.{index}" for index in range(len(module))] if isinstance(module, nn.ModuleList) else []
        if members and _is_chain(run, members):
            found.append(members)
    if not found:
        raise ModelError(
            f"found no stack of blocks in {type(hf_model).__name__}: no ModuleList whose members run once, in order, "
            "and pass one residual stream along; this architecture is not supported"
        )
    return max(found, key=lambda members: (len(members), -len(members[0])))


def _is_chain(run: Run, members: list[str]) -> bool:
    if any(run.calls.get(name) != 1 or name not in run.outputs or name not in run.inputs for name in members):
        return False
    if [name for name in run.order if name in set(members)] != members:
        return False
    if any(run.outputs[name].ndim != 3 or run.outputs[name].shape[1] != _LENGTH for name in members):
        return False
    return all(torch.equal(run.outputs[one], run.inputs[two]) for one, two in pairwise(members))


def _is_linear(module: nn.Module) -> bool:
    weight = getattr(module, "weight", None)
    return isinstance(module, nn.Linear) or (
        type(module).__name__ == "Conv1D" and isinstance(weight, Tensor) and weight.ndim == 2
    )


def _out_projection(hf_model: nn.Module, one: Run, two: Run, block: str, width: int) -> str | None:
    for name in one.order:
        if not name.startswith(block + ".") or not _is_linear(hf_model.get_submodule(name)):
            continue
        if name not in one.inputs or one.outputs[name].shape[-1] != width or one.inputs[name].ndim != 3:
            continue
        a, b = one.inputs[name][:, -1].float(), two.inputs[name][:, -1].float()
        if (a - b).abs().max() > 1e-6 * a.abs().max():
            return name
    return None


def _outer(name: str | None) -> str | None:
    """A LoRA wrapper keeps the old layer as ``base_layer``; the wrapper's name is the one to hook."""
    return name.removesuffix(".base_layer") if name else name


def _heads(hf_model: Any, run: Run, block: str, out: str | None) -> tuple[str, int | None]:
    if out is None:
        return "other", None
    size = run.inputs[out].shape[-1]
    seen = run.watch.seen.get(block)
    if not seen:
        mixer = hf_model.get_submodule((_outer(out) or "").rpartition(".")[0])
        count = getattr(mixer, "num_v_heads", None)
        return "other", count if isinstance(count, int) and size % count == 0 else None
    count, value_width = seen[0]
    config = text_config(hf_model.config)
    if value_width is None:
        value_width = getattr(config, "v_head_dim", None) or getattr(config, "head_dim", None) or size // count
    if count * value_width != size:
        raise ModelError(
            f"{out} reads {size} features but attention has {count} heads of {value_width}; "
            "its heads cannot be cut, so this architecture is not supported"
        )
    return "softmax", count


class _Parts(NamedTuple):
    """What one block adds to the residual stream, as module names, and why that is not all."""

    attn: str | None = None
    mlp: str | None = None
    unsplit: str | None = None


def _parts(run: Run, block: str, out: str | None) -> _Parts:
    """The two modules whose outputs add up, with the block's input, to its output; or those that a reader vouches for."""
    if out is None:
        return _Parts(unsplit="no module was found through which it reads other positions")
    before, after = run.inputs[block], run.outputs[block]
    inside = [name for name in run.order if name.startswith(block + ".")]
    inside = inside[inside.index(out) :]
    writers = {name: run.outputs[name] for name in inside if _shaped(run.outputs.get(name), before)}
    names = list(writers)
    pair = _exact(
        ((before, writers[one], writers[two]), after, (one, two))
        for i, one in enumerate(names)
        for two in names[i + 1 :]
        if not _nested(one, two)
    )
    if pair:
        return _Parts(_outer(pair[0]), _outer(pair[1]))
    readers = {name: run.inputs[name] for name in inside if _shaped(run.inputs.get(name), before)}
    added = _exact(((before, writers[one]), read, (one, by)) for one in names for by, read in readers.items())
    if added is None:
        only = _exact(((before, writers[one]), after, (one, one)) for one in names)
        if only:
            return _Parts(_outer(only[0]), unsplit="the block adds one part only")
        return _Parts(unsplit="no module returns what the block adds, as where it scales its additions")
    attn, middle = added[0], readers[added[1]]
    second = _exact(
        ((middle, writers[two]), read, (two, by))
        for two in names[names.index(attn) + 1 :]
        for by, read in readers.items()
        if not _nested(attn, two) and not _nested(two, by)
    )
    if second is None:
        return _Parts(_outer(attn), unsplit="what it adds after attention is no module's output")
    return _Parts(_outer(attn), _outer(second[0]), "the block adds a third part or scales its output")


def _shaped(tensor: Tensor | None, like: Tensor) -> bool:
    return tensor is not None and tensor.shape == like.shape


def _nested(one: str, two: str) -> bool:
    return one == two or one.startswith(two + ".") or two.startswith(one + ".")


def _exact(found: Iterable[tuple[tuple[Tensor, ...], Tensor, tuple[str, str]]]) -> tuple[str, str] | None:
    """The names whose tensors add up to what was wanted, to the rounding of a sum; of equals the outermost modules.

    The room is that of each single entry: a residual stream holds entries thousands of times larger than what one block
    adds, and a bound on the largest would let any module pass. The sum is made in the network's own precision and
    order, so that the right names are mostly bit-equal and others are not, also where half precision is coarse.
    """
    best: tuple[float, int, tuple[str, str]] | None = None
    for parts, wanted, names in found:
        made, room = parts[0], wanted.abs().double()
        for part in parts[1:]:
            made = made + part
        for part in parts:
            room = room + part.abs().double()
        spacing = max(torch.finfo(part.dtype).eps for part in parts)
        excess = float(((made.double() - wanted.double()).abs() / (4 * spacing * room + 1e-30)).max())
        rank = (excess, sum(map(len, names)), names)
        best = rank if best is None or rank < best else best
    return None if best is None or not best[0] <= 1 else best[2]


def _final_norm(run: Run, blocks: list[str], head: nn.Module, names: dict[nn.Module, str]) -> str:
    stream, wanted = run.outputs[blocks[-1]], run.inputs.get(names[head])
    later = run.order[run.order.index(blocks[-1]) + 1 :]
    for name in later:
        same_input = name in run.inputs and torch.equal(run.inputs[name], stream)
        if wanted is not None and same_input and name in run.outputs and torch.equal(run.outputs[name], wanted):
            return name
    raise ModelError(
        "found no norm between the last block and the unembedding; the logit lens would be wrong, so this architecture "
        "is not supported"
    )


def _scale_and_softcap(hf_model: Any, run: Run, head: str) -> tuple[float, float | None]:
    config = text_config(hf_model.config)
    stated = [getattr(config, key, None) for key in ("final_logit_softcapping", "logits_soft_cap")]
    softcaps = [None, *[softcap for softcap in stated if softcap]]
    scales = [1.0]
    if getattr(config, "logit_scale", None):
        scales.append(float(config.logit_scale))
    if getattr(config, "logits_scaling", None):
        scales.append(1.0 / float(config.logits_scaling))
    bound = 1e-5 if run.logits.dtype in FULL else 1e-2
    errors = {}
    for scale in scales:
        for softcap in softcaps:
            made = apply_scale(run.outputs[head].float(), scale, softcap)
            errors[scale, softcap] = ((made - run.logits.float()).abs().max() / run.logits.float().abs().max()).item()
    best = min(errors, key=lambda key: errors[key])
    if not errors[best] <= bound:
        raise ModelError(
            f"the unembedding does not reproduce the model's logits (relative difference {errors[best]:.1e}, allowed "
            f"{bound:.0e}); the logit lens would be wrong, so this architecture is not supported"
        )
    return best


def apply_scale(logits: Tensor, scale: float, softcap: float | None) -> Tensor:
    """Logit scale, then softcap ``c * tanh(x / c)``: what some models do after the unembedding."""
    if scale != 1.0:
        logits = logits * scale
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)
