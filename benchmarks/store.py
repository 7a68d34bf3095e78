"""What reading from the store costs beside reading one plain file of the same bytes.

    python benchmarks/store.py [--rows 10000] [--width 4096] [--shard-rows 160] [--json]

A store of random numbers is made in a temporary folder: rows scattered over shards as batches sorted by length scatter
them, two layers. One layer is read by `numpy.fromfile` from a plain contiguous file and by `store["resid_post", 1]`,
opened anew each time; both lie in the page cache, which is the harder case for the store. They alternate; a claim is the
median over rounds of the ratio. Processor time, all threads together, is shown beside it, because the store reads with
several threads and a busy machine hides that. What is done for each piece of a file, whatever its size, weighs more the
narrower the layer: with --width 576 the ratio is far higher, and the time a hundredth of a second. Streaming in disk
order and the same layer through h5py are shown too.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import h5py
import numpy as np

from activations.store import ActivationStore, StoreWriter, unpack
from activations.store_format import STORAGE, pack

BOUND = 1.5
WHERE = ("resid_post", 1)


def make(folder: Path, rows: int, width: int, shard_rows: int, dtype: str) -> float:
    """A store of two layers; the seconds that writing its shards took."""
    order = np.random.default_rng(0).permutation(rows)
    shards = [np.sort(order[at : at + shard_rows]).tolist() for at in range(0, rows, shard_rows)]
    names = [str(n) for n in range(rows)]
    index = {"key": names, "presentation": names, "position": range(rows), "n_tokens": range(rows)}
    values = np.random.default_rng(1).normal(size=(rows, width)).astype(np.float32)
    seconds = 0.0
    with StoreWriter(
        folder,
        datasets={("resid_post", layer): width for layer in (0, 1)},
        dtype=dtype,
        n_layers=2,
        shards=shards,
        rows=index,
        content={},
    ) as writer:
        for shard in writer.missing:
            batch = {("resid_post", layer): values[shards[shard]] + layer for layer in (0, 1)}
            start = time.perf_counter()
            writer.write(shard, batch)
            seconds += time.perf_counter() - start
    return seconds


def through_h5py(folder: Path, rows: int, width: int) -> np.ndarray:
    """The layer as a plain h5py program reads it."""
    out = np.empty((rows, width), dtype=np.float32)
    for path in sorted(folder.glob("shard-*.h5")):
        with h5py.File(path) as file:
            stored = file[f"acts/{WHERE[0]}/L{WHERE[1]}"]
            out[file["rows"][()]] = unpack(stored[()], stored.attrs["dtype"].decode())
    return out


def reading(
    rows: int = 10_000, width: int = 4096, shard_rows: int = 160, dtype: str = "float32", rounds: int = 5
) -> dict[str, Any]:
    """Milliseconds of each way to read one layer, and the ratios to the plain file."""
    with tempfile.TemporaryDirectory() as name:
        folder, plain = Path(name) / "store", Path(name) / "plain"
        written = make(folder, rows, width, shard_rows, dtype)
        pack(ActivationStore.open(folder)[WHERE], dtype).tofile(plain)

        def stream(store: ActivationStore) -> None:
            for _ in store.batches(*WHERE, store.disk_order):
                pass

        works: dict[str, Callable[[ActivationStore], object]] = {
            "plain": lambda store: unpack(np.fromfile(plain, STORAGE[dtype]), dtype).reshape(rows, width),
            "store": lambda store: store[WHERE],
            "stream": stream,
            "h5py": lambda store: through_h5py(folder, rows, width),
        }
        took: dict[str, list[tuple[float, float]]] = {kind: [] for kind in works}
        for number in range(rounds + 1):
            for kind, work in works.items():
                opened = ActivationStore.open(folder)
                start, used = time.perf_counter(), time.process_time()
                kept = work(opened)
                seconds = time.perf_counter() - start, time.process_time() - used
                del kept
                if number:  # the first round warms up
                    took[kind].append(seconds)

    def ratio(kind: str, clock: int) -> float:
        return statistics.median(a[clock] / b[clock] for a, b in zip(took[kind], took["plain"], strict=True))

    return {
        "shape": f"{rows} x {width} {dtype}, {shard_rows} rows a shard",
        "ms": {kind: 1e3 * statistics.median(wall for wall, _ in times) for kind, times in took.items()},
        "ratio": {kind: ratio(kind, 0) for kind in works},
        "ratio_processor": {kind: ratio(kind, 1) for kind in works},
        "written_mb_s": 2 * rows * width * STORAGE[dtype].itemsize / 1e6 / written,
    }


def main() -> int:
    """Measure and print; exit code 1 if the bound is missed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rows", type=int, default=10_000)
    parser.add_argument("--width", type=int, default=4096, help="d_model; of 8B models by default")
    parser.add_argument("--shard-rows", type=int, default=160, help="a batch of 8192 tokens holds 160 prompts of 50")
    parser.add_argument("--dtype", default="float32", choices=list(STORAGE))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    found = reading(options.rows, options.width, options.shard_rows, options.dtype, options.rounds)
    value = found["ratio"]["store"]
    claim = f"one layer from the store over a plain file ({found['shape']})"
    claims = [{"claim": claim, "value": value, "bound": BOUND, "ok": value <= BOUND}]
    if options.json:
        sys.stdout.write(json.dumps(claims, indent=1) + "\n")
    else:
        print(f"{found['shape']}; shards written at {found['written_mb_s']:.0f} MB/s")
        for kind, milliseconds in found["ms"].items():
            print(
                f"{kind:8}{milliseconds:9.1f} ms  {found['ratio'][kind]:6.2f} x plain"
                f"  {found['ratio_processor'][kind]:6.2f} x its processor time"
            )
        print(f"{'ok  ' if claims[0]['ok'] else 'FAIL'} {claim}: {value:.2f}, bound {BOUND}")
    return 0 if claims[0]["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
