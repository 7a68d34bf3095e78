"""The same weights through our hooks, TransformerLens and nnsight give the same rows: 5e-5 in float32.

The models are tiny and random, one for each structure with a trap of its own; nothing is downloaded. `SUPPORT` is the
table of what a library cannot give, with the reason; whatever is not in it must agree.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from activations import answer_tokens, from_modules
from activations.backends import NAMES, PEERS, Session, backend, named
from activations.backends.agreement import BOUND, SITES, agreement, gap
from activations.capturing import Plan, capture
from activations.checks import check
from activations.errors import ModelError
from activations.model import Model
from activations.sites import taps
from activations.taps import Pick
from tests.tiny_models import ANSWERS, BUILDERS, MESSAGES, tiny_adapter

NO_HEADS = "TransformerLens has no attn.hook_z in this block"
SUPPORT: dict[tuple[str, str], dict[str, tuple[tuple[int, ...], str]]] = {
    ("hybrid", "transformer_lens"): {"z": ((0, 1, 2), NO_HEADS)},
    ("qwen3_next", "transformer_lens"): {"z": ((0, 1, 2), NO_HEADS)},
}
"""(model, library) -> site -> (layers that the library cannot give, why)."""
ABSENT = {
    **{parallel: {"resid_mid"} for parallel in ("neox", "cohere", "falcon")},
    "granite": {"attn_out", "mlp_out"},
}
"""Sites that a model does not have, in any backend."""
JOINT = {"gpt2", "neox", "falcon", "phi3"}
"""Models whose query-key-value weights are joint, so that TransformerLens leaves out an adapter on them."""


@pytest.fixture(autouse=True)
def _installed() -> None:
    for peer in PEERS:
        pytest.importorskip(peer, reason="cross-library equality needs the library")


def _model(name: str, folder: Path | None = None) -> Model:
    hf_model, tokenizer = BUILDERS[name]()
    return from_modules(hf_model, tokenizer, adapters=[] if folder is None else [str(tiny_adapter(hf_model, folder))])


def _fingerprint(hf_model: Any, tokenizer: Any) -> dict[str, Any]:
    digest = hashlib.sha256()
    for key, tensor in sorted(hf_model.state_dict().items()):
        digest.update(key.encode() + tensor.numpy().tobytes())
    return {
        "weights": digest.hexdigest(),
        "config": hf_model.config.to_dict(),
        "attention": hf_model.config._attn_implementation,
        "modules": [(name, type(module)) for name, module in hf_model.named_modules()],
        "hooks": _hooks(hf_model),
        "training": [module.training for module in hf_model.modules()],
        "grad": [parameter.requires_grad for parameter in hf_model.parameters()],
        "tokenizer": (tokenizer.padding_side, tokenizer.pad_token, tokenizer.bos_token, tokenizer.chat_template),
        "adds": tokenizer("Amy is")["input_ids"],
    }


def _hooks(hf_model: Any) -> int:
    return sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in hf_model.modules())


@pytest.mark.parametrize("peer", PEERS)
@pytest.mark.parametrize("name", BUILDERS)
def test_each_site_agrees_or_is_refused_with_the_reason(name: str, peer: str) -> None:
    model = _model(name)
    prompts = model.encode(MESSAGES)
    places = [(site, layer) for site in SITES for layer in range(model.n_layers) if taps(model, (site, layer))]
    assert {site for site in SITES if not any(where[0] == site for where in places)} == ABSENT.get(name, set())
    with backend(peer).open(model) as session:
        refused = {where: reason for where in places if (reason := session.refusal(where))}
        given = [where for where in places if where not in refused]
        theirs = session.run(prompts, given, logits=True)
        for where, reason in refused.items():
            with pytest.raises(
                ModelError, match=f"backend {peer} cannot give {where[0]} of layer {where[1]} .*{reason}"
            ):
                session.run(prompts, [where])
    with backend("hf").open(model) as session:
        ours = session.run(prompts, given, logits=True)
    expected = {(site, layer): why for site, (layers, why) in SUPPORT.get((name, peer), {}).items() for layer in layers}
    assert refused == expected
    gaps = {where: gap(ours.activations[where], theirs.activations[where]) for where in given}
    assert ours.logits is not None and theirs.logits is not None
    assert {where: size for where, size in gaps.items() if size > BOUND} == {}
    assert gap(ours.logits, theirs.logits) <= BOUND


QUICK = ("llama", "gpt2", "qwen3", "phi3", "hybrid", "gemma4")


@pytest.mark.parametrize("peer", PEERS)
@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in BUILDERS])
def test_they_agree_with_an_adapter_on_or_say_that_it_is_left_out(name: str, peer: str, tmp_path: Path) -> None:
    hf_model, tokenizer = BUILDERS[name]()
    model = from_modules(hf_model, tokenizer, adapters=[str(tiny_adapter(hf_model, tmp_path / "one", seed=2))])
    prompts = model.encode(MESSAGES)
    base = _logits(model, prompts)
    with model.use("one"):
        table = agreement(model, prompts, peer)
        assert gap(_logits(model, prompts), base) > 1e-3
    if peer == "transformer_lens" and name in JOINT:
        assert [(row.name, row.value) for row in table] == [("hf = transformer_lens", None)]
        assert "leaves out adapter 'one' on" in table[0].note and "use backend hf or nnsight" in table[0].note
        return
    assert {row.name: row.value for row in table if row.value is None or row.value > BOUND} == {}
    assert len(table) == 1 + len(SITES) - len(ABSENT.get(name, ()))


def _logits(model: Model, prompts: Any) -> torch.Tensor:
    with backend("hf").open(model) as session:
        logits = session.run(prompts, [], logits=True).logits
    assert logits is not None
    return logits


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("architecture", ["llama", "gpt2", "falcon"])
def test_other_columns_than_the_answer(name: str, architecture: str) -> None:
    """Against transformers' own hidden states of each prompt alone."""
    model = _model(architecture)
    prompts = model.encode(MESSAGES)
    columns = [[3], [0, len(prompts[1].ids) - 1], [], [5, 2, 2]]
    with backend(name).open(model) as session:
        rows = session.run(prompts, [("resid_pre", 1), ("resid_post", 0)], logits=True, columns=columns)
    wanted, logits = [], []
    for prompt, own in zip(prompts, columns, strict=True):
        with torch.inference_mode():
            out = model.hf_model(torch.tensor([prompt.ids]), output_hidden_states=True)
        wanted.append(out.hidden_states[1][0, own])
        logits.append(out.logits[0, own])
    assert rows.logits is not None
    for where in (("resid_pre", 1), ("resid_post", 0)):
        assert (rows.activations[where] - torch.cat(wanted)).abs().max() < BOUND
    assert (rows.logits - torch.cat(logits)).abs().max() < BOUND


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
def test_the_callers_model_and_tokenizer_stay_bit_for_bit(architecture: str, name: str, tmp_path: Path) -> None:
    model = _model(architecture, tmp_path / "one")
    tokenizer = model.tokenizer
    tokenizer.padding_side = "right"
    model.hf_model.model_tag = "mine"
    others: list[Any] = []
    handle = model.module(model.structure.blocks[0]).register_forward_hook(lambda *_: others.append(1))
    prompts = model.encode(MESSAGES)
    before, logits = _fingerprint(model.hf_model, tokenizer), _logits(model, prompts)
    with backend(name).open(model) as session:
        session.run(prompts, [("resid_post", 0), ("z", 1)], logits=True)
        assert _fingerprint(model.hf_model, tokenizer) == before
    assert _fingerprint(model.hf_model, tokenizer) == before
    assert torch.equal(_logits(model, prompts), logits)
    handle.remove()


@pytest.mark.parametrize("name", NAMES)
def test_an_exception_in_a_hook_leaves_nothing_behind(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = _model("llama")
    prompts = model.encode(MESSAGES)
    state, before = _fingerprint(model.hf_model, model.tokenizer), _logits(model, prompts)
    place, what = {"hf": (Pick, "gather")}.get(name, (import_module(f"activations.backends.{name}"), "picked"))
    fine = getattr(place, what)
    calls: Counter[str] = Counter()

    def failing(*args: Any) -> Any:
        calls["hook"] += 1
        if calls["hook"] == 2:
            raise RuntimeError("boom in a hook")
        return fine(*args)

    with backend(name).open(model) as session:
        monkeypatch.setattr(place, what, failing)
        with pytest.raises(Exception, match="boom in a hook"):
            session.run(prompts, [("resid_pre", 1), ("resid_post", 1)])
        monkeypatch.setattr(place, what, fine)
        assert calls["hook"] == 2
        assert _inner_hooks(session, model) == 0
        again = session.run(prompts, [("resid_post", 1)], logits=True)
        assert again.logits is not None and gap(again.logits, before) <= BOUND
    with pytest.raises(RuntimeError, match="in the block"), backend(name).open(model):
        raise RuntimeError("in the block")
    assert _hooks(model.hf_model) == 0
    assert _fingerprint(model.hf_model, model.tokenizer) == state
    assert torch.equal(_logits(model, prompts), before)


def _inner_hooks(session: Session, model: Model) -> int:
    """Hooks that run on the network the session uses; nnsight's own stay on its copy, and look without changing."""
    bridge = getattr(session, "bridge", None)
    if bridge is not None:
        return sum(len(point.fwd_hooks) for point in bridge.hook_dict.values())
    return _hooks(model.hf_model)


@pytest.mark.parametrize("name", PEERS)
def test_a_switched_adapter_is_noticed(name: str, tmp_path: Path) -> None:
    model = _model("llama", tmp_path / "one")
    prompts = model.encode(MESSAGES)
    with backend(name).open(model) as session:
        with model.use("one"), pytest.raises(ModelError, match=r"was None when .* and is 'one' now; open the backend"):
            session.run(prompts, [("resid_post", 0)])
        session.run(prompts, [("resid_post", 0)])


@pytest.mark.parametrize("name", ["llama", "hybrid", "gemma3"])
def test_one_plan_gives_one_store_through_all_three(name: str, tmp_path: Path) -> None:
    model = _model(name)
    prompts, answers = model.encode(MESSAGES), answer_tokens(model, ANSWERS)
    plan = Plan(sites=("resid_pre", "resid_mid", "resid_post", "attn_out", "mlp_out"))
    stores = {one: capture(model, prompts, plan, tmp_path / one, answers=answers, backend=one) for one in NAMES}
    for peer in PEERS:
        for site in plan.sites:
            for layer in range(model.n_layers):
                ours, theirs = stores["hf"][site, layer], stores[peer][site, layer]
                assert gap(torch.from_numpy(np.array(ours)), torch.from_numpy(np.array(theirs))) <= BOUND
        assert np.abs(stores["hf"].readout["logit"] - stores[peer].readout["logit"]).max() <= BOUND


def test_a_plan_that_the_library_cannot_serve_is_refused(tmp_path: Path) -> None:
    model = _model("hybrid")
    with pytest.raises(ModelError, match=f"backend transformer_lens cannot give z of layer 0 .*{NO_HEADS}"):
        capture(model, model.encode(MESSAGES), Plan(sites=("z",)), tmp_path / "store", backend="transformer_lens")


def test_check_adds_a_row_for_logits_and_each_site(tmp_path: Path) -> None:
    model = _model("llama", tmp_path / "one")
    table = check(model, model.encode(MESSAGES), backends=PEERS)
    names = [row.name for row in table if row.name.startswith("hf = ")]
    sites = ("logits", *SITES)
    assert names == [f"hf = {peer}, {site}{end}" for end in ("", ", one") for peer in PEERS for site in sites]
    assert all(row.ok for row in table)


def test_check_says_what_a_library_cannot_give(tmp_path: Path) -> None:
    table = {row.name: row for row in agreement(_model("hybrid"), _model("hybrid").encode(MESSAGES), PEERS[0])}
    assert table["hf = transformer_lens, z"].note == f"layers 3; not layers 0-2: {NO_HEADS}"


def test_a_wrong_hook_fails_its_row(monkeypatch: pytest.MonkeyPatch) -> None:
    from activations.backends import transformer_lens

    monkeypatch.setitem(transformer_lens.POINTS, "resid_post", ("hook_resid_mid",))
    model = _model("llama")
    failing = [row.name for row in agreement(model, model.encode(MESSAGES), "transformer_lens") if not row.ok]
    assert failing == ["hf = transformer_lens, resid_post"]


def test_names() -> None:
    assert named("all") == PEERS
    assert named("nnsight, hf,nnsight") == ("nnsight",)
    assert named("hf") == ()
    with pytest.raises(ModelError, match=r"backends are 'hf,pyvene'; give all, or one or more of hf, transformer_lens"):
        named("hf,pyvene")
    with pytest.raises(ModelError, match="no backend 'pyvene'; use hf, transformer_lens, nnsight"):
        backend("pyvene")


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ModelError, match="'transformer_lens' is not installed; run: pip install transformer-lens"):
        backend("transformer_lens")
    assert backend("hf").name == "hf"


def test_columns_that_are_no_tokens_are_refused() -> None:
    model = _model("llama")
    prompts = model.encode(MESSAGES)[:1]
    with backend("hf").open(model) as session:
        for columns in ([[99]], [[-1]], [[0], [0]]):
            with pytest.raises(ModelError, match="columns must name tokens of each of the 1 prompts"):
                session.run(prompts, [("resid_post", 0)], columns=columns)
