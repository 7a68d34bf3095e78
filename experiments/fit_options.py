"""What `probe fit` is asked to do, before a store is opened: flags, their defaults, and what can't apply.

Options about probes are those of a run's configuration, checked by it; only the message names flags instead of keys.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from experiments.config import Config, load_as
from experiments.errors import UsageError
from experiments.items import PAIR

PRESENTATION = "presentation"


@dataclass(frozen=True, slots=True)
class Choice:
    """What to fit, checked but for what only the store can tell.

    Attributes:
        layers: None for all that the store has of the site.
        train: presentations that are trained on.
        read: presentations that the same probes are read on besides.
        config: its ``probe``, ``seed`` and ``resamples`` are used.
    """

    target: str
    site: str
    layers: tuple[int, ...] | None
    position: str
    train: tuple[str, ...]
    read: tuple[str, ...]
    config: Config


def choice(
    *,
    target: str,
    site: str,
    layers: tuple[int, ...] | None,
    position: str,
    train: tuple[str, ...] | None,
    read: tuple[str, ...] | None,
    probe: Mapping[str, Any],
    seed: str | None,
    resamples: str | None,
) -> Choice:
    """Options as flags give them, with defaults.

    Raises:
        UsageError: a bad one, or one that can't apply.
    """
    given = {name: value for name, value in probe.items() if value is not None}
    try:
        config = load_as(Config, None, [], {"probe": given, "seed": seed, "resamples": resamples})
    except UsageError as error:
        raise as_flags(error) from None
    for name, value in (("train", train), ("read", read), ("layers", layers)):
        if value == ():
            raise UsageError(f"--{name} is empty: name one, or leave it out")
        if value is not None and len(set(value)) != len(value):
            raise UsageError(f"--{name} is {', '.join(map(str, value))}: name none twice")
    if target == PRESENTATION:
        if read is not None:
            raise UsageError(
                f"--read is {', '.join(read)} but --target is presentation, whose rows are all presentations: leave it out"
            )
        if train is not None and len(train) != 2:
            raise UsageError(
                f"--train is {', '.join(train)} but --target is presentation, which tells two apart: name two"
            )
        train = train or PAIR
    train, read = train or PAIR[:1], read or ()
    if both := set(train) & set(read):
        raise UsageError(
            f"--read is {', '.join(read)} and --train {', '.join(train)}: {', '.join(sorted(both))} is trained on and read "
            "held out already, leave it out of --read"
        )
    return Choice(target, site, layers, position, train, read, config)


def as_flags(error: UsageError) -> UsageError:
    """The same message with keys of a run's configuration as flags of this command."""
    said = str(error).replace("--set probe.", "probe.")
    said = re.sub(r"\bprobe\.([a-z_]+)(?:\.\d+)?", lambda match: f"--{match[1].replace('_', '-')}", said)
    return UsageError(re.sub(r"^(seed|resamples)\b", r"--\1", said))
