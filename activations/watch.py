"""One forward pass, watched.

The smallest hook vocabulary this package needs, and a run that keeps what every module received and returned.

Hooks are owned: they are registered inside ``with hooks([...])`` and gone afterwards, also when an exception passes
through; hooks that others have put on the model stay. A hook that only looks must return None, since PyTorch takes any
other return value as the module's new output, silently.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from activations.batching import Padded, forward_arguments
from activations.errors import ModelError, one_line


def first(output: Any) -> Any:
    """The hidden state in a module's output, a tensor in some versions of transformers and a tuple in others."""
    return output[0] if isinstance(output, (tuple, list)) else output


def hidden_argument(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """The hidden state a block was called with, given by position or as ``hidden_states``."""
    value = args[0] if args else kwargs.get("hidden_states")
    if not isinstance(value, Tensor):
        raise ModelError("a block was called without a hidden state; this model's forward is not supported")
    return value


def replace_hidden(
    args: tuple[Any, ...], kwargs: dict[str, Any], value: Tensor
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The same call with another hidden state; what a pre-hook with kwargs returns."""
    return ((value, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": value})


@contextmanager
def hooks(handles: list[Any]) -> Iterator[list[Any]]:
    """Own hook handles: all are removed on the way out, also after an exception; nobody else's are touched."""
    try:
        yield handles
    finally:
        for handle in handles:
            handle.remove()


class AttentionWatch(TorchFunctionMode):
    """Notes each attention operation: (number of heads, width of a head's value or None), under the block running.

    Where attention is written out, the heads are counted at the softmax and the width is read at the product of the
    weights with the values, the first product afterwards that has the heads' shape.
    """

    def __init__(self, length: int) -> None:
        super().__init__()
        self.length = length
        self.block: str | None = None
        self.seen: dict[str, list[tuple[int, int | None]]] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if self.block is not None and isinstance(result, Tensor) and result.ndim == 4:
            name = getattr(func, "__name__", "")
            if name == "scaled_dot_product_attention":
                self.seen.setdefault(self.block, []).append((result.shape[1], result.shape[-1]))
            elif name == "softmax" and result.shape[-2] == self.length and result.shape[-1] >= self.length:
                self.seen.setdefault(self.block, []).append((result.shape[1], None))
            elif "matmul" in name and (noted := self.seen.get(self.block)):
                heads, width = noted[-1]
                if width is None and result.shape[1:3] == (heads, self.length):
                    noted[-1] = heads, result.shape[-1]
        return result


class Run:
    """One forward pass with every module's first tensor input and output kept, in order of completion."""

    def __init__(
        self,
        hf_model: nn.Module,
        ids: Tensor,
        names: dict[nn.Module, str],
        *,
        blocks: list[str] | None = None,
        anchors: list[Tensor] | None = None,
    ) -> None:
        self.ids = ids
        self.order: list[str] = []
        self.inputs: dict[str, Tensor] = {}
        self.outputs: dict[str, Tensor] = {}
        self.calls: dict[str, int] = {}
        self.watch = AttentionWatch(ids.shape[-1])
        members = {
            f"{name}.{i}" for name, m in hf_model.named_modules() if isinstance(m, nn.ModuleList) for i in range(len(m))
        }
        handles: list[Any] = []

        def note_start(name: str) -> Any:
            def before(module: nn.Module, args: Any) -> None:
                self.watch.block = name

            return before

        def force(anchor: Tensor) -> Any:
            def before(module: nn.Module, args: Any, kwargs: Any) -> Any:
                value = hidden_argument(args, kwargs).clone()
                value[:, -1:] = anchor.to(value.device)
                return replace_hidden(args, kwargs, value)

            return before

        def note_end(name: str) -> Any:
            def after(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
                self.order.append(name)
                self.calls[name] = self.calls.get(name, 0) + 1
                given = args[0] if args else kwargs.get("hidden_states")
                if isinstance(given, Tensor):
                    self.inputs[name] = given.detach().to("cpu", copy=True)
                if isinstance(first(output), Tensor):
                    self.outputs[name] = first(output).detach().to("cpu", copy=True)

            return after

        with hooks(handles), torch.inference_mode(), self.watch:
            for name, module_anchor in zip(blocks or [], anchors or [], strict=True):
                module = hf_model.get_submodule(name)
                handles.append(module.register_forward_pre_hook(force(module_anchor), with_kwargs=True))
            for module, name in names.items():
                if name in members:
                    handles.append(module.register_forward_pre_hook(note_start(name)))
                if name:
                    handles.append(module.register_forward_hook(note_end(name), with_kwargs=True))
            try:
                self.logits = plain_forward(hf_model, ids).logits.cpu()
            except (TypeError, RuntimeError, ValueError, AttributeError, KeyError, IndexError) as error:
                raise ModelError(
                    f"{type(hf_model).__name__} does not run as a causal language model: {one_line(error)}; "
                    "give a text-only causal language model"
                ) from error


def plain_forward(hf_model: Any, ids: Tensor) -> Any:
    """An unpadded forward pass with explicit mask and positions and no key-value cache."""
    mask = torch.ones_like(ids)
    return hf_model(**forward_arguments(hf_model, Padded(ids, mask, mask.cumsum(-1) - 1)))
