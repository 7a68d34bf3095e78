"""What the model says: ask every row, keep the raw text, read it, score it.

Responses are appended to one file, a batch at a time, and flushed. Which rows share a batch is a function of the prompts
alone, so a resumed run pads and computes exactly as an uninterrupted one. Reading and grading happen afterwards from the
raw text: a better parser needs no model.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from experiments.errors import GateError
from experiments.items import Row, frame
from experiments.rundir import RunDirectory, append_lines, mended, record_of

if TYPE_CHECKING:
    import pandas as pd

    from activations.model import Model
    from activations.prompts import Prompt
    from activations.sampling import Sampling
    from tasks.contracts import Family

Identity = tuple[str, str, str, str]
# What is read of a response.
TEXT_FIELDS = ("arm", "setting", "key", "presentation", "text", "finish_reason")
OTHER_FIELDS = ("prompt_opened_think", "n_prompt_tokens", "n_tokens")


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
    sampling: Sampling | None = None,
    have: Collection[Identity] | None = None,
) -> None:
    """Append the answers of the model as it is now to responses.jsonl; answers already there are kept.

    Args:
        arm: ``base`` or the adapter's name.
        asked: rows, one a prompt.
        done: told the number of rows just finished.
        sampling: None asks greedily.
        have: answers that are there; None looks into the file.
    """
    from activations.batching import batches
    from activations.generation import generate

    if have is None:
        have = {identity(record) for record in responses(run)}
    names = [] if sampling is None else [(arm, *row.identity) for row in asked]
    for batch in batches([len(prompt.ids) for prompt in prompts], batch_tokens):
        missing = [index for index in batch if (arm, *asked[index].identity) not in have]
        if missing:
            # The whole batch again: another composition could round differently.
            answered = {}
            for part in generate(
                model,
                [prompts[i] for i in batch],
                max_tokens=max_tokens,
                batch_tokens=batch_tokens,
                sampling=sampling,
                names=[names[i] for i in batch] if names else (),
            ):
                answered.update({batch[place]: generated for place, generated in part})
            append_lines(run.responses, [_line(arm, asked[i], prompts[i], answered[i]) for i in missing])
        done(len(batch))


def responses(run: RunDirectory) -> list[dict[str, Any]]:
    """All whole records of responses.jsonl.

    Raises:
        RunError: a line is damaged.
    """
    mend(run)
    return _read(run)


def responses_of(run: RunDirectory, setting: str) -> list[dict[str, Any]]:
    """The records of one setting; the file is read through, but only these are kept.

    Raises:
        RunError: a line is damaged.
    """
    # Model text could hold the marker too, in a record of another setting.
    found = _read(run, marker=f'"setting": {json.dumps(setting)}'.encode())
    return [record for record in found if record["setting"] == setting]


def _read(run: RunDirectory, marker: bytes = b"") -> list[dict[str, Any]]:
    if not run.responses.exists():
        return []
    with run.responses.open("rb") as file:
        return [
            record_of(run.responses, number, line, keys=OTHER_FIELDS, words=TEXT_FIELDS,
                      advice="delete the line, and the same command asks that prompt again")
            for number, line in enumerate(file, 1)
            if marker in line
        ]  # fmt: skip


def mend(run: RunDirectory) -> None:
    """Cut off a last line that a kill left without its end."""
    if run.responses.exists():
        mended(run.responses)


def table(
    given: Mapping[Identity, Mapping[str, Any]], family: Family, asked: Sequence[Row], arms: Sequence[str]
) -> pd.DataFrame:
    """The behaviour table: one row an arm and presentation, with raw text, status, rule, answer and correctness.

    ``answer`` is missing where the text could not be read; ``correct`` is then False.

    Args:
        given: the responses, see ``by_identity``.
    """
    import pandas as pd

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


def by_identity(records: Iterable[dict[str, Any]]) -> dict[Identity, dict[str, Any]]:
    """Responses by arm, setting, instance key and presentation."""
    return {identity(record): record for record in records}


def gate(results: Mapping[str, Any], max_unparsed: float) -> None:
    """Refuse results in which too many answers could not be read.

    Raises:
        GateError: in some arm more than ``max_unparsed``; all files are there.
    """
    for arm, found in results["arms"].items():
        unparsed = found["behaviour"]["unparsed"]
        if unparsed["value"] > max_unparsed:
            raise GateError(
                f"{unparsed['count']} of {unparsed['n']} answers of {arm} could not be read (max_unparsed {max_unparsed}): "
                "look at responses.jsonl; raise max_tokens or max_unparsed"
            )


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


def identity(record: Mapping[str, Any]) -> Identity:
    """What names one response: arm, setting, instance key, presentation."""
    return record["arm"], record["setting"], record["key"], record["presentation"]
