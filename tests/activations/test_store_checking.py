"""`verify` names every fault; `info` says what is there."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import h5py
import numpy as np
import pytest

from activations.errors import StoreError
from activations.store import ActivationStore
from activations.store_checking import info, verify
from activations.store_shards import HEAD
from tests.activations.test_store import SHARDS, VALUES, fill, write, writer


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("good") / "s"
    fill(folder)
    return folder


@pytest.fixture
def store(good: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(good, tmp_path / "s"))


def test_whole_store_has_no_fault(store: Path) -> None:
    assert verify(store) == ()
    assert ActivationStore.open(store).verify() == ()
    (store / "notes.txt").write_text("mine")
    assert verify(store) == ()


def test_every_flipped_byte_is_found_by_name(store: Path) -> None:
    """Also where neither a value nor HDF5's checksums change. Every byte of the shard was tried once."""
    path = store / "shard-00001.h5"
    whole = path.read_bytes()
    for position in range(0, len(whole), 97):
        path.write_bytes(whole[:position] + bytes([whole[position] ^ 1]) + whole[position + 1 :])
        (fault,) = verify(store)
        assert fault.startswith(f"{path} is damaged ("), position
    path.write_bytes(whole)


@pytest.mark.parametrize("kept", [0, 1, 255, 256, 600, 2000, -1])
def test_truncated_shard_is_found_by_name(store: Path, kept: int) -> None:
    path = store / "shard-00002.h5"
    path.write_bytes(path.read_bytes()[:kept])
    (fault,) = verify(store)
    assert fault.startswith(f"{path} is damaged (")
    path.write_bytes(path.read_bytes() + bytes(5000))
    assert len(verify(store)) == 1


def test_all_faults_are_named_at_once(store: Path, tmp_path: Path) -> None:
    (store / "shard-00000.h5").unlink()
    shutil.copy(store / "shard-00001.h5", store / "shard-00002.h5")
    shutil.copy(store / "shard-00001.h5", store / "extra.h5")
    with h5py.File(store / "foreign.hdf5", "w") as file:
        file["x"] = [1]
    faults = verify(store)
    assert [fault.split(" ")[0] for fault in faults] == [
        str(store / name) for name in ("shard-00000.h5", "shard-00002.h5", "extra.h5", "foreign.hdf5")
    ]
    for fault, word in zip(faults, ("is missing", "holds other rows", "no part of", "no part of"), strict=True):
        assert word in fault
        assert "\n" not in fault


def test_foreign_file_beside_a_store_changes_nothing(store: Path) -> None:
    with h5py.File(store / "shard-00007.h5", "w") as file:
        file["acts/resid_post/L0"] = VALUES[0]
    np.testing.assert_array_equal(ActivationStore.open(store)["resid_post", 0], VALUES[0])
    assert writer(store).missing == ()
    assert verify(store) == (f"{store / 'shard-00007.h5'} is no part of this store; move it elsewhere",)


def reseal(path: Path, change: Callable[[bytearray], None]) -> None:
    """Change a shard and make its sha256 fit again, as a faulty program would."""
    data = bytearray(path.read_bytes())
    change(data)
    sha = hashlib.sha256(data[HEAD:]).hexdigest().encode()
    at = data.index(b"sha256 ") + 7
    data[at : at + 64] = sha
    path.write_bytes(data)


def test_offsets_that_lead_elsewhere(store: Path) -> None:
    def swap(data: bytearray) -> None:
        a, b = HEAD + 8 * 2, HEAD + 8 * 3
        data[a : a + 8], data[b : b + 8] = data[b : b + 8], data[a : a + 8]

    reseal(store / "shard-00000.h5", swap)
    (fault,) = verify(store)
    assert "shard-00000.h5 is damaged (acts/resid_post/L0" in fault


def test_values_that_are_no_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Had a writer let them through: every hash fits, and still they are found."""
    from activations import store_writing

    values = VALUES.copy()
    values[1, SHARDS[1][1], 2] = np.nan
    target = writer(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(store_writing, "_check_range", lambda *_: None)
        for shard in range(3):
            write(target, shard, values)
    (fault,) = verify(tmp_path)
    assert f"shard-00001.h5 is damaged (acts/resid_post/L1 of row {SHARDS[1][1]} is not finite)" in fault


def test_manifest_faults(store: Path) -> None:
    path = store / "manifest.json"
    text = path.read_text()
    path.write_text(text.replace('"float32"', '"float16"', 1))
    assert "manifest.json was edited" in verify(store)[0]
    path.write_text(text[:-20])
    assert "manifest.json cannot be read" in verify(store)[0]
    path.unlink()
    assert "holds no activation store" in verify(store)[0]
    assert "holds no activation store" in verify(store / "nowhere")[0]


def test_info_of_a_store(store: Path) -> None:
    found = info(store)
    assert found == ActivationStore.open(store).info()
    assert found.sites == [{"site": "resid_post", "layers": "0-2", "width": [5]}]
    assert found.rows == [
        {"presentation": "original", "label": "answer", "rows": 4},
        {"presentation": "equivalent", "label": "answer", "rows": 3},
    ]
    assert (found.n_rows, found.n_keys, found.shards) == (7, 4, {"there": 3, "total": 3})
    assert found.model == {"weights": "abc"}
    assert found.versions == {"torch": "2.13"}
    assert found.readout == ["yes", "no"]
    assert found.bytes == sum(path.stat().st_size for path in store.iterdir())
    assert found.digest == json.loads((store / "manifest.json").read_text())["digest"]


def test_info_of_a_capture_in_progress(tmp_path: Path) -> None:
    write(writer(tmp_path), 1)
    assert info(tmp_path).shards == {"there": 1, "total": 3}
    with pytest.raises(StoreError, match="holds no activation store"):
        info(tmp_path / "nowhere")
