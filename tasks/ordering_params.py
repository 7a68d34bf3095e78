"""What can be asked of the ordering family: its parameters, their defaults, and what is refused.

Everything is checked before the first item is drawn, so that a study of hours does not end at a size that its pool of
names can't fill. An option that would have no effect (``rho`` without distractors) is an error, not ignored.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from tasks import names as name_pools
from tasks.contracts import Parameter, TaskError
from tasks.ordering_text import PRESENTATIONS, RENDERINGS
from tasks.prompts import INSTRUCTIONS, instruction
from tasks.relations import Relation, apart, catalog, relation_named

PROTOCOLS = ("P", "L")
NAMES_ORDERS = ("shuffled", "chain")
PEOPLE = ("census", "builtin")
POOLS = ("default", *PEOPLE, "random", "objects")
LARGEST = 4096
DEFAULT_RHO = 1.0
LARGEST_RHO = 1_000


@dataclass(frozen=True, slots=True, kw_only=True)
class OrderingParams:
    """Parameters of ordering; see ``parameters`` for what each allows."""

    n: int = 8
    relation: str = "front_behind"
    protocol: str = "P"
    names: str | tuple[str, ...] = "default"
    names_order: str = "shuffled"
    presentations: tuple[str, ...] = ("original", "equivalent")
    rho: float | None = None
    prompt: str = "direct"

    def vocabulary(self) -> Relation:
        return relation_named(self.relation)

    def source(self) -> str | tuple[str, ...]:
        """Where names come from, the relation's own pool spelled out: it decides the latent, the relation does not."""
        if self.names != "default":
            return self.names
        return "objects" if self.vocabulary().entities == "objects" else "census"

    def pool(self) -> tuple[str, ...] | None:
        """The names to draw from; None for random strings, which have no list."""
        source = self.source()
        if not isinstance(source, str):
            return source
        if source == "random":
            return None
        return {"census": name_pools.census, "objects": name_pools.objects}.get(source, lambda: name_pools.BUILTIN)()

    def distractors(self) -> int:
        """Number of irrelevant premises; Python's ``round`` takes a half to the even neighbour."""
        return 0 if self.rho is None else round(self.rho * (self.n - 1))


def parameters() -> tuple[Parameter, ...]:
    """The parameters as ``probe families`` lists them."""
    default = OrderingParams()
    groups = {"catalog": catalog(), **apart()}
    named = "; ".join(f"{group}: {', '.join(found)}" for group, found in groups.items())
    return (
        Parameter("n", default.n, f"an integer from 2 to {LARGEST}, at most the size of the name pool", None,
                  "number of entities in the order"),
        Parameter("relation", default.relation, f"one of {named}; or path/to/file.toml:name", catalog(),
                  "vocabulary of the comparisons", other_choices=apart()),
        Parameter("protocol", default.protocol, "P or L", PROTOCOLS,
                  "which premises are re-worded: P uniform over the chain, L its last ones"),
        Parameter("names", default.names, f"{', '.join(POOLS)}, or a list of names", POOLS,
                  "pool that names are drawn from; default is the relation's own", takes_list=True),
        Parameter("names_order", default.names_order, "shuffled or chain", NAMES_ORDERS,
                  "order of the names line; chain gives the answer away and is for controls"),
        Parameter("presentations", list(default.presentations),
                  f"'original' first, then any of {', '.join(PRESENTATIONS[1:])}, each once", PRESENTATIONS,
                  "renderings of each instance", takes_list=True),
        Parameter("rho", default.rho, f"a number from 0 to {LARGEST_RHO}, for distracted kinds only, which take "
                  f"{DEFAULT_RHO} without it", None, "irrelevant premises for each relevant one"),
        Parameter("prompt", default.prompt, " or ".join(INSTRUCTIONS), tuple(INSTRUCTIONS),
                  "answer at once, or reason first and answer on a marked last line"),
    )  # fmt: skip


def checked(params: Mapping[str, Any]) -> OrderingParams:
    """All parameters, defaults filled in.

    Raises:
        TaskError: a bad one, named with what is allowed.
    """
    known = tuple(asdict(OrderingParams()))
    for key in params:
        if key not in known:
            raise TaskError(f"ordering has no parameter {key!r}: choose from {', '.join(sorted(known))}")
    given = dict(params)
    for key in ("names", "presentations"):
        if isinstance(given.get(key), list):
            given[key] = tuple(given[key])
    if isinstance(given.get("presentations"), str):
        given["presentations"] = (given["presentations"],)
    n = given.get("n", OrderingParams().n)
    if isinstance(n, bool) or not isinstance(n, int) or not 2 <= n <= LARGEST:
        raise TaskError(f"n is {n!r}: give an integer from 2 to {LARGEST}")
    found = OrderingParams(**given)
    relation = found.vocabulary()
    _check_choice("protocol", found.protocol, PROTOCOLS)
    _check_choice("names_order", found.names_order, NAMES_ORDERS)
    instruction(found.prompt)
    _check_presentations(found.presentations)
    distracted = any(RENDERINGS[kind].distracted for kind in found.presentations)
    _check_rho(found.rho, distracted=distracted)
    if distracted:
        given["rho"] = DEFAULT_RHO if found.rho is None else float(found.rho)
        found = OrderingParams(**given)
        if not found.distractors():
            raise TaskError(
                f"rho is {found.rho} at n={n}: that rounds to no distractor; raise rho or leave out the distracted kinds"
            )
    _check_names(found, relation)
    _check_size(found)
    return found


def as_values(params: OrderingParams) -> dict[str, Any]:
    """The parameters as JSON values."""
    return {key: list(value) if isinstance(value, tuple) else value for key, value in asdict(params).items()}


def _check_choice(key: str, value: Any, allowed: tuple[str, ...]) -> None:
    if not isinstance(value, str) or value not in allowed:
        raise TaskError(f"{key} is {value!r}: choose {' or '.join(allowed)}")


def _check_presentations(kinds: Any) -> None:
    if not kinds or not isinstance(kinds, tuple):
        raise TaskError(f"presentations is {kinds!r}: give a list of {', '.join(PRESENTATIONS)}")
    for kind in kinds:
        if not isinstance(kind, str) or kind not in PRESENTATIONS:
            raise TaskError(f"unknown presentation {kind!r}: choose from {', '.join(PRESENTATIONS)}")
    if kinds[0] != "original" or len(set(kinds)) != len(kinds):
        raise TaskError(f"presentations is {', '.join(kinds)}: 'original' comes first and none stands twice")


def _check_rho(rho: Any, *, distracted: bool) -> None:
    if rho is None:
        return
    if isinstance(rho, bool) or not isinstance(rho, (int, float)) or not 0 <= rho <= LARGEST_RHO:
        raise TaskError(f"rho is {rho!r}: give a number from 0 to {LARGEST_RHO}, distractor premises for each premise")
    if not distracted:
        raise TaskError(
            f"rho is {rho!r} but no presentation has distractors: add distracted to presentations, or leave rho out"
        )


def _check_names(params: OrderingParams, relation: Relation) -> None:
    names = params.names
    if isinstance(names, str):
        if names not in POOLS:
            raise TaskError(f"unknown name pool {names!r}: choose {', '.join(POOLS)}, or give a list of names")
        people = relation.entities == "people"
        if (names in PEOPLE and not people) or (names == "objects" and people):
            fitting = [*(PEOPLE if people else ("objects",)), "random"]
            raise TaskError(
                f"names is {names!r} but relation {params.relation!r} is about {relation.entities}: "
                f"choose default, {', '.join(fitting)}, or give a list of names"
            )
        return
    if not isinstance(names, tuple):
        raise TaskError(f"names is {names!r}: choose {', '.join(POOLS)}, or give a list of names")
    words = set(re.findall(r"\w+", " ".join(relation.forms().values()).lower())) - {"x", "y"} | {"is", "yes", "no"}
    for value in names:
        # Letters only: the solver reads names back from the text, and a name must not look like a phrase.
        if not isinstance(value, str) or not value.isalpha() or value.lower() in {"is", "yes", "no"}:
            raise TaskError(f"bad name {value!r} in names: a name is one word of letters, not is, yes or no")
        if value.lower() in words:
            raise TaskError(f"bad name {value!r} in names: relation {params.relation!r} uses this word, take another")
    if len(set(names)) != len(names):
        twice = next(value for value in names if names.count(value) > 1)
        raise TaskError(f"name {twice!r} stands twice in names: each name may occur once")


def _check_size(params: OrderingParams) -> None:
    pool, extra = params.pool(), params.distractors()
    size = name_pools.RANDOM_LIMIT if pool is None else len(pool)
    needed = params.n + (extra + 1 if extra else 0)
    if needed <= size:
        return
    source = params.source()
    called = f"the {source} pool" if isinstance(source, str) else "the list in names"
    larger = "" if source == "random" else ", or use names=random"
    if params.n > size:
        wider = " or names=census" if source == "builtin" else ""
        raise TaskError(f"n is {params.n} but {called} has {size} names: lower n{larger}{wider}")
    raise TaskError(
        f"n is {params.n} and rho is {params.rho}, which needs {needed} names, but {called} has {size} names: "
        f"lower n or rho{larger}"
    )
