"""What the model says: ask every row, keep the raw text, read it, score it.

Responses are appended to one file, a batch at a time, and flushed. Which rows share a batch is a function of the prompts
alone, so a resumed run pads and computes exactly as an uninterrupted one. Reading and grading happen afterwards from the
raw text: a better parser needs no model.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from experiments.items import Row, frame
from experiments.rundir import RunDirectory, append_lines

if TYPE_CHECKING:
    import pandas as pd

    from activations.model import Model
    from activations.prompts import Prompt
    from tasks.contracts import Family

Identity = tuple[str, str, str, str]


def ask(
    run: RunDirectory,
    model: Model,
    arm: str,
    asked: Sequence[Row],
    prompts: Sequence[Prompt],
    *,
    max_tokens: int,
    batch_tokens: int,
    done: Callable[[int], None],
) -> None:
    """Append the greedy answers of the model as it is now to responses.jsonl; answers already there are kept.

    Args:
        arm: ``base`` or the adapter's name.
        asked: rows, one a prompt.
        done: told the number of rows just finished.
    """
    from activations.batching import batches
    from activations.generation import generate

    have = {_identity(record) for record in responses(run)}
    for batch in batches([len(prompt.ids) for prompt in prompts], batch_tokens):
        missing = [index for index in batch if (arm, *asked[index].identity) not in have]
        if missing:
            # The whole batch again: another composition could round differently.
            answered = {}
            for part in generate(model, [prompts[i] for i in batch], max_tokens=max_tokens, batch_tokens=batch_tokens):
                answered.update({batch[place]: generated for place, generated in part})
            append_lines(run.responses, [_line(arm, asked[i], prompts[i], answered[i]) for i in missing])
        done(len(batch))


def responses(run: RunDirectory) -> list[dict[str, Any]]:
    """All whole records of responses.jsonl."""
    return run.read_records(run.responses)


def table(run: RunDirectory, family: Family, asked: Sequence[Row], arms: Sequence[str]) -> pd.DataFrame:
    """The behaviour table: one row an arm and presentation, with raw text, status, rule, answer and correctness.

    ``answer`` is missing where the text could not be read; ``correct`` is then False.
    """
    import pandas as pd

    given = {_identity(record): record for record in responses(run)}
    base = frame(asked)
    parts = []
    for arm in arms:
        records = [given[(arm, *row.identity)] for row in asked]
        parsed = [
            family.parse(
                record["text"],
                row.presentation,
                finish_reason=record["finish_reason"],
                prompt_opened_think=record["prompt_opened_think"],
            )
            for record, row in zip(records, asked, strict=True)
        ]
        grades = [family.grade(one, row.presentation) for one, row in zip(parsed, asked, strict=True)]
        part = base.assign(
            # A table is UTF-8; half a character from a cut token sequence is not.
            text=[record["text"].encode("utf-8", "backslashreplace").decode() for record in records],
            finish_reason=[record["finish_reason"] for record in records],
            n_prompt_tokens=[record["n_prompt_tokens"] for record in records],
            n_tokens=[record["n_tokens"] for record in records],
            status=[one.status for one in parsed],
            rule=[one.rule for one in parsed],
            answer=pd.array([one.value for one in parsed], dtype="string"),
            correct=[grade.correct for grade in grades],
        )
        part.insert(0, "arm", arm)
        parts.append(part)
    return pd.concat(parts, ignore_index=True)


def _line(arm: str, row: Row, prompt: Prompt, generated: Any) -> str:
    setting, key, presentation = row.identity
    record = {
        "arm": arm,
        "setting": setting,
        "key": key,
        "presentation": presentation,
        "text": generated.text,
        "finish_reason": generated.finish_reason,
        "prompt_opened_think": prompt.text.rstrip().endswith(("<think>", "<thinking>", "<reasoning>")),
        "n_prompt_tokens": generated.n_prompt_tokens,
        "n_tokens": generated.n_tokens,
        "status": "answered",
        "attempt": 1,
    }
    return json.dumps(record) + "\n"


def _identity(record: dict[str, Any]) -> Identity:
    return record["arm"], record["setting"], record["key"], record["presentation"]
