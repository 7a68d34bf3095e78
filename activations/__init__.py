"""What is inside a model while it answers.

The room in five lines::

    from activations import answer_tokens, load, read

    model = load("smollm2", adapters=["path/to/adapter"])      # any Hugging Face causal language model, folder or .gguf
    prompts = model.encode([[{"role": "user", "content": "Is Amy taller than Bob? Answer Yes or No."}]])
    answers = answer_tokens(model, {"yes": ("Yes", "yes"), "no": ("No", "no")})
    with model.use("adapter"):                                 # the same weights, the adapter switched on
        print(read(model, prompts, answers).difference)        # logit(yes) - logit(no) at the answer position

Three ideas carry it. Structure is *discovered*: the blocks, the projection that writes attention into the residual
stream, the heads, the last norm and the unembedding are found by watching a forward pass, then checked numerically, so
that a new architecture needs no table entry (``structure.py``). Weights stay as they are: nothing is folded, centred
or merged, and adapters are switched in place on one loaded base (``adapters.py``). Every number has a check: padded
equals single, lens at the last layer equals the logits, hooks change nothing (``checks.py``).

Names are imported on first use, so that ``import activations`` does not import torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

_HOME = {
    "ActivationStore": "store",
    "AnswerTokens": "readout",
    "Check": "checks",
    "Generated": "generation",
    "Model": "model",
    "ModelError": "errors",
    "Plan": "capturing",
    "Prompt": "prompts",
    "Readout": "readout",
    "StoreError": "errors",
    "Structure": "structure",
    "answer_tokens": "readout",
    "batches": "batching",
    "capture": "capturing",
    "check": "checks",
    "from_modules": "model",
    "generate": "generation",
    "load": "model",
    "pad": "batching",
    "read": "readout",
}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'activations' has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(import_module(f"activations.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return __all__
