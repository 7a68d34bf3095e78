"""What reading from the store costs beside reading one plain file of the same bytes.

    python benchmarks/store.py [--rows 10000] [--width 4096] [--shard-rows 160] [--in-order] [--json]
    python benchmarks/store.py --table

A store of random numbers is made in a temporary folder, two layers: rows scattered over shards as batches sorted by
length scatter them, or in order, as they lie where all prompts have one length. One layer is read by `numpy.fromfile`
from a plain contiguous file and by `store["resid_post", 1]`, opened anew each time; both lie in the page cache, which is
the harder case for the store. They alternate; a claim is the median over rounds of the ratio. Processor time, all threads
together, is shown beside it, because the store reads with several threads and a busy machine hides that.

`checked` is what any reader must do who checks each row and gives rows in the order of the prompts: read the plain file,
take the checksums, put the rows in their places. A layer that fits the processor's cache is read from a plain file as fast
as memory can be copied once, so that there `checked` alone is more than the bound. Streaming in disk order and the same
layer through h5py are shown too. --table goes through widths, sizes of shards, types and orders.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import h5py
import numpy as np

from activations.store import ActivationStore, StoreWriter, unpack
from activations.store_format import STORAGE, pack
from activations.store_shards import row_sums

BOUND = 1.5
WHERE = ("resid_post", 1)


def make(folder: Path, rows: int, width: int, shard_rows: int, dtype: str, in_order: bool = False) -> float:
    """A store of two layers; the seconds that writing its shards took."""
    order = np.arange(rows) if in_order else np.random.default_rng(0).permutation(rows)
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
    rows: int = 10_000,
    width: int = 4096,
    shard_rows: int = 160,
    dtype: str = "float32",
    rounds: int = 5,
    in_order: bool = False,
) -> dict[str, Any]:
    """Milliseconds of each way to read one layer, and the ratios to the plain file."""
    with tempfile.TemporaryDirectory() as name:
        folder, plain = Path(name) / "store", Path(name) / "plain"
        written = make(folder, rows, width, shard_rows, dtype, in_order)
        order = ActivationStore.open(folder).disk_order
        pack(ActivationStore.open(folder)[WHERE], dtype).tofile(plain)

        def stream(store: ActivationStore) -> None:
            for _ in store.batches(*WHERE, store.disk_order):
                pass

        def checked() -> np.ndarray:
            values = np.fromfile(plain, STORAGE[dtype]).reshape(rows, width)
            row_sums(values)
            out = np.empty((rows, width), dtype=np.float32)
            out[order] = unpack(values, dtype)
            return out

        works: dict[str, Callable[[ActivationStore], object]] = {
            "plain": lambda store: unpack(np.fromfile(plain, STORAGE[dtype]), dtype).reshape(rows, width),
            "checked": lambda store: checked(),
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
        "shape": f"{rows} x {width} {dtype}, {shard_rows} rows a shard, {'in order' if in_order else 'scattered'}",
        "ms": {kind: 1e3 * statistics.median(wall for wall, _ in times) for kind, times in took.items()},
        "ratio": {kind: ratio(kind, 0) for kind in works},
        "ratio_processor": {kind: ratio(kind, 1) for kind in works},
        "written_mb_s": 2 * rows * width * STORAGE[dtype].itemsize / 1e6 / written,
    }


def table(rows: int, rounds: int) -> int:
    """One line for each width, size of shards, type and order; 1 if any misses the bound."""
    missed = 0
    for width, shard_rows, dtype, in_order in product(
        (576, 1024, 2048, 4096), (64, 160), ("float32", "bfloat16"), (False, True)
    ):
        found = reading(rows, width, shard_rows, dtype, rounds, in_order)
        ms, ratio, used = found["ms"], found["ratio"], found["ratio_processor"]
        ok = ratio["store"] <= BOUND
        missed += not ok
        print(
            f"{'ok  ' if ok else 'MISS'} {found['shape']:<58} plain {ms['plain']:6.1f} ms  store {ms['store']:6.1f} ms"
            f"  {ratio['store']:5.2f} x, processor {used['store']:5.2f} x; checked {used['checked']:5.2f} x",
            flush=True,
        )
    return int(missed > 0)


def main() -> int:
    """Measure and print; exit code 1 if the bound is missed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rows", type=int, default=10_000)
    parser.add_argument("--width", type=int, default=4096, help="d_model; of 8B models by default")
    parser.add_argument("--shard-rows", type=int, default=160, help="a batch of 8192 tokens holds 160 prompts of 50")
    parser.add_argument("--dtype", default="float32", choices=list(STORAGE))
    parser.add_argument("--in-order", action="store_true", help="rows in the order of the prompts, not scattered")
    parser.add_argument("--table", action="store_true", help="all widths, sizes of shards and types")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if options.table:
        return table(options.rows, options.rounds)
    found = reading(options.rows, options.width, options.shard_rows, options.dtype, options.rounds, options.in_order)
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
