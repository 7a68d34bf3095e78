"""Two merges into one target, merges that were killed or ran out of room, and patterns of one width."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from activations import store_merging
from activations.capturing import Plan, capture
from activations.errors import StoreError
from activations.model import Model, from_modules
from activations.store import ActivationStore, StoreWriter
from activations.store_checking import verify
from activations.store_merging import merge
from tests import tiny_models as tiny

ROOT = Path(__file__).parents[2]
WHERE = ("resid_post", 0)


def part(folder: Path, first: int, n: int = 6) -> Path:
    numbers = list(range(first, first + n))
    rows = {"key": [str(one) for one in numbers], "presentation": ["o"] * n, "position": numbers, "n_tokens": numbers}
    shards = [[row] for row in range(n)]
    with StoreWriter(
        folder, datasets={WHERE: 8}, dtype="float32", n_layers=1, shards=shards, rows=rows, content={}
    ) as writer:
        for shard in writer.missing:
            writer.write(shard, {WHERE: np.full((1, 8), numbers[shard])})
    return folder


@pytest.fixture
def parts(tmp_path: Path) -> list[Path]:
    return [part(tmp_path / "a", 0), part(tmp_path / "b", 6)]


def left(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name not in ("a", "b", "c"))


def test_a_second_merge_is_refused_while_the_first_lives(
    parts: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held, go = threading.Event(), threading.Event()
    place = store_merging._place

    def slowly(source: Any, piece: Any) -> None:
        held.set()
        assert go.wait(30)
        place(source, piece)

    monkeypatch.setattr(store_merging, "_place", slowly)
    first = threading.Thread(target=merge, args=(parts, tmp_path / "out"))
    first.start()
    try:
        assert held.wait(30)
        with pytest.raises(StoreError, match=r"another process is merging into .*/out; wait for it, or choose another"):
            merge(parts, tmp_path / "out")
    finally:
        go.set()
        first.join()
    assert ActivationStore.open(tmp_path / "out")[WHERE][:, 0].tolist() == list(range(12))
    assert merge(parts, tmp_path / "out").manifest["content"]["n_rows"] == 12
    assert left(tmp_path) == ["out"]


MERGE = """
import sys
from activations.errors import StoreError
from activations.store_merging import merge
sys.stdin.readline()
try:
    merge(sys.argv[1:3], sys.argv[3])
    print("merged")
except StoreError as error:
    print(error)
"""


def test_processes_that_start_at_once_make_one_store(parts: list[Path], tmp_path: Path) -> None:
    command = [sys.executable, "-c", MERGE, *map(str, parts), str(tmp_path / "out")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    pipe = subprocess.PIPE
    running = [subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment) for _ in range(3)]
    said = []
    for one in running:
        assert one.stdin is not None
        one.stdin.write("go\n")
        one.stdin.flush()
    for one in running:
        said.append(one.communicate(timeout=120)[0].strip())
    assert "merged" in said
    assert all(line == "merged" or "another process is merging into" in line for line in said), said
    assert verify(tmp_path / "out") == ()
    assert left(tmp_path) == ["out"]


KILLED = """
import os, signal, sys
from activations import store_merging
place, count = store_merging._place, 0
def until(source, piece):
    global count
    count += 1
    if count == 8:
        piece.path.write_bytes(b"cut off")
        os.kill(os.getpid(), signal.SIGKILL)
    store_merging.commit(piece.path, source.path.read_bytes(), lambda written: None)  # as on another disk
store_merging._place = until
store_merging.merge(sys.argv[1:3], sys.argv[3])
"""


def test_a_killed_merge_goes_on(parts: list[Path], tmp_path: Path) -> None:
    command = [sys.executable, "-c", KILLED, *map(str, parts), str(tmp_path / "out")]
    assert subprocess.run(command, env={**os.environ, "PYTHONPATH": str(ROOT)}).returncode == -9
    half = tmp_path / ".out.merging"
    assert left(tmp_path) == [".out.merging"]
    placed = {path.name: path.stat().st_ino for path in half.glob("shard-*.h5")}
    assert len(placed) == 8
    (half / ".shard-00009.h5.tmp").write_bytes(b"cut off")
    merge(parts, tmp_path / "out")
    after = {path.name: path.stat().st_ino for path in (tmp_path / "out").glob("shard-*.h5")}
    kept = [name for name in placed if after[name] == placed[name]]
    assert sorted(kept) == sorted(placed)[:7]  # the one that was cut off was made again
    assert verify(tmp_path / "out") == ()
    assert left(tmp_path) == ["out"]


def test_what_another_merge_left_is_not_taken_over(parts: list[Path], tmp_path: Path) -> None:
    other = part(tmp_path / "c", 20)
    half = tmp_path / ".out.merging"
    half.mkdir()
    for n, source in enumerate(sorted(other.glob("shard-*.h5"))):
        os.link(source, half / f"shard-{n:05d}.h5")
    (half / "shard-00099.h5").write_bytes(b"stranger")
    merged = merge(parts, tmp_path / "out")
    assert merged[WHERE][:, 0].tolist() == list(range(12))
    assert verify(tmp_path / "out") == ()
    assert ActivationStore.open(other)[WHERE][:, 0].tolist() == list(range(20, 26))  # linked files were not written to


def test_no_room_keeps_what_is_placed(parts: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = store_merging._place

    def full(source: Any, piece: Any) -> None:
        if piece.path.name == "shard-00005.h5":
            raise OSError(errno.ENOSPC, "No space left on device")
        place(source, piece)

    with monkeypatch.context() as patch:
        patch.setattr(store_merging, "_place", full)
        with pytest.raises(StoreError, match=r"no space left while writing .*/out .*run the same command again"):
            merge(parts, tmp_path / "out")
    assert len(list((tmp_path / ".out.merging").glob("shard-*.h5"))) == 5
    assert len(merge(parts, tmp_path / "out")) == 12
    assert left(tmp_path) == ["out"]


def test_without_locks_it_merges_all_the_same(
    parts: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none(*_: Any) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", none)
    assert len(merge(parts, tmp_path / "out")) == 12


@pytest.fixture(scope="module")
def model() -> Model:
    return from_modules(*tiny.tiny_llama())


def test_patterns_of_one_width_merge(model: Model, tmp_path: Path) -> None:
    prompts = sorted(model.encode(tiny.MESSAGES), key=lambda one: len(one.ids))
    short, long = prompts[0], prompts[-1]
    n, keys = len(long.ids), len(long.ids) + 3
    assert len(short.ids) < n

    def made(folder: str, prompt: Any, key: str, width: int | None) -> Path:
        plan = Plan(sites=("pattern",), layers=(1,), pattern_keys=width)
        capture(model, [prompt], plan, tmp_path / folder, index=[(key, "")])
        return tmp_path / folder

    with pytest.raises(StoreError, match=rf"pattern.width is .* capture both alike, with pattern_keys={n} "):
        merge([made("a", short, "k0", None), made("b", long, "k1", None)], tmp_path / "out")
    # The next step that the message names works, and so does a wider one.
    for width in (n, keys):
        wide = [made(f"a{width}", short, "k0", width), made(f"b{width}", long, "k1", width)]
        merged = merge(wide, tmp_path / f"out{width}")
        assert merged.manifest["content"]["pattern"]["width"] == width
        heads = merged.heads("pattern", 1)
        assert heads is not None
        assert merged.width("pattern", 1) == heads * width
        for row, (name, prompt) in enumerate((("a", short), ("b", long))):
            alone = ActivationStore.open(tmp_path / name)["pattern", 1].reshape(heads, -1)
            got = merged["pattern", 1][row].reshape(heads, width)
            np.testing.assert_array_equal(got[:, : len(prompt.ids)], alone[:, : len(prompt.ids)])
            assert not got[:, len(prompt.ids) :].any()
    # Without the option the store is what it always was: the same width names the same content.
    same = made("same", long, "k1", n)
    assert ActivationStore.open(same).manifest["digest"] == ActivationStore.open(tmp_path / "b").manifest["digest"]


def test_keys_that_are_too_few_are_refused(model: Model, tmp_path: Path) -> None:
    prompts = model.encode(tiny.MESSAGES)
    longest = max(len(one.ids) for one in prompts)
    words = f"pattern_keys is 2 and the longest prompt has {longest} tokens; give at least {longest}"
    with pytest.raises(StoreError, match=words):
        capture(model, prompts, Plan(sites=("pattern",), pattern_keys=2), tmp_path / "s")


def test_the_disk_estimate_is_what_is_stored(model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For tiny shards too, where HDF5's own part is most of a file."""
    from activations import capturing

    estimates: list[int] = []
    monkeypatch.setattr(capturing, "_refuse_full_disk", lambda directory, size: estimates.append(size))
    prompts = [model.encode(tiny.MESSAGES)[n % 4] for n in range(20)]
    for n, plan in enumerate(
        (
            Plan(batch_tokens=1),
            Plan(batch_tokens=10_000, dtype="bfloat16"),
            Plan(sites=("z", "resid_pre", "pattern"), batch_tokens=60),
        )
    ):
        folder = tmp_path / str(n)
        capture(model, prompts, plan, folder)
        stored = sum(path.stat().st_size for path in folder.iterdir())
        assert 0.97 < estimates[-1] / stored < 1.1
