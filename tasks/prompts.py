"""What a model is told to do with a yes/no question.

Two ways to ask. ``direct`` wants the label alone, so the next token after the prompt is the answer and a readout there
means something. ``reasoning`` lets the model think first and asks for the answer on a marked last line; the answer
position is then somewhere in the response, and only its text can be scored.
"""

from __future__ import annotations

from tasks.contracts import TaskError

INSTRUCTIONS = {
    "direct": "Answer with Yes or No only.",
    "reasoning": (
        "Think step by step. Then give the answer on a last line of its own, written as 'Answer: Yes' or 'Answer: No'."
    ),
}


def instruction(prompt: str) -> str:
    """The sentence that ends a prompt of this kind.

    Raises:
        TaskError: no such kind.
    """
    try:
        return INSTRUCTIONS[prompt]
    except (KeyError, TypeError):
        raise TaskError(f"prompt is {prompt!r}: choose {' or '.join(INSTRUCTIONS)}") from None
