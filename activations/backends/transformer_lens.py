"""TransformerLens: its TransformerBridge around a copy of the network.

TransformerLens names every tensor alike in all models (`blocks.3.hook_resid_post`), which is where this package's site
names come from. Boot switches the network to eager attention, reads the tokenizer again from a folder, and puts its own
modules in place of the network's; hence the copies.

What it cannot do is found out, not assumed. A network that it does not know, or fails to run, is refused. A hook that
the bridge has no point for (the heads of linear attention, the middle of a parallel block) is refused by name. And
where it takes weights apart, as the joint query-key-value of GPT-2, it leaves the layer itself out, with any adapter on
it: one short prompt is run through both networks, and a layer with an adapter that ran in ours and not in the bridge is
the reason for a refusal.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from activations import adapters
from activations.backends.common import Base, copies, picked, unpadded
from activations.errors import ModelError, one_line
from activations.watch import hooks, plain_forward

if TYPE_CHECKING:
    from activations.model import Model
    from activations.prompts import Prompt
    from activations.sites import Where

POINTS = {
    "embed": ("hook_resid_pre",),
    "resid_pre": ("hook_resid_pre",),
    "resid_mid": ("hook_resid_mid",),
    "resid_post": ("hook_resid_post",),
    "attn_out": ("hook_attn_out", "linear_attn.hook_out"),
    "mlp_out": ("hook_mlp_out",),
    "z": ("attn.hook_z",),
}
"""Our site to the names inside TransformerLens' ``blocks.N``; of several the one that the layer has."""


@contextmanager
def opened(model: Model) -> Iterator[Bridged]:
    """A session on a bridge, or ModelError with the reason why there is none."""
    session = Bridged(model)
    try:
        yield session
    finally:
        session.close()


class Bridged(Base):
    """Runs through ``TransformerBridge.run_with_hooks``."""

    name = "transformer_lens"

    def __init__(self, model: Model) -> None:
        super().__init__(model)
        network, tokenizer = copies(model)
        layers = [(name, layer) for name, layer in adapters.layers(network) if model.active is not None]
        ours = _ran(layers, lambda: plain_forward(network, self._probe())) if layers else set()
        try:
            self.bridge: Any = _boot(model, network, tokenizer)
            theirs = _ran(layers, lambda: self._call(self._probe(), []))
        except Exception as error:  # the library raises what it likes for a network it does not know
            raise ModelError(
                f"TransformerLens cannot run {type(network).__name__} ({one_line(error, 120)}); use backend hf or nnsight"
            ) from error
        if missed := [name for name in ours if name not in theirs]:
            raise ModelError(
                f"backend transformer_lens leaves out adapter {model.active!r} on {missed[0]} ({len(missed)} such), "
                "because it takes that layer's weights apart; use backend hf or nnsight with this adapter"
            )

    def close(self) -> None:
        """Let the copy go."""
        self.bridge = None

    def refusal(self, where: Where) -> str | None:
        """As for every backend; and where the bridge has no hook point of that meaning."""
        if reason := super().refusal(where):
            return reason
        return None if self._point(where) else f"TransformerLens has no {POINTS[where[0]][0]} in this block"

    def forward(
        self, prompts: Sequence[Prompt], places: Sequence[Where], columns: Sequence[Sequence[int]], logits: bool
    ) -> tuple[dict[Where, Tensor], Tensor | None]:
        """Prompts of one length, unpadded."""
        kept: dict[Where, Tensor] = {}

        def keep(where: Where) -> Any:
            def at(value: Tensor, hook: Any) -> None:
                kept[where] = picked(value, columns)

            return at

        ids, _ = unpadded(self.model, prompts)
        out = self._call(ids, [(self._point(where), keep(where)) for where in places])
        if lacking := [where for where in places if where not in kept]:
            raise ModelError(
                f"TransformerLens ran {self.model.name!r} without its hook {self._point(lacking[0])}; leave "
                f"{lacking[0][0]} out, or use backend hf"
            )
        return kept, picked(out, columns) if logits else None

    def _point(self, where: Where) -> str | None:
        names = [f"blocks.{where[1]}.{point}" for point in POINTS[where[0]]]
        return next((name for name in names if name in self.bridge.hook_dict), None)

    def _call(self, ids: Tensor, points: list[Any]) -> Tensor:
        with torch.inference_mode():
            out: Tensor = self.bridge.run_with_hooks(
                ids, attention_mask=torch.ones_like(ids), fwd_hooks=points, use_cache=False
            )
        return out

    def _probe(self) -> Tensor:
        return torch.tensor([[(3 + 7 * column) % self.model.d_vocab for column in range(6)]], device=self.model.device)


def _boot(model: Model, network: Any, tokenizer: Any) -> Any:
    from transformer_lens.model_bridge import TransformerBridge

    network.config.architectures = network.config.architectures or [type(network).__name__]
    with tempfile.TemporaryDirectory() as folder:  # the bridge reads its tokenizer again, from a folder or the hub
        tokenizer.save_pretrained(folder)
        tokenizer = type(tokenizer).from_pretrained(folder)
        return TransformerBridge.boot_transformers(
            model.name, hf_model=network, tokenizer=tokenizer, dtype=model.dtype, device=str(model.device)
        )


def _ran(layers: list[tuple[str, Any]], call: Any) -> set[str]:
    """Which of these layers took part in a forward pass."""
    seen: set[str] = set()
    handles = [layer.register_forward_pre_hook(lambda *_, name=name: seen.add(name)) for name, layer in layers]
    with hooks(handles), torch.inference_mode():
        call()
    return seen
