"""Export: each format's own reader gives the same numbers, and TransformerLens takes its cache."""

from __future__ import annotations

import json
import os
import shutil
import tracemalloc
from collections import namedtuple
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from activations import store as store_module
from activations import store_export
from activations.capturing import Plan, capture
from activations.errors import StoreError
from activations.model import Model, from_modules
from activations.readout import answer_tokens
from activations.store import ActivationStore, StoreWriter
from tests import tiny_models as tiny

SITES = ("resid_pre", "resid_mid", "resid_post", "attn_out", "mlp_out", "z", "pattern")


@pytest.fixture(scope="module")
def model() -> Model:
    return from_modules(*tiny.tiny_llama())


def captured(model: Model, folder: Path, **plan: Any) -> ActivationStore:
    prompts = model.encode(tiny.MESSAGES)
    answers = answer_tokens(model, tiny.ANSWERS)
    index = [(f"k{n}", "original") for n in range(len(prompts))]
    return capture(model, prompts, Plan(sites=SITES, batch_tokens=60, **plan), folder, answers=answers, index=index)


@pytest.fixture(scope="module")
def store(model: Model, tmp_path_factory: pytest.TempPathFactory) -> ActivationStore:
    return captured(model, tmp_path_factory.mktemp("store") / "s", positions=("answer", "index:0", "index:2"))


@pytest.fixture(scope="module", params=["float32", "bfloat16", "float16"])
def any_store(request: Any, model: Model, tmp_path_factory: pytest.TempPathFactory) -> ActivationStore:
    return captured(model, tmp_path_factory.mktemp("typed") / "s", dtype=request.param)


def test_safetensors(any_store: ActivationStore, tmp_path: Path) -> None:
    from safetensors import safe_open

    path = any_store.export(tmp_path / "new/acts.safetensors")
    with safe_open(path, "pt") as file:
        for site, layers in any_store.layers.items():
            for layer in layers:
                got = file.get_tensor(f"acts/{site}/L{layer}")
                assert got.dtype == getattr(torch, any_store.dtype)
                np.testing.assert_array_equal(got.float().numpy(), any_store[site, layer])
        for name, values in any_store.readout.items():
            np.testing.assert_array_equal(file.get_tensor(f"readout/{name}").numpy(), values)
        described = file.metadata()
        assert len(file.keys()) == len(SITES) * 3 + 3
    assert json.loads(described["manifest"])["content"] == any_store.manifest["content"]
    assert json.loads(described["rows"]) == any_store.manifest["rows"]


def test_npz_without_pickle(any_store: ActivationStore, tmp_path: Path) -> None:
    path = any_store.export(tmp_path / "acts.npz", "npz")
    with np.load(path, allow_pickle=False) as file:
        kind = np.float16 if any_store.dtype == "float16" else np.float32
        for site, layers in any_store.layers.items():
            for layer in layers:
                got = file[f"acts/{site}/L{layer}"]
                assert got.dtype == kind
                np.testing.assert_array_equal(got, any_store[site, layer])
        for name, values in any_store.readout.items():
            np.testing.assert_array_equal(file[f"readout/{name}"], values)
        assert {name: file[f"rows/{name}"].tolist() for name in any_store.rows} == any_store.manifest["rows"]
        assert json.loads(str(file["manifest"]))["content"] == any_store.manifest["content"]


@pytest.mark.parametrize("format", ["safetensors", "npz", "transformer_lens"])
def test_same_store_gives_same_bytes(store: ActivationStore, tmp_path: Path, format: str) -> None:
    one, other = (store.export(tmp_path / name, format).read_bytes() for name in ("a", "b"))
    assert one == other
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]


def test_chosen_sites_layers_and_rows(store: ActivationStore, tmp_path: Path) -> None:
    rows = store.select(label="index:")
    path = store.export(tmp_path / "a", "npz", sites=["resid_post", "blocks.1.hook_z"], layers=[0, -1], rows=rows)
    with np.load(path) as file:
        arrays = {name for name in file.files if name.startswith("acts/")}
        assert arrays == {"acts/resid_post/L0", "acts/resid_post/L2", "acts/z/L1"}
        np.testing.assert_array_equal(file["acts/resid_post/L2"], store.read("resid_post", 2, rows))
        np.testing.assert_array_equal(file["readout/logit"], store.readout["logit"][rows])
        assert set(file["rows/label"]) == {"index:0", "index:2"}


def bridge(model: Model, folder: Path) -> Any:
    from transformer_lens.model_bridge import TransformerBridge
    from transformers import AutoTokenizer

    hf_model, tokenizer = tiny.tiny_llama()
    hf_model.load_state_dict(model.hf_model.state_dict())
    tokenizer.save_pretrained(folder)  # TransformerLens builds it again from where it came from
    tokenizer = AutoTokenizer.from_pretrained(folder)
    return TransformerBridge.boot_transformers("tiny", hf_model=hf_model, tokenizer=tokenizer, dtype=torch.float32)


def test_transformer_lens_takes_the_cache(model: Model, tmp_path: Path) -> None:
    """The same functions on TransformerLens' own cache of single prompts give the same numbers."""
    pytest.importorskip("transformer_lens")
    from safetensors.torch import load_file
    from transformer_lens import ActivationCache
    from transformer_lens.tools.analysis.logit_lens import logit_lens

    lens = bridge(model, tmp_path / "tokenizer")
    store = captured(model, tmp_path / "s")
    caches = {
        "memory": store.activation_cache(lens),
        "file": ActivationCache(load_file(store.export(tmp_path / "c", "transformer_lens")), lens),
    }
    prompts = model.encode(tiny.MESSAGES)
    with torch.inference_mode():
        own = [lens.run_with_cache(torch.tensor([prompt.ids]))[1] for prompt in prompts]
        for cache in caches.values():
            for name in ("resid_pre", "resid_mid", "resid_post", "attn_out", "mlp_out", "z"):
                for layer in (0, 1, 2, -1):
                    expected = torch.cat([one[name, layer][:, -1:] for one in own])
                    assert cache[name, layer].shape == expected.shape
                    torch.testing.assert_close(cache[name, layer], expected, atol=5e-5, rtol=0)
            for row, one in enumerate(own):
                expected = one["pattern", 1][0, :, -1:]
                got = cache["pattern", 1][row]
                torch.testing.assert_close(got[..., : expected.shape[-1]], expected, atol=5e-5, rtol=0)
                assert not got[..., expected.shape[-1] :].any()
            for call in (
                lambda c: c.accumulated_resid(apply_ln=True, pos_slice=-1),
                lambda c: c.accumulated_resid(incl_mid=True, pos_slice=-1),
                lambda c: c.stack_activation("attn_out")[:, :, -1],
                lambda c: logit_lens(lens, cache=c, positions=-1, return_type="logits").readout.values,
            ):
                expected = torch.cat([call(one) for one in own], dim=1)
                torch.testing.assert_close(call(cache), expected, atol=2e-4, rtol=1e-4)


def test_positions_become_a_dimension_where_all_prompts_have_them(store: ActivationStore, model: Model) -> None:
    pytest.importorskip("transformer_lens")
    n, d, heads = 4, model.d_model, 4
    cache = store.activation_cache(sites=["resid_post", "z", "pattern"])
    assert cache["resid_post", 0].shape == (n, 3, d)
    np.testing.assert_array_equal(cache["resid_post", 0].numpy().reshape(-1, d), store["resid_post", 0])
    z = store["z", 1].reshape(n, 3, heads, -1)
    np.testing.assert_array_equal(cache["blocks.1.attn.hook_z"].numpy(), z)
    pattern = store["pattern", 1].reshape(n, 3, heads, -1).swapaxes(1, 2)
    np.testing.assert_array_equal(cache["blocks.1.attn.hook_pattern"].numpy(), pattern)
    uneven = store.activation_cache(sites=["resid_post"], rows=[0, 1, 2, 3, 4])
    assert uneven["resid_post", 0].shape == (5, 1, d)


def test_streaming_is_cut_at_prompts(store: ActivationStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformer_lens")
    from safetensors.torch import load_file

    monkeypatch.setattr(store_export, "_BYTES_AT_ONCE", 5 * 4 * 32)
    monkeypatch.setattr(store_module, "_WINDOW", 1)
    made = load_file(store.export(tmp_path / "c", "transformer_lens"))
    monkeypatch.undo()
    for name, values in store.activation_cache().cache_dict.items():
        torch.testing.assert_close(made[name], values, atol=0, rtol=0)


def test_memory_does_not_grow_with_the_export(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "_WINDOW", 1 << 16)
    monkeypatch.setattr(store_export, "_BYTES_AT_ONCE", 1 << 17)
    n_rows, width = 8_000, 512
    names = ["a"] * n_rows
    rows = {"key": names, "presentation": names, "position": range(n_rows), "n_tokens": range(n_rows)}
    shards = [list(range(at, at + 100)) for at in range(0, n_rows, 100)]
    where = ("resid_post", 0)
    with StoreWriter(
        tmp_path / "s", datasets={where: width}, dtype="float32", n_layers=1, shards=shards, rows=rows, content={}
    ) as writer:
        for shard in writer.missing:
            writer.write(shard, {where: np.full((100, width), shard, dtype=np.float32)})
    opened = ActivationStore.open(tmp_path / "s")
    opened.read(*where, [0])
    for format in ("safetensors", "npz"):
        tracemalloc.start()
        opened.export(tmp_path / format, format)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < n_rows * width * 4 / 4


def test_unknown_heads_are_refused(tmp_path: Path) -> None:
    rows = {"key": ["a"], "presentation": ["o"], "position": [1], "n_tokens": [2]}
    with StoreWriter(
        tmp_path / "s", datasets={("z", 0): 4}, dtype="float32", n_layers=1, shards=[[0]], rows=rows, content={}
    ) as writer:
        writer.write(0, {("z", 0): np.ones((1, 4))})
    opened = ActivationStore.open(tmp_path / "s")
    with pytest.raises(StoreError, match="does not record how many heads z layer 0 has"):
        opened.export(tmp_path / "c", "transformer_lens")
    assert [path.name for path in tmp_path.iterdir()] == ["s"]


def test_refusals(store: ActivationStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        StoreError, match=r"unknown export format 'pickle'; allowed: safetensors, npz, transformer_lens"
    ):
        store.export(tmp_path / "a", "pickle")
    with pytest.raises(StoreError, match=r"unknown site 'resid'; allowed: .*did you mean resid_"):
        store.export(tmp_path / "a", sites=["resid"])
    with pytest.raises(StoreError, match="no resid_post layer 9 in"):
        store.export(tmp_path / "a", sites=["resid_post"], layers=[9])
    with pytest.raises(StoreError, match="no rows to export"):
        store.export(tmp_path / "a", rows=[])
    with pytest.raises(StoreError, match="no sites to export; name at least one"):
        store.export(tmp_path / "a", sites=[])
    with pytest.raises(StoreError, match="no layers to export; name at least one"):
        store.export(tmp_path / "a", layers=())
    for own in ("manifest.json", "shard-00000.h5"):
        with pytest.raises(StoreError, match=f"{own} is the name of a store's own file"):
            store.export(store.directory / own)
    assert store.verify() == ()
    with pytest.raises(StoreError, match="is a directory; give the name of a file"):
        store.export(tmp_path)
    usage = namedtuple("usage", "total used free")
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda path: usage(1, 1, 10))
        with pytest.raises(StoreError, match=r"the export needs .* GB and 1e-08 GB are free"):
            store.export(tmp_path / "a")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("format", ["safetensors", "npz"])
def test_failed_export_keeps_the_old_file(
    store: ActivationStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, format: str
) -> None:
    target = tmp_path / "acts"
    target.write_text("old")

    def full(*_: Any) -> None:
        raise OSError(28, os.strerror(28))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(StoreError, match=r"no space left while writing .*acts"):
            store.export(target, format)
    assert [path.name for path in tmp_path.iterdir()] == ["acts"]
    assert target.read_text() == "old"
    store.export(target, format)
    assert target.stat().st_size > 1000
