"""Where ``probe generate`` writes: whole files, and devices, pipes and links left as they are."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest

PROBE = (sys.executable, "-c", "from experiments.cli import main; main()")


def generate(*words: str, **environment: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [*PROBE, "generate", "ordering", "--limit", "3", *words],
        capture_output=True,
        env={**os.environ, **environment},
        check=False,
    )


def test_a_device_is_written_to_and_not_replaced(tmp_path: Path) -> None:
    """As root, a file that takes the device's name would leave the machine without /dev/null."""
    device = tmp_path / "null"
    try:
        os.mknod(device, stat.S_IFCHR | 0o666, os.makedev(1, 3))
        device.write_bytes(b"")
    except OSError:
        pytest.skip("needs the right to make a device")
    assert generate("--out", str(device)).returncode == 0
    assert stat.S_ISCHR(device.stat().st_mode)


def test_a_pipe_gets_the_lines_and_a_link_keeps_its_target(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    read: list[bytes] = []
    reader = threading.Thread(target=lambda: read.append(pipe.read_bytes()), daemon=True)
    reader.start()
    assert generate("--out", str(pipe)).returncode == 0
    reader.join(10)
    assert len(read[0].splitlines()) == 3 and stat.S_ISFIFO(pipe.stat().st_mode)

    assert generate("--out", "/dev/stdout").stdout == read[0]

    link, target = tmp_path / "link.jsonl", tmp_path / "target.jsonl"
    target.write_bytes(b"old")
    link.symlink_to(target)
    assert generate("--out", str(link)).returncode == 0
    assert link.is_symlink() and target.read_bytes() == read[0]


def test_a_folder_is_refused_before_anything_is_drawn(tmp_path: Path) -> None:
    done = generate("--out", str(tmp_path), "--set", "n=1000")
    assert done.returncode == 2 and b"which is a folder" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_told() -> None:
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full here")
    done = generate("--out", "/dev/full")
    assert done.returncode == 1 and b"No space left on device" in done.stderr and done.stderr.count(b"\n") == 1


def test_names_are_written_as_they_are_whatever_the_terminal_can_show() -> None:
    done = generate("--out", "-", "--set", "n=2", "--set", "names=[Zoë,Łukasz,Ñandú,李]", PYTHONIOENCODING="ascii")
    orders = [json.loads(line)["latent"]["order"] for line in done.stdout.decode("utf-8").splitlines()]
    assert len(orders) == 3 and {name for order in orders for name in order} <= {"Zoë", "Łukasz", "Ñandú", "李"}
