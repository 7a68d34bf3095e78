"""Merging: the parts of several processes are the store that one process would have made."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from activations.batching import batches
from activations.capturing import Plan, capture
from activations.errors import StoreError
from activations.model import Model, from_modules
from activations.prompts import Prompt
from activations.readout import answer_tokens
from activations.store import ActivationStore, StoreWriter
from activations.store_checking import info, verify
from activations.store_merging import merge
from tests import tiny_models as tiny

ROOT = Path(__file__).parents[2]
PLAN = Plan(sites=("resid_post", "z"), layers=(0, 2), batch_tokens=40, positions=("answer", "index:0"))


@pytest.fixture(scope="module")
def model() -> Model:
    return from_modules(*tiny.tiny_llama())


@pytest.fixture(scope="module")
def prompts(model: Model) -> list[Prompt]:
    made = model.encode(tiny.MESSAGES)
    return [made[n % 4] for n in range(12)]


INDEX = [(f"k{n // 2}", ("original", "equivalent")[n % 2]) for n in range(12)]


def part(model: Model, prompts: list[Prompt], folder: Path, rows: slice, plan: Plan = PLAN) -> Path:
    capture(model, prompts[rows], plan, folder, answers=answer_tokens(model, tiny.ANSWERS), index=INDEX[rows])
    return folder


@pytest.fixture(scope="module")
def parts(model: Model, prompts: list[Prompt], tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("parts")
    cuts = (slice(0, 5), slice(5, 6), slice(6, 12))
    return [part(model, prompts, folder / str(n), rows) for n, rows in enumerate(cuts)]


def test_merged_parts_are_one_capture(model: Model, prompts: list[Prompt], parts: list[Path], tmp_path: Path) -> None:
    merged = merge(parts, tmp_path / "merged")
    single = ActivationStore.open(part(model, prompts, tmp_path / "single", slice(0, 12)))
    assert merged.rows.equals(single.rows)
    assert merged.layers == single.layers
    for site in ("resid_post", "z"):
        # The parts were cut into other batches, so the sums run in another order: equal to rounding.
        np.testing.assert_allclose(merged.stack(site), single.stack(site), atol=5e-5)
    for name, values in merged.readout.items():
        np.testing.assert_allclose(values, single.readout[name], atol=5e-5)
    assert verify(merged.directory) == ()
    assert info(merged.directory).parts == 3
    # And exactly the rows of the parts, in their order.
    kept = np.concatenate([ActivationStore.open(path).stack("z") for path in parts], axis=1)
    np.testing.assert_array_equal(merged.stack("z"), kept)
    rows = merged.select(presentation="equivalent", label="index:")
    np.testing.assert_array_equal(merged.read("z", 2, rows), kept[1, rows])


def test_same_batches_merge_to_the_same_values(model: Model, tmp_path: Path) -> None:
    """Where parts are cut where a single run cuts its batches, every value is the same bit for bit."""
    prompts = sorted((model.encode(tiny.MESSAGES)[n % 4] for n in range(12)), key=lambda one: -len(one.ids))
    cut = sum(len(rows) for rows in batches([len(one.ids) for one in prompts], PLAN.batch_tokens)[:2])
    merged = merge(
        [part(model, prompts, tmp_path / name, rows) for name, rows in (("a", slice(0, cut)), ("b", slice(cut, 12)))],
        tmp_path / "merged",
    )
    single = ActivationStore.open(part(model, prompts, tmp_path / "single", slice(0, 12)))
    for site in ("resid_post", "z"):
        np.testing.assert_array_equal(merged.stack(site), single.stack(site))
    for name, values in merged.readout.items():
        np.testing.assert_array_equal(values, single.readout[name])
    assert merged.rows.equals(single.rows)


def test_shards_are_linked_or_copied(parts: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    merged = merge(parts, tmp_path / "linked")
    sources = [path for folder in parts for path in sorted(folder.glob("shard-*.h5"))]
    targets = sorted(merged.directory.glob("shard-*.h5"))
    assert [path.stat().st_ino for path in sources] == [path.stat().st_ino for path in targets]

    def refuse(*_: Any) -> None:
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr(os, "link", refuse)
    copied = merge(parts, tmp_path / "copied")
    for one, other in zip(sources, sorted(copied.directory.glob("shard-*.h5")), strict=True):
        assert one.stat().st_ino != other.stat().st_ino
        assert one.read_bytes() == other.read_bytes()
    assert (copied.directory / "manifest.json").read_bytes() == (merged.directory / "manifest.json").read_bytes()


def test_again_and_merged_again(parts: list[Path], tmp_path: Path) -> None:
    two = merge(parts[:2], tmp_path / "two")
    stamp = (two.directory / "manifest.json").stat().st_mtime_ns
    assert merge(parts[:2], tmp_path / "two").manifest == two.manifest
    assert (two.directory / "manifest.json").stat().st_mtime_ns == stamp
    nested, flat = merge([two.directory, parts[2]], tmp_path / "nested"), merge(parts, tmp_path / "flat")
    assert nested.manifest == flat.manifest
    np.testing.assert_array_equal(nested.stack("z"), flat.stack("z"))


def test_overlap_is_refused(model: Model, prompts: list[Prompt], parts: list[Path], tmp_path: Path) -> None:
    other = part(model, prompts, tmp_path / "other", slice(4, 8))
    words = r"both hold key 'k2', presentation 'original', label 'answer'; give each prompt its own"
    with pytest.raises(StoreError, match=words):
        merge([parts[0], other], tmp_path / "out")
    with pytest.raises(StoreError, match="both hold key 'k0'"):
        merge([parts[0], parts[0]], tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_working_directory_is_no_target(parts: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    with pytest.raises(StoreError, match=r"cannot write \. \(.*\); choose a directory"):
        merge(parts, ".")
    assert [path.name for path in tmp_path.rglob("*")] == ["here"]


@pytest.mark.parametrize("change", ["adapter", "model", "template", "dtype", "sites", "positions", "answers"])
def test_what_differs_is_named(
    model: Model, prompts: list[Prompt], parts: list[Path], tmp_path: Path, change: str
) -> None:
    other, plan, made = model, PLAN, prompts
    if change in ("model", "adapter"):
        hf_model, tokenizer = tiny.tiny_llama()
        if change == "model":
            hf_model.lm_head.weight.data.mul_(2)
        other = from_modules(hf_model, tokenizer)
    if change == "template":
        hf_model, tokenizer = tiny.tiny_llama()
        tokenizer.chat_template = tiny.TEMPLATE.replace("<|end|>", "")
        other = from_modules(hf_model, tokenizer)
        made = other.encode(tiny.MESSAGES) * 3
    if change in ("dtype", "sites", "positions"):
        wanted = {"dtype": "bfloat16", "sites": ("resid_post",), "positions": ("answer",)}
        settings = {"sites": PLAN.sites, "layers": PLAN.layers, "batch_tokens": 40, "positions": PLAN.positions}
        plan = Plan(**{**settings, change: wanted[change]})
    answers = None if change == "answers" else answer_tokens(other, tiny.ANSWERS)
    folder = tmp_path / "other"
    if change == "adapter":
        name = other.attach(str(tiny.tiny_adapter(tiny.tiny_llama()[0], tmp_path / "grpo")))
        with other.use(name):
            capture(other, made[6:], plan, folder, answers=answers, index=INDEX[6:])
    else:
        capture(other, made[6:], plan, folder, answers=answers, index=INDEX[6:])
    key = {
        "adapter": "adapter.weights is None in",
        "model": "model.weights is '",
        "template": "model.template is '",
        "dtype": "dtype is 'float32' in",
        "sites": "datasets.z is '0,2' in",
        "positions": r"positions is \['answer', 'index:0'\] in",
        "answers": "labels is ",
    }
    with pytest.raises(StoreError, match=f"cannot be merged: .*{key[change]}") as caught:
        merge([parts[0], folder], tmp_path / "out")
    assert str(parts[0]) in str(caught.value)
    assert str(folder) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_damage_and_lacks_are_named_and_nothing_is_left(parts: list[Path], tmp_path: Path) -> None:
    own = Path(shutil.copytree(parts[2], tmp_path / "part"))
    shards = sorted(own.glob("shard-*.h5"))
    data = shards[1].read_bytes()
    shards[1].write_bytes(data[:-9] + bytes([data[-9] ^ 1]) + data[-8:])
    with pytest.raises(StoreError, match=r"part/shard-00001.h5 is damaged \(its bytes do not fit its sha256\)"):
        merge([parts[0], own], tmp_path / "out")
    shards[1].unlink()
    with pytest.raises(StoreError, match=r"part holds \d of \d shards"):
        merge([parts[0], own], tmp_path / "out")
    with pytest.raises(StoreError, match="1 stores to merge; give at least two"):
        merge(parts[:1], tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["part"]
    (tmp_path / "out").mkdir()
    (tmp_path / "out/mine.txt").write_text("stays")
    with pytest.raises(StoreError, match="out exists and holds something else"):
        merge(parts, tmp_path / "out")
    assert (tmp_path / "out/mine.txt").read_text() == "stays"


def test_a_writer_refuses_a_merged_store(
    model: Model, prompts: list[Prompt], parts: list[Path], tmp_path: Path
) -> None:
    merge(parts, tmp_path / "merged")
    with pytest.raises(StoreError, match="was captured under other settings: prompts is "):
        part(model, prompts, tmp_path / "merged", slice(0, 12))
    shard = tmp_path / "merged/shard-00001.h5"
    shard.unlink()
    assert verify(tmp_path / "merged") == (f"{shard} is missing; merge the parts again",)


CHILD = """
import sys
import numpy as np
from activations.store import StoreWriter
first, last = int(sys.argv[2]), int(sys.argv[3])
numbers = list(range(first, last))
rows = {"key": [str(n) for n in numbers], "presentation": ["o"] * len(numbers), "position": numbers, "n_tokens": numbers}
shards = [list(range(at, min(at + 3, len(numbers)))) for at in range(0, len(numbers), 3)]
where = ("resid_post", 0)
writer = StoreWriter(
    sys.argv[1], datasets={where: 8}, dtype="float32", n_layers=1, shards=shards, rows=rows, content={"model": "m"}
)
for shard in writer.missing:
    writer.write(shard, {where: np.array([[numbers[row]] * 8 for row in shards[shard]])})
"""


def test_processes_side_by_side(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    cuts = (("0", "7"), ("7", "12"), ("12", "20"))
    children = [
        subprocess.Popen([sys.executable, "-c", CHILD, str(tmp_path / first), first, last], env=environment)
        for first, last in cuts
    ]
    assert [child.wait() for child in children] == [0, 0, 0]
    merged = merge([tmp_path / first for first, _ in cuts], tmp_path / "all")
    np.testing.assert_array_equal(merged["resid_post", 0][:, 3], np.arange(20))
    assert merged.rows["key"].tolist() == [str(n) for n in range(20)]


def test_widths_that_differ_are_named(tmp_path: Path) -> None:
    rows = {"presentation": ["o"], "position": [1], "n_tokens": [2]}
    for name, width in (("a", 4), ("b", 6)):
        with StoreWriter(
            tmp_path / name,
            datasets={("pattern", 0): width},
            dtype="float32",
            n_layers=1,
            shards=[[0]],
            rows={**rows, "key": [name]},
            content={"pattern": {"width": width // 2, "heads": {"0": 2}}},
        ) as writer:
            writer.write(0, {("pattern", 0): np.ones((1, width))})
    with pytest.raises(StoreError, match=r"pattern.width is 2 in .*/a and 3 in .*/b; widths.pattern layer 0 is 4"):
        merge([tmp_path / "a", tmp_path / "b"], tmp_path / "ab")
