"""The run directory under kills, second writers, other configurations and full disks."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pandas as pd
import pytest

from experiments.errors import RunError
from experiments.rundir import append_lines, atomic, opened, whole_lines

VALUES = {"seed": 1, "probe": {"folds": 5}}


def test_another_configuration_is_refused_naming_each_key_with_both_values(tmp_path) -> None:
    with opened(tmp_path / "run", {"seed": 9}, "") as run:
        run.items.write_text("of another seed")
    with opened(tmp_path / "run", VALUES, "") as run:  # no model was loaded: nothing is lost
        assert not run.items.exists()
        run.write_json("environment.json", {})
    with opened(tmp_path / "run", VALUES, ""):
        pass
    with (
        pytest.raises(RunError) as caught,
        opened(tmp_path / "run", {"seed": 2, "probe": {"folds": 4}}, ""),
    ):
        pass
    assert "seed was 1, is 2" in str(caught.value)
    assert "probe.folds was 5, is 4" in str(caught.value)


def test_a_second_writer_is_refused_naming_the_first(tmp_path) -> None:
    with opened(tmp_path / "run", VALUES, ""):
        code = textwrap.dedent(f"""
            from pathlib import Path
            from experiments.rundir import opened
            with opened(Path({str(tmp_path / "run")!r}), {VALUES!r}, ""): pass
        """)
        second = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert second.returncode == 1
    assert f"is being written by pid {os.getpid()} on " in second.stderr


def test_a_lock_does_not_outlive_a_killed_process(tmp_path) -> None:
    code = textwrap.dedent(f"""
        import os, signal
        from pathlib import Path
        from experiments.rundir import opened
        with opened(Path({str(tmp_path / "run")!r}), {VALUES!r}, ""):
            os.kill(os.getpid(), signal.SIGKILL)
    """)
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -signal.SIGKILL
    with opened(tmp_path / "run", VALUES, ""):
        pass


def test_a_folder_that_is_no_run_and_a_file_are_refused(tmp_path) -> None:
    (tmp_path / "thesis.tex").write_text("mine")
    with pytest.raises(RunError, match="not empty and holds no run"), opened(tmp_path, VALUES, ""):
        pass
    with pytest.raises(RunError, match="is a file"), opened(tmp_path / "thesis.tex", VALUES, ""):
        pass
    assert sorted(path.name for path in tmp_path.iterdir()) == ["thesis.tex"]


def test_a_file_appears_only_when_it_is_whole(tmp_path) -> None:
    path = tmp_path / "table"

    def write_half() -> None:
        with atomic(path) as file:
            file.write(b"half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_half()
    assert list(tmp_path.iterdir()) == []


def test_a_line_cut_by_a_kill_is_dropped_and_others_are_kept(tmp_path) -> None:
    path = tmp_path / "responses.jsonl"
    append_lines(path, ['{"a": "x\u2028y"}\n', '{"b": 2}\n'])
    with path.open("ab") as file:
        file.write(b'{"c": ')
    assert whole_lines(path) == ['{"a": "x\u2028y"}', '{"b": 2}']
    append_lines(path, ['{"c": 3}\n'])
    assert whole_lines(path)[-1] == '{"c": 3}'
    assert whole_lines(tmp_path / "none") == []


def test_a_killed_table_resumes_at_the_chunk_in_flight(tmp_path) -> None:
    code = textwrap.dedent(f"""
        import os, signal
        import pandas as pd
        from pathlib import Path
        from experiments.rundir import opened
        def compute(chunk):
            if chunk == 3:
                os.kill(os.getpid(), signal.SIGKILL)
            return pd.DataFrame({{"value": [chunk]}})
        with opened(Path({str(tmp_path / "run")!r}), {VALUES!r}, "") as run:
            run.build_table("squares", range(5), compute)
    """)
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -signal.SIGKILL
    computed, steps = [], []

    def compute(chunk: int) -> pd.DataFrame:
        computed.append(chunk)
        return pd.DataFrame({"value": [chunk]})

    with opened(tmp_path / "run", VALUES, "") as run:
        table = run.build_table("squares", range(5), compute, steps.append)
        assert computed == [3, 4] and steps == [1] * 5
        assert table["value"].tolist() == [0, 1, 2, 3, 4]
        assert run.build_table("squares", range(5), compute)["value"].tolist() == [0, 1, 2, 3, 4]
        assert computed == [3, 4]
        assert [path.name for path in run.tables.iterdir()] == ["squares.parquet"]
        with pytest.raises(RunError, match="no table 'cubes'"):
            run.table("cubes")


def test_a_full_disk_leaves_no_half_written_file(tmp_path) -> None:
    """A file-size limit stands in for the full disk: the same write fails at the same place."""
    code = textwrap.dedent("""
        import resource, signal, sys
        from pathlib import Path
        from experiments.rundir import atomic
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
        with atomic(Path(sys.argv[1])) as file:
            file.write(b"x" * 100_000)
    """)
    result = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "big")], capture_output=True, text=True, check=False
    )
    assert "File too large" in result.stderr
    assert list(Path(tmp_path).iterdir()) == []
