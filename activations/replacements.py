"""Whole tensors that an adapter brings besides its low-rank ones: retrained modules and trained biases.

PEFT saves them when an adapter was trained with `modules_to_save` (often the unembedding or the embedding) or with
`bias="all"` or `"lora_only"`. Its own `disable_adapter` has left such tensors in place before, so a "base" run kept the
adapter's biases. Here they are never copied into the base: a module's parameter slot is pointed at the adapter's tensor
and, on the way out, at the base's own again. That is exact by construction, takes no time, and keeps weights apart that
the base shares: an adapter that retrained only the unembedding of a model with tied weights leaves its embedding alone.

A tensor is taken only where the adapter's configuration announces it. One that it does not announce is a copy of a base
weight, which is dropped if it equals ours and refused if it does not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from activations.errors import ModelError

Slot = tuple[nn.Module, str, Any]
"""A module, the name of a parameter, and the base's own parameter."""


@dataclass(slots=True)
class Replacement:
    """The adapter's tensor for one parameter of one module, by names that hold whatever wraps the module."""

    module: str
    parameter: str
    value: nn.Parameter


def split(
    name: str, tensors: Mapping[str, Tensor], config: Any, hf_model: nn.Module
) -> tuple[dict[str, Tensor], tuple[Replacement, ...]]:
    """The low-rank tensors of an adapter file, and its replacements; ModelError for a weight that is neither."""
    here = {key.replace(".base_layer", ""): tensor for key, tensor in hf_model.state_dict().items()}
    retied = {here[key].data_ptr() for key in here if announced(key, config)} & (
        {tensor.data_ptr() for tensor in here.values()} if getattr(config, "ensure_weight_tying", False) else set()
    )
    low_rank: dict[str, Tensor] = {}
    whole: dict[str, Replacement] = {}
    for key, tensor in tensors.items():
        if not tensor.isfinite().all():
            raise ModelError(f"adapter {name!r} holds infinite or NaN values in {key!r}; give a checkpoint before that")
        if ".lora_" in key:
            low_rank[key] = tensor
            continue
        plain = key.replace(".base_layer", "").replace(".modules_to_save", "")
        own = here.get(plain)
        if announced(plain, config) or (own is not None and own.data_ptr() in retied):
            if own is None or own.shape != tensor.shape:
                have = "no such tensor" if own is None else f"one of {list(own.shape)}"
                raise ModelError(
                    f"adapter {name!r} was made for another base: it brings {plain} of {list(tensor.shape)} and this "
                    f"model has {have}; load its own base"
                )
            module, _, parameter = plain.rpartition(".")
            whole[plain] = Replacement(module, parameter, nn.Parameter(tensor.to(own), requires_grad=False))
        elif own is None or own.shape != tensor.shape or not torch.equal(own.cpu(), tensor.to(own.dtype)):
            raise ModelError(
                f"adapter {name!r} brings a weight of the base itself ({key}) that its configuration does not announce; "
                "train it with LoRA layers, modules_to_save or bias on this base"
            )
    for wanted in config.modules_to_save or ():
        inside = [key for key in here if _within(key.rpartition(".")[0], wanted)]
        _complete(name, inside or [wanted], whole)
    trained = {key.partition(".lora_")[0].replace(".base_layer", "") + ".bias" for key in low_rank}
    biases = {"all": [key for key in here if key.endswith(".bias") and ".lora_" not in key], "none": []}
    _complete(name, biases.get(config.bias, [key for key in here if key in trained]), whole)
    return low_rank, tuple(whole.values())


def _complete(name: str, wanted: Sequence[str], whole: Mapping[str, Replacement]) -> None:
    if lacking := [key for key in wanted if key not in whole]:
        raise ModelError(
            f"adapter {name!r} does not fit: it retrained {lacking[0]!r} and its file has nothing for it "
            f"({len(lacking)} such); copy the adapter again, and load its own base"
        )


def announced(key: str, config: Any) -> bool:
    """Whether an adapter's configuration says that it retrained this parameter."""
    module = key.rpartition(".")[0]
    if any(_within(module, wanted) for wanted in config.modules_to_save or ()):
        return True
    return config.bias != "none" and key.rpartition(".")[2] == "bias"


def _within(module: str, wanted: str) -> bool:
    """Whether a module is one that PEFT means by this name, or lies inside one.

    PEFT compares the ends of paths as text: ``norm`` means ``input_layernorm`` too.
    """
    return module.endswith(wanted) or f"{wanted}." in module


def put(hf_model: nn.Module, replacements: Sequence[Replacement]) -> list[Slot]:
    """Point the slots at the adapter's tensors; gives what :func:`put_back` needs."""
    slots: list[Slot] = []
    for one in replacements:
        module: Any = hf_model.get_submodule(one.module)
        module = getattr(module, "base_layer", module)  # under a LoRA wrapper
        own = module._parameters[one.parameter]
        if one.value.device != own.device:
            one.value = nn.Parameter(one.value.to(own.device), requires_grad=False)
        slots.append((module, one.parameter, own))
        module._parameters[one.parameter] = one.value
    return slots


def put_back(slots: list[Slot]) -> None:
    """Point the slots at the base's own parameters again, and forget them."""
    while slots:
        module, parameter, own = slots.pop()
        module._parameters[parameter] = own
