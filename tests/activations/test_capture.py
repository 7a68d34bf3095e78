"""Capture: the right tensors, one pass a batch, an untouched model, and a run that can be killed and resumed."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import namedtuple
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from activations.batching import batches, forward_arguments, pad
from activations.capturing import Plan, capture
from activations.errors import ModelError, StoreError
from activations.model import Model, from_modules
from activations.prompts import Prompt
from activations.readout import answer_tokens, read
from activations.sites import SITES, choose, taps
from activations.store import ActivationStore, StoreWriter, pack, unpack
from activations.taps import backbone, tapped
from tests import tiny_models as tiny

MODELS: dict[str, Callable[[], Any]] = {
    "llama": tiny.tiny_llama,
    "qwen3": tiny.tiny_qwen3,
    "gpt2": tiny.tiny_gpt2,
    "gemma2": tiny.tiny_gemma2,
    "neox": tiny.tiny_neox,
    "moe": tiny.tiny_moe,
    "hybrid": tiny.tiny_hybrid,
}
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module", params=list(MODELS))
def any_model(request: pytest.FixtureRequest) -> Model:
    return from_modules(*MODELS[request.param]())


@pytest.fixture(scope="module")
def model() -> Model:
    return from_modules(*tiny.tiny_llama())


def prompts_for(model: Model, n: int = 4) -> list[Prompt]:
    made = model.encode(tiny.MESSAGES)
    return [made[i % len(made)] for i in range(n)]


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def hook_count(model: Model) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.hf_model.modules())


@contextmanager
def counted(module: torch.nn.Module) -> Iterator[list[int]]:
    sizes: list[int] = []

    def count(module: Any, args: Any, kwargs: Any) -> None:
        sizes.append(len(kwargs["input_ids"]))

    handle = module.register_forward_pre_hook(count, with_kwargs=True)
    yield sizes
    handle.remove()


@pytest.fixture(scope="module")
def middle_free(any_model: Model) -> bool:
    """Whether attention and MLP read the same stream, so that there is nothing between them."""
    return not taps(any_model, ("resid_mid", 0))


def sites_of(middle_free: bool) -> tuple[str, ...]:
    return tuple(site for site in SITES if not (middle_free and site == "resid_mid"))


def single(model: Model, prompt: Prompt) -> dict[tuple[str, int], np.ndarray]:
    """Every site of one unpadded prompt, by transformers' own hidden states and by hooks written out here."""
    structure = model.structure
    inputs: dict[str, torch.Tensor] = {}
    outputs: dict[str, torch.Tensor] = {}

    def keep(name: str) -> Any:
        def after(module: Any, args: Any, kwargs: Any, output: Any) -> None:
            inputs[name] = (args[0] if args else kwargs["hidden_states"])[0, -1].clone()
            outputs[name] = (output[0] if isinstance(output, tuple) else output)[0, -1].clone()

        return after

    named = [
        n for part in (structure.blocks, structure.out_projections, structure.attn_out, structure.mlp_out) for n in part
    ]
    handles = [model.module(n).register_forward_hook(keep(n), with_kwargs=True) for n in set(filter(None, named))]
    with torch.inference_mode():
        ids = torch.tensor([prompt.ids])
        hidden = model.hf_model(input_ids=ids, use_cache=False, output_hidden_states=True).hidden_states
    for handle in handles:
        handle.remove()
    found = {("embed", 0): hidden[0][0, -1]}
    for layer in range(model.n_layers):
        block, out = structure.blocks[layer], structure.out_projections[layer]
        found["resid_pre", layer] = hidden[layer][0, -1]
        found["resid_post", layer] = hidden[layer + 1][0, -1] if layer + 1 < model.n_layers else outputs[block]
        found["z", layer] = inputs[str(out)]
        found["attn_out", layer] = outputs[str(structure.attn_out[layer])]
        found["mlp_out", layer] = outputs[str(structure.mlp_out[layer])]
        found["resid_mid", layer] = found["resid_pre", layer] + found["attn_out", layer]
    with torch.no_grad():
        last = model.module(structure.final_norm)(found["resid_post", model.n_layers - 1])
    torch.testing.assert_close(last, hidden[-1][0, -1], atol=1e-5, rtol=1e-5)  # hidden_states[-1] is behind the norm
    return {where: value.detach().numpy() for where, value in found.items()}


def test_every_site_equals_unpadded_single_prompts(any_model: Model, middle_free: bool, tmp_path: Path) -> None:
    prompts, sites = prompts_for(any_model), sites_of(middle_free)
    store = capture(any_model, prompts, Plan(sites=sites, batch_tokens=60), tmp_path / "s")
    for row, prompt in enumerate(prompts):
        for where, expected in single(any_model, prompt).items():
            if where[0] in sites:
                np.testing.assert_allclose(store[where][row], expected, atol=5e-5, err_msg=str(where))
    for layer in range(any_model.n_layers):
        added = store["resid_pre", layer] + store["attn_out", layer] + store["mlp_out", layer]
        np.testing.assert_allclose(added, store["resid_post", layer], atol=5e-5)
        if not middle_free:
            added = store["resid_mid", layer] + store["mlp_out", layer]
            np.testing.assert_allclose(added, store["resid_post", layer], atol=5e-5)
    np.testing.assert_array_equal(store["embed", 0], store["resid_pre", 0])


def test_readout_is_the_one_of_read(any_model: Model, tmp_path: Path) -> None:
    prompts, answers = prompts_for(any_model), answer_tokens(any_model, tiny.ANSWERS)
    # Layer 0 alone is stored; the readout needs the last block all the same.
    store = capture(any_model, prompts, Plan(layers=(0,), batch_tokens=60), tmp_path / "s", answers=answers)
    expected = read(any_model, prompts, answers, batch_tokens=60)
    for name in ("logit", "logsumexp", "top"):
        np.testing.assert_array_equal(store.readout[name], getattr(expected, name).numpy(), err_msg=name)
    assert store.layers == {"resid_post": (0,)}


def test_hooks_change_no_bit_and_leave_nothing(any_model: Model, middle_free: bool) -> None:
    prompts = prompts_for(any_model)
    arguments = forward_arguments(any_model.hf_model, pad(prompts, "cpu", any_model.pad_id))
    before = hook_count(any_model)
    with torch.inference_mode():
        plain = any_model.hf_model(**arguments).logits
        sites = [site for site in sites_of(middle_free) if site != "pattern"]
        with tapped(any_model, choose(any_model, sites, None), len(prompts), torch.float32):
            watched = any_model.hf_model(**arguments).logits
            assert hook_count(any_model) > before
    assert torch.equal(plain, watched)
    assert hook_count(any_model) == before


def test_backbone_leaves_the_unembedding_out(any_model: Model) -> None:
    network = backbone(any_model)
    assert network is not any_model.hf_model
    assert any_model.module(any_model.structure.head) not in set(network.modules())


def test_one_forward_pass_a_batch(model: Model, tmp_path: Path) -> None:
    prompts, plan = prompts_for(model, 9), Plan(sites=("resid_post", "z"), batch_tokens=60)
    expected = batches([len(p.ids) for p in prompts], 60)
    with counted(backbone(model)) as sizes:
        capture(model, prompts, plan, tmp_path / "s", answers=answer_tokens(model, tiny.ANSWERS))
    assert sizes == [len(rows) for rows in expected]
    with counted(backbone(model)) as sizes:
        capture(model, prompts, plan, tmp_path / "s", answers=answer_tokens(model, tiny.ANSWERS))
    assert sizes == []


def test_model_is_left_as_it_was(model: Model, tmp_path: Path) -> None:
    def state() -> list[Any]:
        config = model.hf_model.config
        flags = [(m.training, len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.hf_model.modules()]
        return [flags, config.to_json_string(), config._attn_implementation, model.tokenizer.padding_side, model.active]

    before = state()
    capture(model, prompts_for(model), Plan(), tmp_path / "s")
    assert state() == before

    def fail(*_: Any) -> None:
        raise RuntimeError("stop")

    handle = model.module(model.structure.blocks[1]).register_forward_hook(fail)
    with pytest.raises(RuntimeError, match="stop"):
        capture(model, prompts_for(model), Plan(), tmp_path / "t")
    handle.remove()
    assert state() == before
    assert not list((tmp_path / "t").glob("*shard*"))


def test_gradients_are_not_recorded(model: Model, tmp_path: Path) -> None:
    seen: list[bool] = []
    handle = model.module(model.structure.blocks[0]).register_forward_hook(
        lambda module, args, output: seen.append(torch.is_inference_mode_enabled())
    )
    capture(model, prompts_for(model), Plan(), tmp_path / "s")
    handle.remove()
    assert seen == [True]


def test_every_option_changes_something(model: Model, tmp_path: Path) -> None:
    prompts = prompts_for(model, 5)
    base = capture(model, prompts, Plan(), tmp_path / "base")
    half = capture(model, prompts, Plan(dtype="bfloat16"), tmp_path / "half")
    np.testing.assert_array_equal(half["resid_post", 1], unpack(pack(base["resid_post", 1], "bfloat16"), "bfloat16"))
    short = capture(model, prompts, Plan(dtype="float16"), tmp_path / "short")
    np.testing.assert_array_equal(short["resid_post", 1], base["resid_post", 1].astype(np.float16).astype(np.float32))
    assert capture(model, prompts, Plan(layers=(-1, 0)), tmp_path / "some").layers == {"resid_post": (0, 2)}
    assert capture(model, prompts, Plan(sites=["z"]), tmp_path / "z").layers == {"z": (0, 1, 2)}
    small = capture(model, prompts, Plan(batch_tokens=1), tmp_path / "small")
    assert small.manifest["content"]["n_shards"] == 5 > base.manifest["content"]["n_shards"]
    np.testing.assert_allclose(small["resid_post", 2], base["resid_post", 2], atol=5e-5)
    index = [("k0", "original"), ("k0", "equivalent"), ("k1", "original"), ("k1", "equivalent"), ("k2", "original")]
    rows = capture(model, prompts, Plan(), tmp_path / "index", index=index).rows
    assert list(zip(rows["key"], rows["presentation"], strict=True)) == index
    assert rows["n_tokens"].tolist() == [len(p.ids) for p in prompts]
    assert rows["position"].tolist() == [p.answer for p in prompts]


def test_size_is_what_is_stored(model: Model, tmp_path: Path) -> None:
    prompts, plan = prompts_for(model, 6), Plan(sites=("resid_post", "z"), layers=(0, 2), dtype="bfloat16")
    capture(model, prompts, plan, tmp_path)
    assert plan.size(model, prompts) == 6 * 2 * (32 + 32) * 2
    files = sum(path.stat().st_size for path in tmp_path.glob("shard-*.h5"))
    assert plan.size(model, prompts) < files < plan.size(model, prompts) + 1024 * (2 * 2 + 8)


@pytest.mark.parametrize("stop_at", [1, 2, 3])
def test_stopped_run_resumes_to_the_same_bytes(model: Model, tmp_path: Path, stop_at: int) -> None:
    prompts, plan, answers = prompts_for(model, 12), Plan(batch_tokens=40), answer_tokens(model, tiny.ANSWERS)
    capture(model, prompts, plan, tmp_path / "whole", answers=answers)
    calls: list[int] = []

    def stop(done: int) -> None:
        calls.append(done)
        if len(calls) == stop_at:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        capture(model, prompts, plan, tmp_path / "cut", answers=answers, progress=stop)
    assert hook_count(model) == 0
    assert not any(thread.name.startswith("activation-store") for thread in threading.enumerate())
    assert not list((tmp_path / "cut").glob(".*"))
    stored = contents(tmp_path / "cut")
    assert stop_at <= len(stored) - 1 < len(contents(tmp_path / "whole")) - 1
    with pytest.raises(StoreError, match=r"holds \d of \d shards; run the same command again"):
        ActivationStore.open(tmp_path / "cut")
    later: list[int] = []
    capture(model, prompts, plan, tmp_path / "cut", answers=answers, progress=later.append)
    assert later[0] >= calls[-1]
    assert later[-1] == 12
    assert later == sorted(set(later))
    assert contents(tmp_path / "cut") == contents(tmp_path / "whole")


CHILD = """
import sys, time
from pathlib import Path
from activations import capturing as c, model as m, store_writing as s
from tests import tiny_models as tiny
model = m.from_modules(*tiny.tiny_llama())
made = model.encode(tiny.MESSAGES)
commit = s.commit
def slowly(path, data, check):
    def checked(temporary):
        time.sleep(0.05)
        check(temporary)
        print(temporary.name, flush=True)
        time.sleep(0.05)
    commit(path, data, checked)
s.commit = slowly
c.capture(model, [made[i % 4] for i in range(24)], c.Plan(batch_tokens=30), sys.argv[1])
"""


def test_kill_loses_at_most_the_shard_in_flight(model: Model, tmp_path: Path) -> None:
    lines = 9
    script, folder = tmp_path / "child.py", tmp_path / "cut"
    script.write_text(CHILD)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    child = subprocess.Popen([sys.executable, script, folder], stdout=subprocess.PIPE, env=environment, text=True)
    assert child.stdout is not None
    for _ in range(lines):
        assert child.stdout.readline().endswith(".tmp\n")
    time.sleep(0.02)
    os.kill(child.pid, signal.SIGKILL)
    assert child.wait() == -signal.SIGKILL
    child.stdout.close()
    left = contents(folder)
    assert sum(name.endswith(".tmp") for name in left) <= 1
    whole = {name for name in left if name.startswith("shard-")}
    assert len(whole) >= lines - 2  # one line is the manifest's, one may be the shard in flight
    prompts, plan = prompts_for(model, 24), Plan(batch_tokens=30)
    capture(model, prompts, plan, tmp_path / "whole")
    capture(model, prompts, plan, folder)
    assert contents(folder) == contents(tmp_path / "whole")
    assert all(contents(folder)[name] == left[name] for name in whole)


def test_adapter_in_use_is_captured_and_named(tmp_path: Path) -> None:
    hf_model, tokenizer = tiny.tiny_llama()
    path = tiny.tiny_adapter(hf_model, tmp_path / "grpo")
    bare = from_modules(hf_model, tokenizer)
    prompts, plan = prompts_for(bare), Plan(sites=("resid_post", "z"))
    before = capture(bare, prompts, plan, tmp_path / "before")
    model = from_modules(hf_model, tokenizer)
    name = model.attach(str(path))
    # The same base weights: an attached adapter that is off changes neither the numbers nor the digest.
    base = capture(model, prompts, plan, tmp_path / "base")
    assert base.manifest["digest"] == before.manifest["digest"]
    np.testing.assert_array_equal(base.stack("resid_post"), before.stack("resid_post"))
    with model.use(name):
        tuned = capture(model, prompts, plan, tmp_path / "tuned")
        with pytest.raises(StoreError, match=r"adapter.weights is None in the store and '[0-9a-f]{56}… now"):
            capture(model, prompts, plan, tmp_path / "base")
    assert np.abs(tuned["resid_post", 2] - base["resid_post", 2]).max() > 1e-3
    assert tuned.manifest["content"]["adapter"]["weights"] == model.identity["adapters"][name]["weights"]
    assert tuned.manifest["notes"]["adapter"] == name


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"plan": Plan(dtype="bfloat16")}, "dtype is 'float32' in the store and 'bfloat16' now"),
        ({"plan": Plan(batch_tokens=60)}, "batch_tokens is 8192 in the store and 60 now"),
        ({"plan": Plan(layers=(0,))}, "datasets.resid_post is '0-2' in the store and '0' now"),
        ({"prompts": slice(0, 3)}, "n_rows is 4 in the store and 3 now"),
        ({"prompts": slice(None, None, -1)}, "prompts is '"),
        ({"answers": True}, "labels is None in the store and"),
        ({"index": [(str(n), "x") for n in range(4)]}, "rows is '"),
    ],
)
def test_other_settings_are_refused(model: Model, tmp_path: Path, change: dict[str, Any], words: str) -> None:
    prompts = prompts_for(model)
    capture(model, prompts, Plan(), tmp_path / "s")
    with pytest.raises(StoreError) as caught:
        capture(
            model,
            prompts[change.get("prompts", slice(None))],
            change.get("plan", Plan()),
            tmp_path / "s",
            answers=answer_tokens(model, tiny.ANSWERS) if "answers" in change else None,
            index=change.get("index"),
        )
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_manifest_says_what_made_the_numbers(model: Model, tmp_path: Path) -> None:
    store = capture(model, prompts_for(model), Plan(), tmp_path, answers=answer_tokens(model, tiny.ANSWERS))
    content = store.manifest["content"]
    for key in ("weights", "revision", "template", "dtype", "device", "attention"):
        assert key in content["model"]
    assert {"torch", "transformers", "peft"} <= content["model"]["versions"].keys()
    assert content["labels"] == ["yes", "no"]
    assert len(content["prompts"]) == 64
    assert store.manifest["notes"]["model"] == "in-memory"


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"sites": ("resid_midd",)}, f"unknown site 'resid_midd'; allowed: {', '.join(SITES)}, and TransformerLens"),
        ({"positions": "query"}, "positions is the text 'query'; give a list"),
        ({"positions": ()}, "names no positions"),
        ({"sites": ("blocks.1.hook_z",), "layers": (0,)}, "each site names its layer (blocks.1.z); leave layers out"),
        ({"sites": "z"}, "sites is the text 'z'; give a list"),
        ({"sites": ()}, "names no sites"),
        ({"layers": ()}, "names no layers"),
        ({"dtype": "int8"}, "unknown storage dtype 'int8'; allowed: float32, float16, bfloat16"),
        ({"batch_tokens": 0}, "batch_tokens is 0; give a positive number"),
    ],
)
def test_impossible_plans_are_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(StoreError) as caught:
        Plan(**settings)
    assert words in str(caught.value)


def test_layers_and_sites_a_model_lacks_are_named(model: Model, tmp_path: Path) -> None:
    for layer in (3, -4):
        with pytest.raises(StoreError, match=f"no layer {layer} in in-memory; it has layers 0 to 2"):
            capture(model, prompts_for(model), Plan(layers=(0, layer)), tmp_path / "s")
    assert not (tmp_path / "s").exists()
    import dataclasses

    lacking = from_modules(*tiny.tiny_llama())
    lacking.structure = dataclasses.replace(
        lacking.structure, attn_out=(None, *model.structure.attn_out[1:]), mlp_out=(None,) * 3
    )
    with pytest.raises(StoreError, match=r"no attn_out in layers 0; it has attn_out in layers 1-2, and there embed"):
        capture(lacking, prompts_for(model), Plan(sites=("attn_out",), layers=(0, 1)), tmp_path / "s")
    with pytest.raises(StoreError, match=r"no mlp_out in layers 0-2; it has mlp_out in no layer"):
        capture(lacking, prompts_for(model), Plan(sites=("mlp_out",)), tmp_path / "s")
    store = capture(lacking, prompts_for(model), Plan(sites=("attn_out",)), tmp_path / "s")
    assert store.layers == {"attn_out": (1, 2)}


def test_z_widths_differ_by_layer_in_a_hybrid(tmp_path: Path) -> None:
    hybrid = from_modules(*tiny.tiny_hybrid())
    store = capture(hybrid, prompts_for(hybrid), Plan(sites=("z",)), tmp_path)
    assert [store["z", layer].shape[1] for layer in range(4)] == [32, 32, 32, 64]


def test_full_disk_is_refused_before_the_start(model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**9, 10**9, 500))
    with pytest.raises(StoreError, match=r"the plan needs .* GB in .* and 5e-07 GB are free; .*bfloat16"):
        capture(model, prompts_for(model), Plan(), tmp_path / "s")
    assert not (tmp_path / "s").exists()


def test_full_disk_in_the_middle_keeps_what_is_whole(
    model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts, plan = prompts_for(model, 8), Plan(batch_tokens=60)
    replace = os.replace

    def full(source: Any, target: Any) -> None:
        if "shard-00002" in str(target):
            raise OSError(28, "No space left on device")
        replace(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", full)
        with pytest.raises(StoreError, match=r"no space left while writing .*shard-00002.h5"):
            capture(model, prompts, plan, tmp_path / "s")
    assert sorted(contents(tmp_path / "s")) == ["manifest.json", "shard-00000.h5", "shard-00001.h5"]
    capture(model, prompts, plan, tmp_path / "s")
    capture(model, prompts, plan, tmp_path / "whole")
    assert contents(tmp_path / "s") == contents(tmp_path / "whole")


def test_non_finite_activations_are_refused(tmp_path: Path) -> None:
    hf_model, tokenizer = tiny.tiny_llama()
    model = from_modules(hf_model, tokenizer)
    prompts = prompts_for(model)
    row = 2

    def spoil(module: Any, args: Any, output: Any) -> Any:
        output[batches([len(p.ids) for p in prompts], 8192)[0].index(row), -1, 3] = float("nan")
        return output

    handle = model.module(model.structure.blocks[1]).register_forward_hook(spoil)
    with pytest.raises(StoreError, match=f"resid_post layer 1 of row {row} is not finite"):
        capture(model, prompts, Plan(), tmp_path / "s")
    handle.remove()
    assert not list((tmp_path / "s").glob("*shard*"))


def test_module_that_does_not_run_is_an_error(model: Model) -> None:
    with (
        pytest.raises(ModelError, match=r"resid_post layer 0 of 'in-memory' did not run"),
        tapped(model, {("resid_post", 0): 32}, 1, torch.float32),
    ):
        pass


def test_wrong_calls_are_refused(model: Model, tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="no prompts to capture"):
        capture(model, [], Plan(), tmp_path)
    with pytest.raises(StoreError, match="index has 1 entries for 4 prompts"):
        capture(model, prompts_for(model), Plan(), tmp_path, index=[("a", "b")])


def test_training_mode_is_refused(tmp_path: Path) -> None:
    model = from_modules(*tiny.tiny_llama())
    model.hf_model.train()
    with pytest.raises(ModelError, match=r"in training mode, where dropout is random; call \.eval\(\)"):
        capture(model, prompts_for(model), Plan(), tmp_path)


def test_half_precision_models_are_stored_exactly(tmp_path: Path) -> None:
    hf_model, tokenizer = tiny.tiny_llama()
    model = from_modules(hf_model.to(torch.bfloat16), tokenizer)
    prompts, answers = prompts_for(model), answer_tokens(model, tiny.ANSWERS)
    half = capture(model, prompts, Plan(dtype="bfloat16"), tmp_path / "half", answers=answers)
    full = capture(model, prompts, Plan(dtype="float32"), tmp_path / "full", answers=answers)
    np.testing.assert_array_equal(half.stack("resid_post"), full.stack("resid_post"))
    np.testing.assert_array_equal(half.readout["logit"], full.readout["logit"])
    np.testing.assert_array_equal(half.readout["logit"], read(model, prompts, answers).logit.numpy())


def test_memory_stays_flat(model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The buffers of 60 batches are two, however slow the disk; none is written to before it was stored."""
    stored: list[int] = []
    write = StoreWriter.write

    def slow(self: StoreWriter, shard: int, activations: Any, *rest: Any) -> None:
        time.sleep(0.002)
        write(self, shard, activations, *rest)
        stored.append(next(iter(activations.values())).ctypes.data)

    monkeypatch.setattr(StoreWriter, "write", slow)
    prompts = prompts_for(model, 60)
    store = capture(model, prompts, Plan(batch_tokens=1), tmp_path)
    assert len(stored) == 60
    assert len(set(stored)) == 2
    for row in range(4, 60):
        np.testing.assert_array_equal(store["resid_post", 2][row], store["resid_post", 2][row % 4])
