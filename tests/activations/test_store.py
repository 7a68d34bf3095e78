"""The store: what is written comes back, and no damage, kill or change of settings passes unnoticed."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import time
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from activations.errors import StoreError
from activations.store import ActivationStore, StoreWriter, pack, unpack

N_ROWS, WIDTH, LAYERS = 7, 5, 3
SHARDS = [[4, 0, 6], [1, 2], [5, 3]]
RNG = np.random.default_rng(0)
VALUES = RNG.normal(size=(LAYERS, N_ROWS, WIDTH)).astype(np.float32)
LOGIT = RNG.normal(size=(N_ROWS, 2)).astype(np.float32)
ROWS = {
    "key": [f"k{n // 2}" for n in range(N_ROWS)],
    "presentation": ["original", "equivalent"] * 3 + ["original"],
    "position": list(range(10, 10 + N_ROWS)),
    "n_tokens": list(range(11, 11 + N_ROWS)),
}
CONTENT = {"model": {"weights": "abc", "versions": {"torch": "2.13"}}, "batch_tokens": 64}


def writer(folder: Path, **changes: Any) -> StoreWriter:
    settings: dict[str, Any] = {
        "datasets": {("resid_post", layer): WIDTH for layer in range(LAYERS)},
        "dtype": "float32",
        "n_layers": LAYERS,
        "shards": SHARDS,
        "rows": ROWS,
        "content": CONTENT,
        "labels": ("yes", "no"),
    }
    return StoreWriter(folder, **{**settings, **changes})


def write(target: StoreWriter, shard: int, values: np.ndarray = VALUES) -> None:
    rows = SHARDS[shard]
    readout = {"logit": LOGIT[rows], "logsumexp": LOGIT[rows, 0], "top": np.array(rows)}
    target.write(shard, {("resid_post", layer): values[layer, rows] for layer in range(LAYERS)}, readout)


def fill(folder: Path, **changes: Any) -> ActivationStore:
    target = writer(folder, **changes)
    for shard in target.missing:
        write(target, shard)
    return ActivationStore.open(folder)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.is_file()}


def test_rows_come_back_in_prompt_order(tmp_path: Path) -> None:
    store = fill(tmp_path)
    for layer in range(LAYERS):
        got = store["resid_post", layer]
        assert got.dtype == np.float32
        np.testing.assert_array_equal(got, VALUES[layer])
    np.testing.assert_array_equal(store["resid_post", -1], VALUES[-1])
    np.testing.assert_array_equal(store.stack("resid_post"), VALUES)
    np.testing.assert_array_equal(store.stack("resid_post", [2, 0]), VALUES[[2, 0]])
    assert len(store) == N_ROWS
    assert store.layers == {"resid_post": (0, 1, 2)}
    assert "resid_post layers 0-2" in repr(store)


def test_readout_and_row_index(tmp_path: Path) -> None:
    store = fill(tmp_path)
    np.testing.assert_array_equal(store.readout["logit"], LOGIT)
    np.testing.assert_array_equal(store.readout["logsumexp"], LOGIT[:, 0])
    np.testing.assert_array_equal(store.readout["top"], np.arange(N_ROWS))
    assert store.rows.to_dict("list") == {**ROWS, "label": ["answer"] * N_ROWS}
    assert list(store.rows.columns) == ["key", "presentation", "label", "position", "n_tokens"]


def test_store_without_readout_says_so(tmp_path: Path) -> None:
    target = writer(tmp_path, labels=None)
    for shard, rows in enumerate(SHARDS):
        target.write(shard, {("resid_post", layer): VALUES[layer, rows] for layer in range(LAYERS)})
    with pytest.raises(StoreError, match="holds no readout; capture with answers"):
        _ = ActivationStore.open(tmp_path).readout


def test_bfloat16_is_rounded_like_torch_and_named(tmp_path: Path) -> None:
    import torch

    values = np.concatenate([RNG.normal(size=4096) * 10.0 ** RNG.integers(-30, 30, 4096), [0.0, -0.0, 1e-45, 3.0e38]])
    values = values.astype(np.float32)
    expected = torch.from_numpy(values).to(torch.bfloat16)
    np.testing.assert_array_equal(pack(values, "bfloat16"), expected.view(torch.uint16).numpy())
    np.testing.assert_array_equal(unpack(pack(values, "bfloat16"), "bfloat16"), expected.float().numpy())
    store = fill(tmp_path, dtype="bfloat16")
    np.testing.assert_array_equal(store["resid_post", 1], unpack(pack(VALUES[1], "bfloat16"), "bfloat16"))
    with h5py.File(tmp_path / "shard-00000.h5") as file:
        dataset = file["acts/resid_post/L1"]
        assert dataset.dtype == np.uint16
        assert dataset.attrs["dtype"] == b"bfloat16"
        assert dataset.fletcher32
        assert dataset.chunks == dataset.shape == (3, WIDTH)


def test_float16_refuses_what_does_not_fit(tmp_path: Path) -> None:
    big = VALUES.copy()
    big[1, 6, 2] = -70000
    words = "resid_post layer 1 of row 6 reaches 70000, over the float16 limit of 65504; capture with dtype bfloat16"
    with pytest.raises(StoreError, match=words):
        write(writer(tmp_path, dtype="float16"), 0, big)
    assert not list(tmp_path.glob("*shard*"))
    assert fill(tmp_path / "fits", dtype="float16")["resid_post", 0] == pytest.approx(VALUES[0], abs=2e-3)
    # Nothing was stored, so the same directory takes the advised setting.
    assert fill(tmp_path, dtype="bfloat16").dtype == "bfloat16"


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_non_finite_names_row_site_and_layer(tmp_path: Path, bad: float) -> None:
    values = VALUES.copy()
    values[2, 6, 4] = bad
    with pytest.raises(StoreError, match="resid_post layer 2 of row 6 is not finite"):
        write(writer(tmp_path), 0, values)
    assert not list(tmp_path.glob("*shard*"))


def test_missing_site_or_layer_names_what_is_there(tmp_path: Path) -> None:
    store = fill(tmp_path)
    with pytest.raises(StoreError, match=r"no z layer 0 in .*it holds resid_post layers 0-2; choose one of these"):
        _ = store["z", 0]
    for layer in (3, -4):
        with pytest.raises(StoreError, match=f"no resid_post layer {layer} in"):
            _ = store["resid_post", layer]
    with pytest.raises(StoreError, match="no resid_mid layer 0"):
        store.stack("resid_mid")


def test_embed_is_the_input_of_the_first_block(tmp_path: Path) -> None:
    target = writer(tmp_path, datasets={("resid_pre", 0): WIDTH}, labels=None)
    for shard, rows in enumerate(SHARDS):
        target.write(shard, {("resid_pre", 0): VALUES[0, rows]})
    np.testing.assert_array_equal(ActivationStore.open(tmp_path)["embed", 0], VALUES[0])


def test_widths_may_differ_by_layer(tmp_path: Path) -> None:
    target = writer(tmp_path, datasets={("z", 0): WIDTH, ("z", 2): WIDTH - 1}, labels=None)
    for shard, rows in enumerate(SHARDS):
        target.write(shard, {("z", 0): VALUES[0, rows], ("z", 2): VALUES[2, rows, 1:]})
    store = ActivationStore.open(tmp_path)
    np.testing.assert_array_equal(store["z", 2], VALUES[2, :, 1:])
    with pytest.raises(StoreError, match=r"cannot stack z layers of widths \[4, 5\]"):
        store.stack("z")


def test_incomplete_store_says_how_much_is_there(tmp_path: Path) -> None:
    write(writer(tmp_path), 1)
    with pytest.raises(StoreError, match="holds 1 of 3 shards; run the same command again: it resumes"):
        ActivationStore.open(tmp_path)
    with pytest.raises(StoreError, match=r"holds no activation store \(no manifest.json\)"):
        ActivationStore.open(tmp_path / "nowhere")


def test_resume_writes_only_what_is_missing_and_the_same_bytes(tmp_path: Path) -> None:
    fill(tmp_path / "whole")
    write(writer(tmp_path / "resumed"), 1)
    stamp = (tmp_path / "resumed/shard-00001.h5").stat()
    again = writer(tmp_path / "resumed")
    assert again.missing == (0, 2)
    fill(tmp_path / "resumed")
    after = (tmp_path / "resumed/shard-00001.h5").stat()
    assert (after.st_mtime_ns, after.st_ino) == (stamp.st_mtime_ns, stamp.st_ino)
    assert contents(tmp_path / "whole") == contents(tmp_path / "resumed")
    assert writer(tmp_path / "resumed").missing == ()


def test_bytes_do_not_depend_on_the_clock(tmp_path: Path) -> None:
    fill(tmp_path / "now")
    time.sleep(1.1)  # HDF5 keeps whole seconds
    fill(tmp_path / "later")
    assert contents(tmp_path / "now") == contents(tmp_path / "later")


def test_other_settings_are_refused_key_by_key(tmp_path: Path) -> None:
    fill(tmp_path)
    other = {"model": {"weights": "abd", "versions": {"torch": "2.14"}}, "batch_tokens": 64, "new": 1}
    with pytest.raises(StoreError) as caught:
        writer(tmp_path, content=other, dtype="bfloat16")
    text = str(caught.value)
    assert "\n" not in text
    for part in (
        "dtype is 'float32' in the store and 'bfloat16' now",
        "model.weights is 'abc' in the store and 'abd' now",
        "model.versions.torch is '2.13' in the store and '2.14' now",
        "new is absent in the store and 1 now",
        "choose another directory",
    ):
        assert part in text
    assert "batch_tokens" not in text
    assert ActivationStore.open(tmp_path).dtype == "float32"


@pytest.mark.parametrize(
    "change",
    [
        {"dtype": "bfloat16"},
        {"datasets": {("resid_post", 0): WIDTH}},
        {"labels": ("no", "yes")},
        {"labels": None},
        {"shards": [[0, 4, 6], [1, 2], [5, 3]]},
        {"rows": {**ROWS, "key": list("abcdefg")}},
        {"n_layers": 4},
        {"content": {}},
    ],
)
def test_everything_that_matters_changes_the_digest(tmp_path: Path, change: dict[str, Any]) -> None:
    assert writer(tmp_path / "a").digest != writer(tmp_path / "b", **change).digest


def test_notes_are_kept_and_do_not_matter(tmp_path: Path) -> None:
    assert writer(tmp_path / "a").digest == writer(tmp_path / "b", notes={"host": "x"}).digest
    assert json.loads((tmp_path / "b/manifest.json").read_text())["notes"] == {"host": "x"}


def test_no_flipped_byte_passes(tmp_path: Path) -> None:
    """Each flipped byte of a shard is found on resuming; reading either finds it or gives the right numbers."""
    store = fill(tmp_path)
    path = tmp_path / "shard-00001.h5"
    good = path.read_bytes()
    resume = writer(tmp_path)
    for position in range(0, len(good), 29):  # all positions were tried once, with the same outcome
        path.write_bytes(good[:position] + bytes([good[position] ^ 0x10]) + good[position + 1 :])
        assert not resume._whole(1), position
        with contextlib.suppress(StoreError):
            np.testing.assert_array_equal(store.stack("resid_post"), VALUES)
    path.write_bytes(good)
    assert resume._whole(1)


def test_flipped_value_names_the_file(tmp_path: Path) -> None:
    store = fill(tmp_path)
    path = tmp_path / "shard-00001.h5"
    good = path.read_bytes()
    at = good.index(VALUES[2, SHARDS[1][0]].tobytes())
    path.write_bytes(good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :])
    with pytest.raises(StoreError, match=r"shard-00001.h5 is damaged .*run the same command again") as caught:
        _ = store["resid_post", 2]
    assert "\n" not in str(caught.value)
    np.testing.assert_array_equal(store["resid_post", 1], VALUES[1])  # the other layers are whole
    assert writer(tmp_path).missing == (1,)


@pytest.mark.parametrize(
    "damage", ["truncated", "shorter by one", "empty", "text", "foreign", "hdf5", "swapped", "zeros"]
)
def test_damaged_shard_is_made_anew(tmp_path: Path, damage: str) -> None:
    fill(tmp_path)
    before = contents(tmp_path)
    path = tmp_path / "shard-00002.h5"
    good = path.read_bytes()
    if damage == "foreign":
        fill(tmp_path / "other", content={})
        path.write_bytes((tmp_path / "other/shard-00002.h5").read_bytes())
    elif damage == "hdf5":
        with h5py.File(path, "w") as file:
            file["acts/resid_post/L0"] = VALUES[0, SHARDS[2]]
    elif damage == "swapped":
        path.write_bytes((tmp_path / "shard-00001.h5").read_bytes())
    else:
        bad = {"truncated": good[:900], "shorter by one": good[:-1], "empty": b"", "text": b"x" * 5000}
        path.write_bytes({**bad, "zeros": bytes(len(good))}[damage])
    if damage == "shorter by one":  # HDF5 ends in bytes that no array needs; all bytes are read on resuming
        assert writer(tmp_path).missing == (2,)
        path.write_bytes(good[:900])
    with pytest.raises(StoreError, match=r"shard-00002.h5 is damaged"):
        _ = ActivationStore.open(tmp_path)["resid_post", 0]
    target = writer(tmp_path)
    assert target.missing == (2,)
    write(target, 2)
    assert contents(tmp_path) == before


def test_leftovers_of_a_kill_are_removed(tmp_path: Path) -> None:
    write(writer(tmp_path), 0)
    (tmp_path / ".shard-00001.h5.tmp").write_bytes(b"half")
    (tmp_path / ".manifest.json.tmp").write_bytes(b"{")
    (tmp_path / "mine.txt").write_text("stays")
    assert writer(tmp_path).missing == (1, 2)
    assert sorted(contents(tmp_path)) == ["manifest.json", "mine.txt", "shard-00000.h5"]


def test_shards_without_manifest_are_not_trusted(tmp_path: Path) -> None:
    fill(tmp_path)
    (tmp_path / "manifest.json").unlink()
    with pytest.raises(StoreError, match=r"holds 3 shards and no manifest.json; choose another directory"):
        writer(tmp_path)


def test_edited_or_broken_manifest_is_refused(tmp_path: Path) -> None:
    fill(tmp_path)
    path = tmp_path / "manifest.json"
    manifest = json.loads(path.read_text())
    edits: dict[str, Any] = {
        "content": {**manifest["content"], "dtype": "bfloat16"},
        "rows": {**manifest["rows"], "key": ["x"] * N_ROWS},
        "shards": [SHARDS[1], SHARDS[0], SHARDS[2]],
        "datasets": manifest["datasets"][::-1],
        "notes": {"model": "another"},
        "digest": "0" * 64,
        "seal": "0" * 64,
    }
    assert edits.keys() == manifest.keys()
    for part, value in edits.items():
        edited = {**manifest, part: value}
        path.write_text(json.dumps(edited))
        with pytest.raises(StoreError, match=r"manifest.json was edited"):
            ActivationStore.open(tmp_path)
    path.write_text('{"digest": ')
    with pytest.raises(StoreError, match=r"manifest.json cannot be read \(Expecting value"):
        ActivationStore.open(tmp_path)


@pytest.mark.parametrize("step", ["fsync", "replace", "check"])
@pytest.mark.parametrize(("code", "words"), [(errno.ENOSPC, "no space left while"), (errno.EIO, "cannot write")])
def test_failed_write_leaves_nothing_half_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str, code: int, words: str
) -> None:
    target = writer(tmp_path)
    write(target, 0)

    def fail(*_: Any, **__: Any) -> None:
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patch:
        patch.setattr(*((StoreWriter, "_same") if step == "check" else (os, step)), fail)
        with pytest.raises(StoreError, match=rf"{words} .*shard-00001.h5") as caught:
            write(target, 1)
    assert "\n" not in str(caught.value)
    assert sorted(contents(tmp_path)) == ["manifest.json", "shard-00000.h5"]
    write(target, 1)
    assert writer(tmp_path).missing == (2,)


def test_wrong_arrays_are_refused(tmp_path: Path) -> None:
    target = writer(tmp_path, labels=None)
    acts = {("resid_post", layer): VALUES[layer, SHARDS[0]] for layer in range(LAYERS)}
    with pytest.raises(StoreError, match="another set of arrays than this store holds: acts/resid_post/L2"):
        target.write(0, {k: v for k, v in acts.items() if k[1] != 2})
    with pytest.raises(StoreError, match=r"has shape \(2, 5\), expected \(3, 5\)"):
        target.write(0, {k: v[:2] for k, v in acts.items()})
    with pytest.raises(StoreError, match="unknown storage dtype 'int8'; allowed: float32, float16, bfloat16"):
        writer(tmp_path, dtype="int8")
    with pytest.raises(StoreError, match="each of the 7 rows exactly once"):
        writer(tmp_path, shards=[[0, 1], [1, 2]])
    with pytest.raises(StoreError, match=r"columns of lengths \[6, 7\]"):
        writer(tmp_path, rows={**ROWS, "key": list("abcdef")})
