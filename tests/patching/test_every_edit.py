"""Every kind of edit, at every site and position, by every engine, against passes written by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from activations import answer_tokens, from_modules
from patching import Cell, Edit, sweep
from tests.patching.by_hand import HandEdit, run, site_names
from tests.tiny_models import ANSWERS, BUILDERS, MESSAGES

BOUND = 1e-4
POSITIONS = ("answer", "all", "span:one", "span:end", "index:1", "index:-2")
HOWS = ("zero", "replace", "add", "project_out", "function")
FUNCTIONS = {"bend": lambda vectors: torch.tanh(vectors) - 0.5 * vectors}


class Case:
    """A model with cells over every site, position and how, and hand-made logits for some of (item, cell)."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.hf_model, tokenizer = BUILDERS[name]()
        self.model = from_modules(self.hf_model, tokenizer)
        self.prompts = self.model.encode(MESSAGES[:3])
        self.answers = answer_tokens(self.model, ANSWERS)
        self.spots = [{"one": (2, 3, 4), "end": (n - 4, n - 1)} for n in (len(prompt.ids) for prompt in self.prompts)]
        self.donors = {"d": {site: self._vectors(site) for site in site_names(name)}}
        self.cells = [*self._single(), *self._several()]

    def tokens(self, item: int, position: str) -> list[int]:
        n = len(self.prompts[item].ids)
        fixed = {"answer": [n - 1], "all": list(range(n)), "index:1": [1], "index:-2": [n - 2]}
        return fixed.get(position) or list(self.spots[item][position.removeprefix("span:")])

    def _vectors(self, site: str) -> dict:
        rng = np.random.default_rng(len(site))
        found: dict = {}
        for position in POSITIONS:
            found[position] = {}
            for layer in range(self.model.n_layers):
                width = self._width(site, layer)
                each = [
                    rng.standard_normal((len(self.tokens(item, position)), width)).astype(np.float32)
                    for item in range(len(self.prompts))
                ]
                single = position == "answer" or position.startswith("index")
                found[position][layer] = np.concatenate(each) if single else each
        return found

    def _width(self, site: str, layer: int) -> int:
        structure = self.model.structure
        return structure.heads[layer] * structure.d_head[layer] if site == "z" else structure.d_model

    def _single(self) -> list[Cell]:
        cells = []
        for number, site in enumerate(site_names(self.name)):
            for place, position in enumerate(POSITIONS):
                for kind, how in enumerate(HOWS):
                    layer = (number + place + kind) % self.model.n_layers
                    head = (None, 1, 3)[(place + kind) % 3] if site == "z" else None
                    source = {"zero": "zero", "function": "bend"}.get(how, "d")
                    how = "replace" if how == "zero" else how
                    scale = -0.7 if how == "add" else 1.0
                    edit = Edit(site, layer, head, source, position, how, scale)
                    cells.append(Cell(str(edit), (edit,)))
        return cells

    def _several(self) -> list[Cell]:
        last = self.model.n_layers - 1
        add = Edit("resid_post", 1, source="d", how="add", scale=2.0)
        out = Edit("resid_post", 1, source="d", how="project_out")
        bend = Edit("resid_post", 1, source="bend", how="function")
        return [
            Cell("none", ()),
            Cell("in turn", (add, bend, out)),
            Cell("in another turn", (bend, add)),
            Cell("heads and layers", (Edit("z", 0, 1), Edit("z", 0, 2, "d"), Edit("z", last), Edit("z", 1, 0, "d"))),
            Cell(
                "across",
                (
                    Edit("resid_post", last, source="d", how="project_out"),
                    Edit("z", 1, 1, position="all"),
                    Edit("resid_pre", 0, source="d", position="span:one"),
                    Edit("resid_pre", 1, source="d", position="span:end", how="add", scale=0.5),
                ),
            ),
        ]

    def by_hand(self, item: int, cell: Cell) -> np.ndarray:
        made = []
        order = ("resid_pre", "z", "attn_out", "resid_mid", "mlp_out", "resid_post")
        for edit in sorted(cell.edits, key=lambda edit: (edit.layer, order.index(edit.site))):
            head = None
            if edit.head is not None:
                size = self.model.structure.d_head[edit.layer]
                head = edit.head * size, (edit.head + 1) * size
            made.append(
                HandEdit(edit.site, edit.layer, self.tokens(item, edit.position), self._change(item, edit, head), head)
            )
        logits = run(self.hf_model, self.name, self.prompts[item].ids, made)
        return np.array([float(torch.logsumexp(logits[list(ids)], 0)) for ids in self.answers.ids])

    def _change(self, item: int, edit: Edit, head):
        if edit.how == "function":
            return FUNCTIONS[edit.source]
        if edit.source == "zero":
            return torch.zeros_like
        given = self.donors["d"][edit.site][edit.position][edit.layer]
        vectors = torch.from_numpy(np.atleast_2d(given[item]))
        vectors = vectors[:, slice(*head)] if head else vectors
        if edit.how == "replace":
            return lambda old: vectors
        if edit.how == "add":
            return lambda old: old + edit.scale * vectors
        return lambda old: old - (old * vectors).sum(-1, keepdim=True) / (vectors**2).sum(-1, keepdim=True) * vectors

    def sweep(self, cells, **options):
        return sweep(
            self.model,
            self.prompts,
            cells,
            answers=self.answers,
            donors=self.donors,
            functions=FUNCTIONS,
            spots=self.spots,
            seed=0,
            **options,
        )


@pytest.mark.parametrize("name", list(BUILDERS))
def test_every_engine_gives_what_a_pass_by_hand_gives(name):
    case = Case(name)
    expected = np.stack([case.by_hand(number % 3, cell) for number, cell in enumerate(case.cells)])
    rows = np.arange(len(case.cells))
    unpatched = np.stack([case.by_hand(item, Cell("none", ())) for item in range(3)])

    mixed = case.sweep(case.cells, check_cells=20)
    assert set(mixed.engines) >= {"restart"} and mixed.checked == 20
    np.testing.assert_allclose(mixed.logit[rows % 3, rows], expected, atol=BOUND)
    np.testing.assert_allclose(mixed.unpatched_logit, unpatched, atol=BOUND)
    moved = np.abs(expected - unpatched[rows % 3]).max(axis=-1)
    assert np.median(moved) > 100 * BOUND, "most cells have an effect that the bound could not hide"

    at_answer = [n for n, cell in enumerate(case.cells) if all(edit.position == "answer" for edit in cell.edits)]
    chosen = [case.cells[n] for n in at_answer]
    tried = [engine for engine in ("branch", "prefix", "copies", "restart") if engine != mixed.engines[at_answer[0]]]
    if mixed.engines[at_answer[0]] != "branch":
        tried.remove("branch")
    for engine in tried:
        result = case.sweep(chosen, check_cells=0, engine=engine, cell_budget=17)
        got = result.logit[np.array(at_answer) % 3, np.arange(len(chosen))]
        np.testing.assert_allclose(got, expected[at_answer], atol=BOUND, err_msg=engine)


def test_the_order_of_edits_of_one_vector_counts():
    case = Case("llama")
    add = Edit("resid_post", 1, source="d", how="add", scale=2.0)
    out = Edit("resid_post", 1, source="d", how="project_out")
    only, first, last = (
        case.sweep([Cell("c", edits)], check_cells=3).difference for edits in ((out,), (add, out), (out, add))
    )
    np.testing.assert_allclose(only, first, atol=1e-5)  # what was added along the direction is projected out again
    assert np.abs(last - first).min() > 1e-2


def test_one_vector_goes_to_every_token_of_a_position():
    case = Case("qwen3")
    shared = {"resid_post": {1: np.random.default_rng(0).standard_normal((3, case.model.d_model)).astype(np.float32)}}
    cell = Cell("all", (Edit("resid_post", 1, source="mean", position="all"),))
    case.donors = {"mean": shared}
    result = case.sweep([cell], check_cells=3)
    for item in range(3):
        vector = torch.from_numpy(shared["resid_post"][1][item])
        edit = HandEdit(
            "resid_post",
            1,
            case.tokens(item, "all"),
            lambda old, vector=vector: vector.expand_as(old),
        )
        logits = run(case.hf_model, "qwen3", case.prompts[item].ids, [edit])
        score = [float(torch.logsumexp(logits[list(ids)], 0)) for ids in case.answers.ids]
        np.testing.assert_allclose(result.logit[item, 0], score, atol=1e-5)
