"""What can go wrong in this room, as two words.

Every message is one line a user can act on: what happened, the offending value, what is allowed, the next step. A
caller who wants to show errors prints ``str(error)`` and needs no traceback.
"""

from __future__ import annotations


class ModelError(ValueError):
    """A model, tokenizer, adapter, prompt or answer set that cannot be used as asked."""


class StoreError(ValueError):
    """An activation store that cannot be written, resumed or read as asked."""


def one_line(error: BaseException, limit: int = 200) -> str:
    """The text of a foreign error, folded to one line, for use inside one of ours."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= limit else text[: limit - 1] + "…"
