"""What is changed in a run: edits, cells, and the refusal of cells that name something the model does not have.

An *edit* replaces one vector at the answer position, the last prompt token. A *cell* is a set of edits made in the same
run: one square of a layer sweep, one head of a head sweep, or the ten heads that are switched off together. Only two
sites are edited, because they are the two that mean the same thing in every architecture:

- ``resid_post``: the residual stream after block ``layer``, a vector of width d_model. Whatever the layers below wrote
  at this position is gone; the prefix is untouched, so later layers still read it.
- ``z``: the input of the mixer's out-projection, cut into query heads. A head is a slice of *this* input. A slice of the
  projection's output is no head: every head writes all over it.

A mistake in a cell must not come back as a number. A layer that does not exist, a head of a layer that has none, or a
donor that was never given is an error before the first forward pass, and the message says what would be allowed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from activations.model import Model

SITES = ("resid_post", "z")
ZERO = "zero"
"""The source that needs no donor: the vector is replaced by zeros."""


class PatchError(ValueError):
    """An edit, a donor or a sweep that cannot be done as asked; the message is one line for the user."""


@dataclass(frozen=True, slots=True)
class Edit:
    """Replace one vector at the answer position.

    Attributes:
        site: ``resid_post`` or ``z``.
        layer: block number, from 0.
        head: query head, for ``z`` only. None at ``z`` means every head of the layer.
        source: ``zero``, or the name of the donor the vector is taken from.
    """

    site: str
    layer: int
    head: int | None = None
    source: str = ZERO

    def __str__(self) -> str:
        head = "" if self.head is None else f".{self.head}"
        return f"{self.site}.{self.layer}{head}<-{self.source}"


@dataclass(frozen=True, slots=True)
class Cell:
    """Edits made together in one run. A cell without edits is the unpatched run."""

    name: str
    edits: tuple[Edit, ...]


def layer_cells(n_layers: int, *, source: str) -> list[Cell]:
    """One cell a layer: the residual stream after that layer comes from ``source``."""
    return [Cell(f"resid_post.{layer}", (Edit("resid_post", layer, source=source),)) for layer in range(n_layers)]


def head_cells(heads: Sequence[int | None], *, source: str = ZERO) -> list[Cell]:
    """One cell a head, from the model's head map. Layers without heads give no cells: they are absent, not zero."""
    return [
        Cell(f"z.{layer}.{head}", (Edit("z", layer, head, source),))
        for layer, count in enumerate(heads)
        for head in range(count or 0)
    ]


def with_source(cells: Iterable[Cell], source: str) -> list[Cell]:
    """The same cells fed from another donor: how a control is run beside the effect it controls for."""
    return [
        Cell(cell.name, tuple(Edit(edit.site, edit.layer, edit.head, source) for edit in cell.edits)) for cell in cells
    ]


def head_map(model: Model) -> list[int | None]:
    """Query heads of each layer, None where the layer has no head map."""
    return [model.heads(layer) for layer in range(model.n_layers)]


def check_cells_fit(model: Model, cells: Sequence[Cell], donors: Iterable[str]) -> None:
    """Refuse cells that name a site, layer, head or donor that does not exist, or that edit one vector twice."""
    if not cells:
        raise PatchError("no cells to sweep; give at least one Cell, for example from layer_cells or head_cells")
    known = sorted(donors)
    if ZERO in known:
        raise PatchError(f"a donor is called {ZERO!r}, which already means zeros; give it another name")
    seen: set[str] = set()
    for cell in cells:
        if cell.name in seen:
            raise PatchError(f"two cells are called {cell.name!r}; cell names label the columns, so make them unique")
        seen.add(cell.name)
        _check_cell(model, cell, known)


def _check_cell(model: Model, cell: Cell, donors: list[str]) -> None:
    taken: set[tuple[str, int, int]] = set()
    for edit in cell.edits:
        where = f"cell {cell.name!r}, edit {edit}"
        if edit.site not in SITES:
            raise PatchError(f"{where}: unknown site {edit.site!r}; allowed: {', '.join(SITES)}")
        if not 0 <= edit.layer < model.n_layers:
            raise PatchError(f"{where}: layer {edit.layer} is out of range; allowed: 0 to {model.n_layers - 1}")
        if edit.source != ZERO and edit.source not in donors:
            allowed = ", ".join([ZERO, *donors])
            raise PatchError(f"{where}: unknown donor {edit.source!r}; allowed: {allowed}; pass it in donors=")
        for key in _vectors(model, edit, where):
            if key in taken:
                raise PatchError(f"{where}: this vector is already edited in the cell; keep one of the two edits")
            taken.add(key)


def _vectors(model: Model, edit: Edit, where: str) -> list[tuple[str, int, int]]:
    """The vectors an edit replaces, as (site, layer, head); a residual vector has head -1."""
    if edit.site == "resid_post":
        if edit.head is not None:
            raise PatchError(f"{where}: resid_post has no heads, head is {edit.head}; leave head out or use site 'z'")
        return [("resid_post", edit.layer, -1)]
    count = model.heads(edit.layer)
    if count is None:
        with_heads = [layer for layer in range(model.n_layers) if model.heads(layer) is not None]
        raise PatchError(f"{where}: layer {edit.layer} has no heads to cut; layers with heads: {with_heads or 'none'}")
    if edit.head is None:
        return [("z", edit.layer, head) for head in range(count)]
    if not 0 <= edit.head < count:
        raise PatchError(f"{where}: head {edit.head} is out of range; layer {edit.layer} has heads 0 to {count - 1}")
    return [("z", edit.layer, edit.head)]
