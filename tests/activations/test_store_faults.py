"""Kills, full disks, foreign hands and second writers, in real processes: nothing that was stored is lost or spoiled."""

from __future__ import annotations

import contextlib
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from activations.errors import StoreError
from activations.store import ActivationStore
from activations.store_checking import verify
from tests.activations.test_store import VALUES, contents, fill, write, writer

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}

NURSERY = """
import os, sys
from activations.capturing import Plan, capture
from activations.model import from_modules
from activations.readout import answer_tokens
from tests import tiny_models as tiny
model = from_modules(*tiny.tiny_llama())
made = model.encode(tiny.MESSAGES)
prompts, plan = [made[n % 4] for n in range(40)], Plan(sites=("resid_post", "z"), batch_tokens=40)
answers = answer_tokens(model, tiny.ANSWERS)
print("ready", flush=True)
for folder in sys.stdin:
    if not (child := os.fork()):
        stored = lambda n: os.write(1, f"{n}\\n".encode())
        capture(model, prompts, plan, folder.strip(), answers=answers, progress=stored)
        os._exit(0)
    os.write(1, f"pid {child}\\n".encode())
    os.waitpid(child, 0)
    os.write(1, b"end\\n")
"""


class Nursery:
    """A process that loads everything once and forks for each capture, so that fifty kills take seconds."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", NURSERY], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=ENVIRONMENT, text=True
        )
        assert self._line() == "ready"

    def _line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def capture(self, folder: Path, kill_after: float | None = None) -> tuple[int, float]:
        """Prompts that the process said were stored, and the seconds it lived."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{folder}\n")
        self._process.stdin.flush()
        word, pid = self._line().split()
        assert word == "pid"
        start = time.perf_counter()
        if kill_after is not None:
            time.sleep(kill_after)
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        stored = 0
        while (line := self._line()) != "end":
            stored = int(line)
        return stored, time.perf_counter() - start

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    made = Nursery()
    yield made
    made.close()


def killed_at_random(nursery: Nursery, folder: Path, moments: int) -> None:
    nursery.capture(folder / "warm")
    stored, seconds = nursery.capture(folder / "whole")
    assert stored == 40
    whole = contents(folder / "whole")
    lengths = [len(shard) for shard in ActivationStore.open(folder / "whole").manifest["shards"]]
    draw = random.Random(0)
    cut = 0
    for trial in range(moments // 2):
        target = folder / str(trial)
        for _ in range(2):  # the second one kills the resumed run
            stored, _ = nursery.capture(target, kill_after=draw.uniform(0, seconds))
            left = contents(target) if target.exists() else {}
            assert sum(name.endswith(".tmp") for name in left) <= 1
            # What is there under its own name is whole, and that is all that was reported, and perhaps one more.
            shards = [name for name in left if name.startswith("shard-")]
            assert all(left[name] == whole[name] for name in shards)
            assert sum(lengths[: len(shards)]) >= stored
            cut += 0 < len(shards) < len(lengths)
        kept = {name: (target / name).stat().st_ino for name in shards}
        nursery.capture(target)
        assert contents(target) == whole
        assert {name: (target / name).stat().st_ino for name in kept} == kept
    assert cut >= moments // 6  # the moments do fall into the writing


def test_kill_at_random_moments(nursery: Nursery, tmp_path: Path) -> None:
    killed_at_random(nursery, tmp_path, 6)


@pytest.mark.slow
def test_kill_at_fifty_random_moments(nursery: Nursery, tmp_path: Path) -> None:
    killed_at_random(nursery, tmp_path, 50)


HOLDER = """
import sys, time
from tests.activations.test_store import write, writer
from pathlib import Path
from activations.errors import StoreError
try:
    target = writer(Path(sys.argv[1]))
except StoreError as error:
    print(error, flush=True)
    sys.exit(1)
print("locked", flush=True)
sys.stdin.readline()
write(target, 0)
print("written", flush=True)
sys.stdin.readline()
"""


def holder(folder: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=ENVIRONMENT,
        text=True,
    )


def test_second_writer_is_refused_until_the_first_is_gone(tmp_path: Path) -> None:
    first = holder(tmp_path / "s")
    assert first.stdout is not None
    assert first.stdin is not None
    assert first.stdout.readline() == "locked\n"
    words = r"another process is writing into .*/s; wait for it, or capture into another directory and merge the two"
    with pytest.raises(StoreError, match=words):
        writer(tmp_path / "s")
    with pytest.raises(StoreError, match=words):
        writer(tmp_path / "s", dtype="bfloat16")  # also with settings that would replace an empty store
    first.stdin.write("\n")
    first.stdin.flush()
    assert first.stdout.readline() == "written\n"
    with pytest.raises(StoreError, match=words):
        writer(tmp_path / "s")
    first.kill()  # no time to clean up: the lock goes with the process
    first.wait()
    first.stdin.close()
    first.stdout.close()
    assert writer(tmp_path / "s").missing == (1, 2)
    assert sorted(contents(tmp_path / "s")) == ["manifest.json", "shard-00000.h5"]


def test_many_starting_at_once_leave_one_writer(tmp_path: Path) -> None:
    processes = [holder(tmp_path / "s") for _ in range(4)]
    said = []
    for one in processes:
        assert one.stdout is not None
        said.append(one.stdout.readline())
    for one in processes:
        one.communicate("\n\n")
    assert sum(line == "locked\n" for line in said) == 1, said
    assert all("another process is writing into" in line or line == "locked\n" for line in said)
    assert writer(tmp_path / "s").missing == (1, 2)


def test_later_writer_of_the_same_process_takes_over(tmp_path: Path) -> None:
    first = writer(tmp_path)
    write(first, 0)
    second = writer(tmp_path)
    with pytest.raises(StoreError, match="was closed, or another one took over"):
        write(first, 1)
    write(second, 1)
    second.close()
    with pytest.raises(StoreError, match="was closed"):
        write(second, 2)
    assert writer(tmp_path).missing == (2,)


def test_writer_that_was_killed_before_its_first_byte(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").touch()
    with pytest.raises(StoreError, match="holds no activation store"):
        ActivationStore.open(tmp_path)
    np.testing.assert_array_equal(fill(tmp_path).stack("resid_post"), VALUES)


def in_child(work: Callable[[], Any], before: Callable[[], Any]) -> str:
    """What `work` raises as a StoreError in a forked process, after `before`; empty if nothing."""
    get, put = os.pipe()
    if not (child := os.fork()):
        said = "another error"
        try:
            before()
            work()
            said = ""
        except StoreError as error:
            said = str(error)
        except BaseException as error:
            said = repr(error)
        finally:
            os.write(put, said.encode())
            os._exit(0)
    os.close(put)
    with os.fdopen(get) as pipe:
        said = pipe.read()
    os.waitpid(child, 0)
    return said


def test_no_room_for_a_shard(tmp_path: Path) -> None:
    """A limit on the size of files, as a quota sets it: the shard that does not fit leaves nothing behind."""
    folder = tmp_path / "s"
    write(writer(folder), 0)
    size = (folder / "shard-00000.h5").stat().st_size
    assert (folder / "manifest.json").stat().st_size < size - 200  # so that the limit is one for shards
    before = contents(folder)

    def limited() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size - 200, size - 200))

    said = in_child(lambda: write(writer(folder), 1), limited)
    assert said.startswith(f"no space left while writing {folder / 'shard-00001.h5'} (File too large); free some")
    assert contents(folder) == before
    fill(folder)
    fill(tmp_path / "whole")
    assert contents(folder) == contents(tmp_path / "whole")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    place = tmp_path / "disk"
    place.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=12k", "tmpfs", place], capture_output=True)
    if mounted.returncode:
        pytest.skip("mounting a small disk needs the right to mount")
    try:
        yield place
    finally:
        subprocess.run(["umount", place], check=True)


def test_full_disk(small_disk: Path, tmp_path: Path) -> None:
    folder = small_disk / "s"
    with (
        writer(folder) as target,
        pytest.raises(StoreError, match=r"no space left while writing .*shard-0000\d.h5 \(No space left on device\)"),
    ):
        for shard in target.missing:
            write(target, shard)
    left = contents(folder)
    assert not any(name.endswith(".tmp") for name in left)
    moved = Path(shutil.copytree(folder, tmp_path / "moved"))  # what was stored goes on elsewhere
    fill(moved)
    fill(tmp_path / "whole")
    assert contents(moved) == contents(tmp_path / "whole")
    store = ActivationStore.open(moved)
    with pytest.raises(StoreError, match="the export needs"):
        store.export(small_disk / "acts.safetensors")


@pytest.fixture
def public() -> Iterator[Path]:
    """A folder that an unprivileged user may enter; pytest's own are closed to others."""
    place = Path(tempfile.mkdtemp())
    place.chmod(0o755)
    try:
        yield place
    finally:
        shutil.rmtree(place)


def unprivileged() -> None:
    if os.getuid() == 0:
        os.setuid(65534)


def test_read_only_directory(public: Path) -> None:
    fill(public / "whole")
    write(writer(public / "part"), 0)
    (public / "empty").mkdir()
    folders = [public / name for name in ("whole", "part", "empty")]
    before = [contents(folder) for folder in folders]
    for folder in folders:
        folder.chmod(0o555)
    whole, part, empty = folders
    try:
        # A finished store needs no writing: the same command again is done, and everything can be read.
        assert in_child(lambda: writer(whole).missing == () or 1 / 0, unprivileged) == ""
        assert in_child(lambda: verify(whole) == () or 1 / 0, unprivileged) == ""
        said = in_child(lambda: write(writer(part), 1), unprivileged)
        assert said.startswith(f"cannot write {part / 'shard-00001.h5'} (Permission denied); choose a directory")
        said = in_child(lambda: writer(empty), unprivileged)
        assert said.startswith(f"cannot write {empty / 'manifest.json'} (Permission denied); choose a directory")
        said = in_child(lambda: writer(empty / "new"), unprivileged)
        assert said.startswith(f"cannot write {empty / 'new'} (Permission denied); choose a directory")
        said = in_child(lambda: ActivationStore.open(whole).export(empty / "a.npz", "npz"), unprivileged)
        assert said.startswith(f"cannot write {empty / 'a.npz'} (Permission denied)")
    finally:
        for folder in folders:
            folder.chmod(0o755)
    assert [contents(folder) for folder in folders] == before
