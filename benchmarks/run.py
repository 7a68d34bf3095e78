"""Whole commands: how long and how much memory a newcomer's first minutes take.

``python benchmarks/run.py [--model M] [--json] [--quick]``

* ``probe run`` on the built-in pair, default sizes, base and adapter, report included, in a fresh directory: under 120 s
  and 2 GB on two cores;
* the same command again: it finds the run complete;
* ``probe --help``: under 0.3 s, since it imports neither torch nor numpy.

Times are of whole processes, interpreter start included. Figures depend on an otherwise idle machine.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PROBE = [sys.executable, "-c", "from experiments.cli import main; main()"]


def timed(words: list[str]) -> tuple[float, float]:
    """Wall seconds and peak resident MB of one command; a failing command is an error."""
    started = time.monotonic()
    process = subprocess.Popen(
        [*PROBE, *words], cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert process.stderr is not None
    said = process.stderr.read().decode()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        sys.exit(f"probe {' '.join(words)} failed: {said[-400:]}")
    return time.monotonic() - started, usage.ru_maxrss / 1000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="builtin")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--quick", action="store_true", help="one whole run instead of three")
    chosen = parser.parse_args()
    helps = [timed(["--help"])[0] for _ in range(7)]
    runs, again = [], []
    for _ in range(1 if chosen.quick else 3):
        with tempfile.TemporaryDirectory() as folder:
            words = ["run", "--model", chosen.model, "--out", str(Path(folder) / "run")]
            runs.append(timed(words))
            again.append(timed(words)[0])
    seconds, megabytes = statistics.median(t for t, _ in runs), max(m for _, m in runs)
    claims = [
        (f"probe --help, s, median of {len(helps)}", statistics.median(helps), 0.3),
        (f"probe run --model {chosen.model}, s, median of {len(runs)}", seconds, 120.0),
        (f"probe run --model {chosen.model}, peak MB", megabytes, 2000.0),
        (f"the same command again, s, median of {len(again)}", statistics.median(again), 5.0),
    ]
    rows = [{"claim": c, "value": round(v, 3), "bound": b, "ok": v < b} for c, v, b in claims]
    if chosen.json:
        print(json.dumps(rows, indent=1))
    else:
        for row in rows:
            print(f"{'ok  ' if row['ok'] else 'MISS'} {row['claim']:<52} {row['value']:>10}  bound {row['bound']}")
    sys.exit(not all(row["ok"] for row in rows))


if __name__ == "__main__":
    main()
