"""The same activations by three libraries: one protocol, so that one plan can run through each of them.

Problem. A number from one library's hooks is only as good as that library. TransformerLens and nnsight run the same
weights by machinery of their own; if all three give the same rows, neither hooks nor positions nor padding are at
fault. But both change what they are given (attention implementation, padding side, module tree), each names the
tensors in its own way, and neither has them all.

Mechanism. A backend is opened on a loaded model and gives a session; a session runs prompts and returns rows::

    from activations.backends import backend

    with backend("nnsight").open(model) as session:        # the adapter in use now is the one that counts
        session.refuse([("z", 3)])                         # ModelError with the reason if it cannot
        rows = session.run(prompts, [("resid_post", 3), ("z", 3)], logits=True)
        rows.activations["z", 3]                           # [row, width], in prompt order
        rows.logits                                        # [row, vocabulary], or None

`hf` watches the caller's network with hooks that are gone after each run, in one padded batch. The others get deep
copies of network and tokenizer, made once a session, and run prompts of equal length together, unpadded: their numbers
check our padding too. `columns` asks for other token indices than the answer position, for each prompt its own.

Constraints. A session holds memory for a second network until it is closed. Switching the adapter while it is open is
an error, because the copy would not notice. A site, layer or adapter that a library cannot give is refused with the
reason and never computed some other way.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Protocol

from activations.errors import ModelError

if TYPE_CHECKING:
    from torch import Tensor

    from activations.model import Model
    from activations.prompts import Prompt
    from activations.sites import Where

NAMES = ("hf", "transformer_lens", "nnsight")
PEERS = NAMES[1:]
"""The libraries that ours is compared with."""


@dataclass(frozen=True, slots=True)
class Rows:
    """What one run gives, on the model's device and in its precision; rows in prompt order, then in column order."""

    activations: dict[Where, Tensor]
    logits: Tensor | None


class Session(Protocol):
    """An open backend."""

    def refusal(self, where: Where) -> str | None:
        """Why this backend cannot give this tensor of this model; None if it can."""

    def refuse(self, places: Iterable[Where]) -> None:
        """ModelError for the first place that cannot be given."""

    def run(
        self,
        prompts: Sequence[Prompt],
        places: Iterable[Where],
        *,
        logits: bool = False,
        columns: Sequence[Sequence[int]] | None = None,
    ) -> Rows:
        """The rows of these tensors. ``columns`` names token indices for each prompt; default: the answer position."""


@dataclass(frozen=True, slots=True)
class Backend:
    """A library that can run a model: its name, and how to open it."""

    name: str
    open: Callable[[Model], AbstractContextManager[Session]]


def backend(name: str) -> Backend:
    """The backend of this name; ModelError if there is none or its library is not installed."""
    if name not in NAMES:
        raise ModelError(f"no backend {name!r}; use {', '.join(NAMES)}")
    if name != "hf" and importlib.util.find_spec(name) is None:
        raise ModelError(f"library {name!r} is not installed; run: pip install {name.replace('_', '-')}, or use hf")
    return Backend(name, import_module(f"activations.backends.{name}").opened)


def named(text: str) -> tuple[str, ...]:
    """The libraries to compare with: ``all``, or names with commas; ``hf`` itself is always the other side."""
    wanted = [part.strip() for part in text.split(",") if part.strip()]
    if wanted == ["all"]:
        return PEERS
    if not wanted or not set(wanted) <= set(NAMES):
        raise ModelError(f"backends are {text!r}; give all, or one or more of {', '.join(NAMES)} with commas")
    return tuple(name for name in dict.fromkeys(wanted) if name != "hf")
