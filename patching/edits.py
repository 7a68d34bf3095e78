"""What is changed in a run: edits, cells, and the refusal of cells that name something the model does not have.

An *edit* changes vectors of one site in one layer. A *cell* is a set of edits made in the same run: one square of a layer
sweep, one head of a head sweep, ten heads that are switched off together, a span and a head at once. An edit says

- **where in the network**: a site under the names of ``activations.sites``. ``resid_pre``, ``resid_mid`` and
  ``resid_post`` are the residual stream before, inside and after a block; ``attn_out`` and ``mlp_out`` what attention
  and MLP add to it; ``z`` the input of the mixer's out-projection, cut into query heads. A head is a slice of *this*
  input. A slice of the projection's output is no head: every head writes all over it.
- **at which tokens**: ``answer`` (the last prompt token), ``all``, ``span:LABEL`` (every token of a span) or ``index:N``
  (from the start of the prompt, negative from its end). An edit at the answer position leaves the prefix alone, which
  makes it cheap; any other changes what later tokens read.
- **how**: ``replace`` by a source, ``add`` a multiple of it, ``project_out`` the component along it, or ``function``.

Order. Edits at different sites happen in the order in which the network passes them. Edits of one vector happen in the
order in which the cell lists them; one that would overwrite an earlier one is refused.

A mistake in a cell must not come back as a number. A layer, site, head, span or donor that does not exist is an error
before the first forward pass, and the message says what would be allowed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from activations.model import Model
    from activations.prompts import Prompt

SITES = ("resid_pre", "resid_mid", "resid_post", "attn_out", "mlp_out", "z")
HOWS = ("replace", "add", "project_out", "function")
ZERO = "zero"
"""The source that needs no donor: the vector is replaced by zeros."""
ANSWER, ALL = "answer", "all"

Spots = Sequence[Mapping[str, Sequence[int]]]
"""For each recipient the token numbers of its spans, by label."""


class PatchError(ValueError):
    """An edit, a donor or a sweep that cannot be done as asked; the message is one line for the user."""


@dataclass(frozen=True, slots=True)
class Edit:
    """Change the vectors of one site and layer at one position.

    Attributes:
        site: ``resid_pre``, ``resid_mid``, ``resid_post``, ``attn_out``, ``mlp_out`` or ``z``.
        layer: block number, from 0.
        head: query head, for ``z`` only. None at ``z`` means every head of the layer.
        source: ``zero``, or the name of a donor (a run's activation, a mean, a direction), or of a function.
        position: ``answer``, ``all``, ``span:LABEL`` or ``index:N``.
        how: ``replace`` by the source; ``add`` scale times the source; ``project_out`` the component along the source;
            ``function``: what ``functions[source]`` makes of the vectors ``[vector, width]``, each by itself.
        scale: factor of the source, for ``add`` only.
    """

    site: str
    layer: int
    head: int | None = None
    source: str = ZERO
    position: str = ANSWER
    how: str = "replace"
    scale: float = 1.0

    def __str__(self) -> str:
        head = "" if self.head is None else f".{self.head}"
        place = "" if self.position == ANSWER else f"@{self.position}"
        sign = {"replace": "<-", "add": f"+{self.scale:g}*", "project_out": "-|", "function": "<-f:"}
        return f"{self.site}.{self.layer}{head}{place}{sign.get(self.how, f'<-{self.how}:')}{self.source}"


@dataclass(frozen=True, slots=True)
class Cell:
    """Edits made together in one run. A cell without edits is the unpatched run."""

    name: str
    edits: tuple[Edit, ...]


def layer_cells(n_layers: int, *, source: str, site: str = "resid_post", position: str = ANSWER) -> list[Cell]:
    """One cell a layer: the site in that layer comes from ``source``."""
    return [
        Cell(_named(f"{site}.{layer}", position), (Edit(site, layer, source=source, position=position),))
        for layer in range(n_layers)
    ]


def head_cells(heads: Sequence[int | None], *, source: str = ZERO, position: str = ANSWER) -> list[Cell]:
    """One cell a head, from the model's head map. Layers without heads give no cells: they are absent, not zero."""
    return [
        Cell(_named(f"z.{layer}.{head}", position), (Edit("z", layer, head, source, position),))
        for layer, count in enumerate(heads)
        for head in range(count or 0)
    ]


def span_cells(spans: Iterable[str], layers: Iterable[int], source: str, *, site: str = "resid_post") -> list[Cell]:
    """One cell a layer and span, layer by layer: all tokens of the span come from ``source`` in that layer."""
    labels = list(spans)
    return [
        Cell(f"{site}.{layer}@span:{label}", (Edit(site, layer, source=source, position=f"span:{label}"),))
        for layer in layers
        for label in labels
    ]


def _named(name: str, position: str) -> str:
    return name if position == ANSWER else f"{name}@{position}"


def with_source(cells: Iterable[Cell], source: str) -> list[Cell]:
    """The same cells fed from another donor: how a control is run beside the effect it controls for."""
    return [
        Cell(
            cell.name,
            tuple(edit if edit.how == "function" else replace(edit, source=source) for edit in cell.edits),
        )
        for cell in cells
    ]


def head_map(model: Model) -> list[int | None]:
    """Query heads of each layer, None where the layer has no head map."""
    return [model.heads(layer) for layer in range(model.n_layers)]


def check_cells_fit(
    model: Model, cells: Sequence[Cell], donors: Iterable[str], functions: Iterable[str] = ()
) -> dict[tuple[str, int], int]:
    """Refuse cells that name a site, layer, head, donor or function that does not exist, or that overwrite an edit.

    Returns the width of every (site, layer) that is edited.
    """
    if not cells:
        raise PatchError("no cells to sweep; give at least one Cell, for example from layer_cells or head_cells")
    known, callables = sorted(donors), sorted(functions)
    if ZERO in known:
        raise PatchError(f"a donor is called {ZERO!r}, which already means zeros; give it another name")
    seen: set[str] = set()
    widths: dict[tuple[str, int], int] = {}
    for cell in cells:
        if cell.name in seen:
            raise PatchError(f"two cells are called {cell.name!r}; cell names label the columns, so make them unique")
        seen.add(cell.name)
        for edit in cell.edits:
            where = f"cell {cell.name!r}, edit {edit}"
            _check_words(edit, where, known, callables)
            _check_place(model, edit, where, widths)
        _check_order(cell)
    return widths


def _check_words(edit: Edit, where: str, donors: list[str], functions: list[str]) -> None:
    if edit.site not in SITES:
        raise PatchError(f"{where}: unknown site {edit.site!r}; allowed: {', '.join(SITES)}")
    if edit.how not in HOWS:
        raise PatchError(f"{where}: unknown how {edit.how!r}; allowed: {', '.join(HOWS)}")
    check_position(edit.position, where)
    if edit.how == "function":
        if edit.source not in functions:
            allowed = ", ".join(functions) or "none given"
            raise PatchError(f"{where}: unknown function {edit.source!r}; allowed: {allowed}; pass it in functions=")
    elif edit.source == ZERO:
        if edit.how != "replace":
            raise PatchError(f"{where}: {edit.how} needs a direction and its source is zero; name a donor")
    elif edit.source not in donors:
        allowed = ", ".join([ZERO, *donors])
        raise PatchError(f"{where}: unknown donor {edit.source!r}; allowed: {allowed}; pass it in donors=")
    if edit.how != "add" and edit.scale != 1.0:
        raise PatchError(f"{where}: scale is {edit.scale:g} but how is {edit.how}; only add has a scale")
    if not abs(edit.scale) < float("inf"):
        raise PatchError(f"{where}: scale is {edit.scale}; give a finite number")


def check_position(position: str, where: str) -> None:
    """Refuse a position that is none of the four kinds."""
    kind, _, rest = position.partition(":")
    named = kind == "span" and rest
    counted = kind == "index" and rest.removeprefix("-").isdecimal()
    if position not in (ANSWER, ALL) and not named and not counted:
        raise PatchError(f"{where}: unknown position {position!r}; allowed: answer, all, span:LABEL, index:N")


def _check_place(model: Model, edit: Edit, where: str, widths: dict[tuple[str, int], int]) -> None:
    if not 0 <= edit.layer < model.n_layers:
        raise PatchError(f"{where}: layer {edit.layer} is out of range; allowed: 0 to {model.n_layers - 1}")
    if edit.head is not None:
        count = model.heads(edit.layer)
        if edit.site != "z":
            raise PatchError(f"{where}: {edit.site} has no heads, head is {edit.head}; leave head out or use site 'z'")
        if count is None:
            with_heads = [layer for layer in range(model.n_layers) if model.heads(layer) is not None]
            raise PatchError(
                f"{where}: layer {edit.layer} has no heads to cut; layers with heads: {with_heads or 'none'}"
            )
        if not 0 <= edit.head < count:
            raise PatchError(
                f"{where}: head {edit.head} is out of range; layer {edit.layer} has heads 0 to {count - 1}"
            )
    if (edit.site, edit.layer) not in widths:
        from activations.errors import StoreError
        from activations.sites import choose

        try:
            widths.update(choose(model, [edit.site], [edit.layer]))
        except StoreError as error:
            raise PatchError(f"{where}: {error}") from error


def _check_order(cell: Cell) -> None:
    """No edit may replace a vector that an earlier edit of the cell has set: the earlier one would do nothing."""
    earlier: dict[tuple[str, int], list[Edit]] = {}
    for edit in cell.edits:
        before = earlier.setdefault((edit.site, edit.layer), [])
        if edit.how == "replace":
            for other in before:
                same_head = edit.head is None or other.head is None or edit.head == other.head
                if same_head and (edit.position == other.position or edit.position == ALL):
                    raise PatchError(
                        f"cell {cell.name!r}, edit {edit}: this vector is already edited in the cell by {other}; "
                        "keep one of the two edits"
                    )
        before.append(edit)


def tokens_of(prompt: Prompt, position: str, spans: Mapping[str, Sequence[int]]) -> tuple[int, ...]:
    """The token numbers that a position means in a prompt whose spots were checked."""
    if position == ANSWER:
        return (prompt.answer,)
    if position == ALL:
        return tuple(range(len(prompt.ids)))
    kind, _, rest = position.partition(":")
    return tuple(spans[rest]) if kind == "span" else (int(rest) % len(prompt.ids),)


def check_spots(cells: Sequence[Cell], recipients: Sequence[Prompt], spots: Spots | None) -> None:
    """Refuse a span that a recipient lacks, and tokens outside a prompt."""
    wanted = sorted({edit.position for cell in cells for edit in cell.edits} - {ANSWER, ALL})
    if spots is not None and len(spots) != len(recipients):
        raise PatchError(f"spots holds {len(spots)} entries for {len(recipients)} recipients; give one each")
    for position in wanted:
        kind, _, rest = position.partition(":")
        for item, prompt in enumerate(recipients):
            size = len(prompt.ids)
            if kind == "index":
                if not -size <= int(rest) < size:
                    raise PatchError(f"position {position}: recipient {item} has tokens {-size} to {size - 1}")
                continue
            have = {} if spots is None else spots[item]
            if rest not in have:
                allowed = ", ".join(have) or "none"
                raise PatchError(f"recipient {item} has no span {rest!r}; its spans: {allowed}; pass it in spots=")
            tokens = list(have[rest])
            if not tokens or len(set(tokens)) != len(tokens) or not all(0 <= token < size for token in tokens):
                raise PatchError(
                    f"span {rest!r} of recipient {item} is tokens {tokens[:6]}; give different tokens of 0 to {size - 1}"
                )
