"""One loaded checkpoint: modules, tokenizer, discovered structure, and the adapters that can be switched on.

``Model`` is a thin handle. It runs nothing by itself except the unembedding; reading, capture, generation and patching
are functions that take it. It never moves, casts or compiles the network, and it leaves the caller's configuration and
tokenizer as they were (padding is done by this package, on ids).

Comparing a base model with its adapters needs one set of base weights. ``with model.use("grpo"):`` switches a LoRA
adapter on in place and restores the previous state on the way out, also after an exception; the base, before and
after, is equal bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from activations import adapters as _adapters
from activations import prompts as _prompts
from activations import replacements, sources
from activations.errors import ModelError
from activations.prompts import Prompt
from activations.readout import AnswerTokens, Readout
from activations.structure import Structure, apply_scale, discover, text_config

_ROWS, _COLUMNS = 2048, 16384
_PLAIN = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class Model:
    """A causal language model that can be looked into. Made by :func:`load` or :func:`from_modules`."""

    def __init__(
        self, hf_model: Any, tokenizer: Any, *, name: str, source: Mapping[str, Any], any_base: bool = False
    ) -> None:
        if hf_model.training:
            raise ModelError(f"model {name!r} is in training mode, where dropout is random; call .eval() on it first")
        if any(_adapters.layers(hf_model)):
            raise ModelError(
                f"model {name!r} carries PEFT layers already; give the base model and the adapter folder apart"
            )
        if any(_is_compiled(module) for module in hf_model.modules()):
            raise ModelError(
                f"model {name!r} is torch.compile'd and would ignore hooks; give the module before compiling"
            )
        self.hf_model = hf_model
        self.tokenizer = tokenizer
        self.name = name
        self.any_base = any_base
        """Attach adapters also where they record another base model."""
        self.known_as = frozenset(source.get("known_as", ()))
        """Names an adapter may record for this base; empty where nothing is known."""
        self.active: str | None = None
        """The adapter switched on, None for the base. Change it with :meth:`use`."""
        self.peft_names: dict[str, str] = {}
        self.replaced: dict[str, tuple[replacements.Replacement, ...]] = {}
        """Whole tensors that an adapter brings, swapped in while it is on."""
        self._slots: list[replacements.Slot] = []
        self.n_parameters: int = sources.n_parameters(hf_model)
        """Parameters of the base model, tied ones once; adapters don't count."""
        self.structure: Structure = discover(hf_model)
        self.identity: dict[str, Any] = {
            "name": name,
            **{key: value for key, value in source.items() if key != "known_as"},
            "adapters": {},
            "template": _prompts.template_hash(tokenizer),
            "dtype": str(self.dtype).removeprefix("torch."),
            "device": self.device.type,
            "attention": str(getattr(hf_model.config, "_attn_implementation", None)),
            "quantization": sources.quantization(hf_model.config),
            "versions": sources.versions(),
        }

    @property
    def device(self) -> torch.device:
        """Where the embedding lives, and so where ids are sent."""
        return next(self.module(self.structure.embedding).parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        return next(self.module(self.structure.embedding).parameters()).dtype

    @property
    def adapter_names(self) -> tuple[str, ...]:
        return tuple(self.identity["adapters"])

    @property
    def n_layers(self) -> int:
        return len(self.structure.blocks)

    @property
    def d_model(self) -> int:
        return self.structure.d_model

    @property
    def d_vocab(self) -> int:
        return int(self._head_weight().shape[0])

    @property
    def context(self) -> int | None:
        """The longest prompt the model reads, where its configuration has a limit."""
        limit = getattr(text_config(self.hf_model.config), "max_position_embeddings", None)
        return int(limit) if limit else None

    @property
    def pad_id(self) -> int:
        """Any valid id: pads are masked."""
        for token in (self.tokenizer.pad_token_id, self.tokenizer.eos_token_id, 0):
            if token is not None and token < self.d_vocab:
                return int(token)
        return 0

    def heads(self, layer: int) -> int | None:
        """Query heads of a layer, cut at the out-projection's input; None if the layer has no head map."""
        return self.structure.heads[layer]

    def module(self, name: str) -> nn.Module:
        """The module that has this name now. Ask at each use: an attached adapter puts a wrapper at the old name."""
        module: nn.Module = self.hf_model.get_submodule(name)
        return module

    def encode(self, messages_list: Sequence[Sequence[Mapping[str, str]]]) -> list[Prompt]:
        """Conversations to prompts, through the tokenizer's chat template; see :mod:`activations.prompts`."""
        return _prompts.encode(self.tokenizer, messages_list, context=self.context)

    def offsets(self, prompt: Prompt) -> list[tuple[int, int]]:
        """For each token the characters of ``prompt.text`` it covers."""
        return _prompts.offsets(self.tokenizer, prompt)

    def attach(self, path: str, *, name: str | None = None, any_base: bool = False) -> str:
        """Attach a LoRA adapter from a folder, switched off; returns the name to ``use`` it by."""
        return _adapters.attach(self, path, name=name, any_base=any_base or self.any_base)

    @contextmanager
    def use(self, adapter: str | None) -> Iterator[Model]:
        """Within the block the named adapter is on (None: the base); the previous state comes back afterwards."""
        if adapter is not None and adapter not in self.adapter_names:
            known = ", ".join(self.adapter_names) or "none attached"
            raise ModelError(
                f"no adapter {adapter!r} on model {self.name!r} (adapters: {known}); give one of these or None"
            )
        previous = self.active
        try:
            self._switch(adapter)
            yield self
        finally:
            self._switch(previous)

    def _switch(self, adapter: str | None) -> None:
        replacements.put_back(self._slots)
        _adapters.switch(self.hf_model, None if adapter is None else self.peft_names[adapter])
        if adapter is not None:
            self._slots = replacements.put(self.hf_model, self.replaced[adapter])
        self.active = adapter

    @torch.inference_mode()
    def unembed(self, resid: Tensor, answers: AnswerTokens) -> Readout:
        """Residual rows ``[row, d_model]`` to answer scores: final norm at each row's own scale, then unembedding.

        Logit scale and softcap follow where the model has them. Everything is float32 (float64 for a float64
        model), also in half precision. Rows and vocabulary are cut into pieces, so memory stays bounded for any number
        of rows; only the wanted tokens, the log-sum-exp and the best token are kept.
        """
        self._check_rows(resid, "unembed")
        parts = [self._unembed(rows, answers) for rows in torch.split(resid, _ROWS)]
        return Readout.join(parts)

    @torch.inference_mode()
    def unembed_ranked(self, resid: Tensor, answers: AnswerTokens) -> tuple[Readout, Tensor]:
        """:meth:`unembed`, with the rank of each label among the whole vocabulary, ``[row, label]``, in the same pass.

        A label ranks where its best variant does: 1 plus the tokens, other than its own variants, with a larger logit.
        """
        self._check_rows(resid, "unembed_ranked")
        parts, ranks = [], []
        for rows in torch.split(resid, _ROWS):
            seen = self.logits_of(rows, torch.tensor([token for variants in answers.ids for token in variants]))
            best = torch.stack([part.amax(-1) for part in torch.split(seen, [*map(len, answers.ids)], dim=-1)], dim=-1)
            above = torch.zeros_like(best, dtype=torch.long)
            parts.append(self._unembed(rows, answers, (best, above)))
            ranks.append(1 + above)
        return Readout.join(parts), torch.cat(ranks)

    @torch.inference_mode()
    def logits(self, resid: Tensor) -> Tensor:
        """The same for whole logit rows ``[row, d_vocab]``: for checks and small tables."""
        return self.logits_of(resid)

    def logits_of(self, resid: Tensor, tokens: Tensor | None = None) -> Tensor:
        """Logits ``[row, token]`` as a differentiable function of ``resid``; of all tokens, or of these ids in this order.

        The model's weights stand still: gradients reach ``resid`` only. The caller cuts rows, since a row of a large
        vocabulary is a megabyte and a graph keeps several.
        """
        self._check_rows(resid, "logits_of")
        wide, head = self._wide(), self.module(self.structure.head)
        if tokens is None:
            return torch.cat([piece for _, piece in self._pieces(resid)], dim=-1)
        chosen = tokens.to(self._head_weight().device)
        if not _is_plain(head):
            return torch.cat([piece for _, piece in self._pieces(resid)], dim=-1)[:, chosen]
        bias = None if head.bias is None else head.bias[chosen].detach().to(wide)
        made = nn.functional.linear(self._normed(resid), head.weight[chosen].detach().to(wide), bias)
        return apply_scale(made, self.structure.logit_scale, self.structure.softcap)

    def _unembed(self, resid: Tensor, answers: AnswerTokens, ranking: tuple[Tensor, Tensor] | None = None) -> Readout:
        """Scores of the rows; ``ranking`` (best logit of each label, tokens above it so far) is counted up in place."""
        place, wide = self._head_weight().device, self._wide()
        wanted = torch.tensor([token for variants in answers.ids for token in variants], device=place)
        columns = torch.zeros(len(resid), len(wanted), device=place, dtype=wide)
        sums, best, top = [], None, None
        for start, piece in self._pieces(resid):
            inside = (wanted >= start) & (wanted < start + piece.shape[-1])
            columns[:, inside] = piece[:, wanted[inside] - start]
            sums.append(piece.logsumexp(-1))
            value, index = piece.max(-1)
            if best is None or top is None:
                best, top = value, index + start
            else:
                top = torch.where(value > best, index + start, top)
                best = torch.maximum(value, best)
            if ranking is not None:
                _count_above(piece, start, answers, *ranking)
        if top is None:
            raise ModelError("the unembedding is empty")
        scores = [
            part.logsumexp(-1) for part in torch.split(columns, [len(variants) for variants in answers.ids], dim=-1)
        ]
        return Readout(torch.stack(scores, dim=-1), torch.stack(sums, dim=-1).logsumexp(-1), top)

    def _pieces(self, resid: Tensor) -> Iterator[tuple[int, Tensor]]:
        """(first token id, logits of a run of token ids), at full precision."""
        wide, normed = self._wide(), self._normed(resid)
        head = self.module(self.structure.head)
        scale, softcap = self.structure.logit_scale, self.structure.softcap
        if not _is_plain(head):
            yield 0, apply_scale(head(normed.to(self.dtype)).to(wide), scale, softcap)
            return
        for start in range(0, head.weight.shape[0], _COLUMNS):
            rows = slice(start, start + _COLUMNS)
            weight = head.weight[rows].detach().to(wide)
            bias = None if head.bias is None else head.bias[rows].detach().to(wide)
            yield start, apply_scale(nn.functional.linear(normed, weight, bias), scale, softcap)

    def _normed(self, resid: Tensor) -> Tensor:
        return _widened(self.module(self.structure.final_norm), resid.to(self._head_weight().device, self._wide()))

    def _check_rows(self, resid: Tensor, caller: str) -> None:
        if resid.ndim != 2 or resid.shape[-1] != self.d_model:
            raise ModelError(f"{caller} takes [row, {self.d_model}], not {list(resid.shape)}; select positions first")

    def _wide(self) -> torch.dtype:
        return torch.float64 if self.dtype == torch.float64 else torch.float32

    def _head_weight(self) -> Tensor:
        head = self.module(self.structure.head)
        return getattr(head, "base_layer", head).weight  # type: ignore[return-value]


def _is_compiled(module: nn.Module) -> bool:
    return type(module).__name__ == "OptimizedModule" or getattr(module, "_compiled_call_impl", None) is not None


def _is_plain(head: nn.Module) -> TypeGuard[nn.Linear]:
    """Whether the unembedding is nothing but its weight; an adapter or quantised weights make it more."""
    return isinstance(head, nn.Linear) and head.weight.dtype in _PLAIN


def _count_above(piece: Tensor, start: int, answers: AnswerTokens, best: Tensor, above: Tensor) -> None:
    """Add to ``above`` ``[row, label]`` the tokens of a piece with a larger logit than the label's best variant."""
    for label, variants in enumerate(answers.ids):
        greater = piece > best[:, label, None]
        # The label's own tokens never stand above it, also where two ways to multiply round its logit differently.
        greater[:, [token - start for token in variants if 0 <= token - start < piece.shape[-1]]] = False
        above[:, label] += greater.sum(-1)


def _widened(module: nn.Module, value: Tensor) -> Tensor:
    """Call a small module with its parameters in the precision of ``value``, the module itself untouched."""
    state = dict(module.named_parameters()) | dict(module.named_buffers())
    widened = {
        name: tensor.detach().to(value.dtype) if tensor.is_floating_point() else tensor
        for name, tensor in state.items()
    }
    result: Tensor = torch.func.functional_call(module, widened, (value,))
    return result


def from_modules(hf_model: Any, tokenizer: Any, *, name: str = "in-memory", adapters: Sequence[str] = ()) -> Model:
    """A model from objects you have, which stay as they are; adapters, if given, are injected into ``hf_model``."""
    model = Model(hf_model, tokenizer, name=name, source=sources.in_memory(hf_model, name))
    for path in adapters:
        model.attach(str(path))
    return model


def load(
    model: str,
    *,
    adapters: Sequence[str] = (),
    device: str = "auto",
    dtype: str = "float32",
    any_base: bool = False,
    trust_remote_code: bool = False,
    verify: bool = True,
) -> Model:
    """Load a hub id, a folder, a ``.gguf`` file, ``smollm2`` or ``builtin``, with adapters attached and switched off.

    ``verify`` runs the load-time self-test (:func:`activations.checks.self_test`) and refuses a model that fails it.
    ``any_base`` attaches adapters also where they record another base model. ``dtype="auto"`` takes the checkpoint's.
    """
    opened = sources.open_model(model, device=device, dtype=dtype, trust_remote_code=trust_remote_code)
    loaded = Model(opened.hf_model, opened.tokenizer, name=opened.name, source=opened.source, any_base=any_base)
    for path in adapters:
        loaded.attach(path)
    if verify:
        from activations.checks import self_test

        self_test(loaded)
    return loaded
