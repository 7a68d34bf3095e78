"""Linear maps of a network, read backwards: which direction before a module is the given direction behind it.

Problem. ``direction . module(x)`` has to be split over the parts that ``x`` is the sum of. A projection is linear, and
so is an unembedding; a norm is not, because it divides by a scale that depends on the whole of ``x``.

Mechanism. A norm is made linear by freezing that scale at each row's own: with ``P`` the identity (RMSNorm) or the
subtraction of the mean (LayerNorm), it computes ``weight * P x / scale(x) + bias``, and for a fixed scale this is
affine. `P`, weight, bias and scale are derived from the module's answers to a few inputs and not from its attributes,
so that ``1 + weight`` and other conventions need no table; the derived map must then reproduce the module's output on
every row that it is used for, and a module that is no such norm is refused.

Linear modules are called, and differentiated with respect to their input: that is exact for a linear map and covers
Conv1D, biases and LoRA layers alike. Parameters are widened to float64 for the call where they are ordinary floating
point numbers, so that half precision does not round what is computed here. The modules stay as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from activations.errors import ModelError

if TYPE_CHECKING:
    from activations.model import Model

_PLAIN = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_EXACT = 1e-5
"""Allowed between a norm and its derived map, relative to the row; many norms compute in float32 whatever they get."""


def place(module: nn.Module, fallback: torch.device) -> torch.device:
    """The device of a module's parameters."""
    return next((parameter.device for parameter in module.parameters()), fallback)


def precision(device: torch.device) -> torch.dtype:
    """float64 where the device has it."""
    return torch.float32 if device.type == "mps" else torch.float64


def call(module: nn.Module, value: Tensor) -> Tensor:
    """The module's output for a float64 ``value``, its parameters widened where that is possible."""
    state = dict(module.named_parameters()) | dict(module.named_buffers())
    if any(tensor.dtype not in _PLAIN for tensor in state.values() if tensor.numel() > 1):  # quantised
        own = next((tensor.dtype for tensor in module.parameters() if tensor.dtype in _PLAIN), torch.float32)
        made: Tensor = module(value.to(own))
        return made.to(value.dtype)
    wide = {name: tensor.to(value.dtype) if tensor.is_floating_point() else tensor for name, tensor in state.items()}
    made = torch.func.functional_call(module, wide, (value,))
    return made.to(value.dtype)


def pull(module: nn.Module, value: Tensor, direction: Tensor) -> tuple[Tensor, Tensor]:
    """For a linear module: `direction` [row, out] before it, [row, in], and the module's bias [out]."""
    with torch.inference_mode(False), torch.enable_grad():
        given = value.detach().clone().requires_grad_()
        (before,) = torch.autograd.grad(call(module, given), given, direction.detach().clone())
    with torch.no_grad():
        return before, call(module, torch.zeros_like(value[:1]))[0]


def columns(module: nn.Module, width: int, ids: Sequence[int], device: torch.device) -> tuple[Tensor, Tensor]:
    """An unembedding's directions of these tokens [token, d_model], and their biases [token]."""
    own = next((tensor.dtype for tensor in module.parameters() if tensor.dtype in _PLAIN), torch.float32)
    rows = torch.arange(len(ids), device=device)
    tokens = torch.tensor(list(ids), device=device)
    with torch.inference_mode(False), torch.enable_grad():  # in its own precision: it is the largest matrix there is
        nothing = torch.zeros(len(ids), width, device=device, dtype=own, requires_grad=True)
        wanted = module(nothing)[rows, tokens]
        (found,) = torch.autograd.grad(wanted.sum(), nothing)
    return found.to(precision(device)), wanted.detach().to(precision(device))


@dataclass(frozen=True, slots=True)
class FrozenNorm:
    """A norm as ``weight * P x * scale + bias``; `weight` is up to a factor, which `at` finds for each row."""

    name: str
    module: nn.Module
    weight: Tensor
    bias: Tensor
    centred: bool

    @classmethod
    def of(cls, model: Model, name: str) -> FrozenNorm:
        """Derive the map of this module; ModelError where its answers are no norm's."""
        module = model.module(name)
        device = place(module, model.device)
        probe = 1.0 - 2.0 * (torch.arange(model.d_model, device=device, dtype=precision(device)) % 2)
        with torch.no_grad():
            bias, one, shifted = call(module, torch.stack([torch.zeros_like(probe), probe, probe + 1]))
        spread = (one - bias).abs().max()
        centred = bool((one - shifted).abs().max() < 1e-2 * spread)
        found = cls(name, module, torch.ones_like(probe), bias, centred)
        weight = (one - bias) / found._projected(probe)
        if not weight.isfinite().all() or not spread > 0:
            raise ModelError(
                f"{name} of {model.name!r} has no finite output for simple inputs; it is no norm known here"
            )
        return cls(name, module, weight, bias, centred)

    def at(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """The module's output for `rows` [row, d] and each row's frozen scale [row, 1], both verified."""
        with torch.no_grad():
            output = call(self.module, rows)
        wanted, base = output - self.bias, self.weight * self._projected(rows)
        scale = (base * wanted).sum(-1, keepdim=True) / (base * base).sum(-1, keepdim=True).clamp(min=1e-300)
        gap = (scale * base - wanted).abs().amax(-1) / wanted.abs().amax(-1).clamp(min=1e-30)
        if not bool((gap <= _EXACT).all()):
            raise ModelError(
                f"{self.name} is no RMSNorm and no LayerNorm: with its scale frozen it differs by {float(gap.max()):.1e} "
                f"from itself, allowed {_EXACT:.0e}; its input cannot be split into parts, use ablation for this model"
            )
        return output, scale

    def pull(self, direction: Tensor, scale: Tensor) -> Tensor:
        """`direction` [row, d] behind the norm as one before it, at these scales."""
        return self._projected(self.weight * direction) * scale

    def _projected(self, rows: Tensor) -> Tensor:
        return rows - rows.mean(-1, keepdim=True) if self.centred else rows
