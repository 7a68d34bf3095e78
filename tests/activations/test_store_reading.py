"""Reading a store: by row, by selection, as a stream, against arrays kept beside it and plain h5py."""

from __future__ import annotations

import tracemalloc
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from activations import store as store_module
from activations.errors import StoreError
from activations.store import ActivationStore, StoreWriter, unpack
from activations.store_shards import row_sums

LABELS = ("answer", "query", "premise:0", "premise:1", "premise:1/mean", "premise:10")
N_PROMPTS, WIDTH = 8, 24
N_ROWS = N_PROMPTS * len(LABELS)
VALUES = np.random.default_rng(3).normal(size=(2, N_ROWS, WIDTH)).astype(np.float32)
ROWS: dict[str, list[Any]] = {
    "key": [f"key{prompt // 2}" for prompt in range(N_PROMPTS) for _ in LABELS],
    "presentation": [("original", "equivalent")[prompt % 2] for prompt in range(N_PROMPTS) for _ in LABELS],
    "label": list(LABELS) * N_PROMPTS,
    "position": list(range(N_ROWS)),
    "n_tokens": [50] * N_ROWS,
}
PROMPTS = ((5, 0, 7), (1, 2), (6, 4, 3))
SHARDS = [[prompt * len(LABELS) + n for prompt in shard for n in range(len(LABELS))] for shard in PROMPTS]


@pytest.fixture
def store(tmp_path: Path) -> ActivationStore:
    return fill(tmp_path / "s")


def fill(folder: Path, dtype: str = "float32", **changes: Any) -> ActivationStore:
    settings: dict[str, Any] = {"rows": ROWS, "content": {}, "n_layers": 2, "shards": SHARDS, **changes}
    datasets = {("resid_post", 0): WIDTH, ("resid_post", 1): WIDTH}
    with StoreWriter(folder, datasets=datasets, dtype=dtype, **settings) as writer:
        for shard in writer.missing:
            rows = list(writer.shards[shard])
            writer.write(shard, {("resid_post", layer): VALUES[layer, rows] for layer in (0, 1)})
    return ActivationStore.open(folder)


def test_labels_are_part_of_the_row_index(store: ActivationStore) -> None:
    assert store.rows.to_dict("list") == ROWS
    np.testing.assert_array_equal(store["resid_post", 1], VALUES[1])


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ({"label": "answer"}, lambda r: r["label"] == "answer"),
        ({"label": "premise:1"}, lambda r: r["label"] == "premise:1"),
        ({"label": "premise:"}, lambda r: r["label"].startswith("premise:")),
        ({"label": "premise:1/"}, lambda r: r["label"] == "premise:1/mean"),
        ({"label": ["query", "premise:0"]}, lambda r: r["label"] in ("query", "premise:0")),
        ({"presentation": "equivalent"}, lambda r: r["presentation"] == "equivalent"),
        ({"key": "key2"}, lambda r: r["key"] == "key2"),
        (
            {"key": ("key0", "key3"), "presentation": "original", "label": "answer"},
            lambda r: r["key"] in ("key0", "key3") and r["presentation"] == "original" and r["label"] == "answer",
        ),
        ({}, lambda r: True),
    ],
)
def test_select(store: ActivationStore, asked: dict[str, Any], expected: Any) -> None:
    rows = store.select(**asked)
    table = store.rows.to_dict("records")
    assert rows.tolist() == [n for n, row in enumerate(table) if expected(row)]
    np.testing.assert_array_equal(store.read("resid_post", 0, rows), VALUES[0, rows])


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"label": "premise:7"}, r"no row of .* has label 'premise:7'; it has 'answer', 'query', 'premise:0'"),
        ({"label": "token:"}, "has label 'token:'"),
        ({"label": "anwser"}, r"did you mean answer\?"),
        ({"key": ["key1", "key9"]}, "has key 'key9'; it has 'key0', 'key1'"),
        ({"presentation": ""}, "has presentation ''; it has 'original', 'equivalent'"),
        ({"presentation": []}, "presentation is an empty list"),
    ],
)
def test_empty_selection_names_what_is_there(store: ActivationStore, asked: dict[str, Any], words: str) -> None:
    with pytest.raises(StoreError, match=words) as caught:
        store.select(**asked)
    assert "\n" not in str(caught.value)


def test_conditions_that_exclude_each_other(tmp_path: Path) -> None:
    rows = {**ROWS, "label": ["query" if key == "key1" else "answer" for key in ROWS["key"]]}
    with pytest.raises(StoreError, match=r"has key 'key1', label 'answer' together; select with fewer"):
        fill(tmp_path / "s", rows=rows).select(key="key1", label="answer")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_any_rows_in_any_order(tmp_path: Path, dtype: str) -> None:
    store = fill(tmp_path / "s", dtype)
    whole = store.stack("resid_post")
    draw = np.random.default_rng(0)
    for n in (1, 2, 7, 60, 200):
        rows = draw.integers(0, N_ROWS, size=n)
        got = store.stack("resid_post", None, rows)
        assert got.dtype == np.float32
        np.testing.assert_array_equal(got, whole[:, rows])
    np.testing.assert_array_equal(store.read("resid_post", -1, np.arange(N_ROWS) % 3 == 0), whole[1, ::3])
    assert store.read("resid_post", 0, []).shape == (0, WIDTH)


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([0, N_ROWS], f"no row {N_ROWS} in .*rows 0 to {N_ROWS - 1}"),
        ([-1], "no row -1 in"),
        ([0.5], "rows is float64"),
        ([[1]], "rows is int64"),
        (np.ones(3, dtype=bool), "rows is bool"),
    ],
)
def test_wrong_rows_are_refused(store: ActivationStore, rows: Any, words: str) -> None:
    with pytest.raises(StoreError, match=words):
        store.read("resid_post", 0, rows)


def test_only_the_asked_rows_are_read(store: ActivationStore) -> None:
    """Damage in a row that is not asked for does not matter; in the others it is found."""
    path = store.directory / "shard-00001.h5"
    good, hit = path.read_bytes(), SHARDS[1][3]
    at = good.index(VALUES[1, hit].tobytes())
    path.write_bytes(good[: at + 5] + bytes([good[at + 5] ^ 4]) + good[at + 6 :])
    others = [row for row in range(N_ROWS) if row != hit]
    np.testing.assert_array_equal(store.read("resid_post", 1, others), VALUES[1, others])
    np.testing.assert_array_equal(store["resid_post", 0], VALUES[0])
    words = r"shard-00001.h5 is damaged \(acts/resid_post/L1 of its row 3 does not fit the checksum\)"
    for rows in (None, [0, hit], [hit]):
        with pytest.raises(StoreError, match=words):
            store.read("resid_post", 1, rows)


def test_threads_give_the_same_and_hand_on_errors(store: ActivationStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "_LARGE", 0)
    np.testing.assert_array_equal(store.stack("resid_post"), VALUES)
    (store.directory / "shard-00002.h5").write_bytes(b"")
    with pytest.raises(StoreError, match=r"shard-00002.h5 is damaged \(it is cut off\)"):
        store.stack("resid_post")
    (store.directory / "shard-00002.h5").unlink()
    with pytest.raises(StoreError, match=r"shard-00002.h5 is damaged \(it is missing\)"):
        store.stack("resid_post")


def test_stream_gives_every_row_once(store: ActivationStore, monkeypatch: pytest.MonkeyPatch) -> None:
    for window in (1, 1 << 12, 1 << 25):
        monkeypatch.setattr(store_module, "_WINDOW", window)
        got = list(store.batches("resid_post", 0, batch_rows=7))
        assert [len(batch) for batch in got] == [7] * 6 + [6]
        np.testing.assert_array_equal(np.concatenate(got), VALUES[0])
        rows = [40, 3, 3, 17, 0]
        np.testing.assert_array_equal(np.concatenate(list(store.batches("resid_post", 1, rows, 2))), VALUES[1, rows])
    order = store.disk_order
    assert order.tolist() == [row for shard in SHARDS for row in shard]
    np.testing.assert_array_equal(np.concatenate(list(store.batches("resid_post", 0, order, 5))), VALUES[0, order])


def test_stream_refuses_at_once(store: ActivationStore) -> None:
    with pytest.raises(StoreError, match="no z layer 0"):
        store.batches("z", 0)
    with pytest.raises(StoreError, match="batch_rows is 0"):
        store.batches("resid_post", 0, batch_rows=0)
    with pytest.raises(StoreError, match="no row 99"):
        store.batches("resid_post", 0, [99])


def test_streaming_memory_does_not_grow_with_the_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A store eight times as large takes the memory of one window and one shard, not eight times as much."""
    monkeypatch.setattr(store_module, "_WINDOW", 1 << 16)
    width, peaks, sizes = 256, [], []
    for n_rows in (2_000, 16_000):
        folder = tmp_path / str(n_rows)
        numbers = [str(n) for n in range(n_rows)]
        rows = {"key": numbers, "presentation": numbers, "position": range(n_rows), "n_tokens": range(n_rows)}
        shards = [list(range(at, at + 100)) for at in range(0, n_rows, 100)]
        where = ("resid_post", 0)
        with StoreWriter(
            folder, datasets={where: width}, dtype="float32", n_layers=1, shards=shards, rows=rows, content={}
        ) as writer:
            for shard in writer.missing:
                writer.write(shard, {where: np.full((100, width), shard, dtype=np.float32)})
        opened = ActivationStore.open(folder)
        opened.read(*where, [0])  # the table of rows is made
        tracemalloc.start()
        total = sum(float(batch.sum()) for batch in opened.batches(*where, batch_rows=64))
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        sizes.append(n_rows * width * 4)
        assert total == 100.0 * width * sum(range(len(shards)))
    assert peaks[1] < sizes[1] / 10
    assert peaks[1] - peaks[0] < 20 * 14_000  # row numbers, and not rows of 1 KiB


def test_plain_h5py_reads_a_shard(store: ActivationStore) -> None:
    for n, rows in enumerate(SHARDS):
        with h5py.File(store.directory / f"shard-{n:05d}.h5") as file:
            assert file["rows"][()].tolist() == rows
            for layer in (0, 1):
                dataset = file[f"acts/resid_post/L{layer}"]
                np.testing.assert_array_equal(dataset[()], VALUES[layer, rows])
                assert dataset.fletcher32 and dataset.chunks == dataset.shape
                # The documented place of the data, and the documented checksum.
                head = (store.directory / f"shard-{n:05d}.h5").read_bytes()
                table = np.frombuffer(head, dtype="<u8", count=4, offset=256)
                assert head[int(table[2 + layer]) :].startswith(VALUES[layer, rows].tobytes())
                assert file["sums"][1 + layer].tolist() == [slow_sum(row.tobytes()) for row in dataset[()]]


def slow_sum(data: bytes) -> int:
    """The checksum of a row, in the words of store_shards."""
    data += bytes(-len(data) % 8)
    words = [int.from_bytes(data[at : at + 8], "little") for at in range(0, len(data), 8)]
    total = golden = 0x9E3779B97F4A7C15
    for k in range(0, len(words), 128):
        block = sum(words[k : k + 128]) % 2**64
        total += (block ^ (block >> 32)) * (((k // 128 + 1) * golden % 2**64) | 1)
    return total % 2**64


@pytest.mark.parametrize("shape", [(5, 1), (3, 7), (2, 64), (4, 65), (3, 576), (2, 1000)])
@pytest.mark.parametrize("kind", ["<f4", "<u2", "<f2", "<i8"])
def test_row_checksum_is_the_documented_one(shape: tuple[int, int], kind: str) -> None:
    values = np.random.default_rng(1).integers(-30000, 30000, size=shape).astype(kind)
    assert row_sums(values).tolist() == [slow_sum(row.tobytes()) for row in values]


def test_row_checksum_finds_every_flipped_bit_and_swapped_words() -> None:
    row = np.random.default_rng(2).normal(size=(1, 300)).astype(np.float32)
    right = row_sums(row)[0]
    data = bytearray(row.tobytes())
    for bit in range(8 * len(data)):
        data[bit // 8] ^= 1 << bit % 8
        assert row_sums(np.frombuffer(data, "<f4")[None])[0] != right
        data[bit // 8] ^= 1 << bit % 8
    signs = row.copy()
    signs[0, [1, 299]] *= -1  # the top bits of two words
    assert row_sums(signs)[0] != right
    swapped = row[:, [298, 299, *range(2, 298), 0, 1]]
    assert row_sums(swapped)[0] != right
    assert row_sums(np.zeros_like(row))[0] not in (right, 0)


def test_heads_are_recorded_and_in_the_file(tmp_path: Path) -> None:
    folder = tmp_path / "s"
    content = {"z": {"heads": {"0": 4, "1": None}}}
    rows = {name: column[:2] for name, column in ROWS.items()}
    datasets = {("z", 0): 8, ("z", 1): 6}
    with StoreWriter(
        folder, datasets=datasets, dtype="bfloat16", n_layers=2, shards=[[1, 0]], rows=rows, content=content
    ) as writer:
        writer.write(0, {("z", 0): np.ones((2, 8)), ("z", 1): np.ones((2, 6))})
    store = ActivationStore.open(folder)
    assert (store.heads("z", 0), store.heads("z", 1), store.width("z", -1)) == (4, None, 6)
    with h5py.File(folder / "shard-00000.h5") as file:
        assert dict(file["acts/z/L0"].attrs) == {"dtype": b"bfloat16", "heads": 4, "width": 2}
        assert dict(file["acts/z/L1"].attrs) == {"dtype": b"bfloat16"}
        np.testing.assert_array_equal(unpack(file["acts/z/L0"][()], "bfloat16"), np.ones((2, 8)))


def test_old_format_is_refused(tmp_path: Path) -> None:
    """A manifest as format 1 wrote it."""
    (tmp_path / "manifest.json").write_text(
        '{"digest": "0", "content": {"format": 1, "rows": "0"}, "datasets": [], "rows": {}, "notes": {}}'
    )
    with pytest.raises(StoreError, match=r"manifest.json has format 1, this program reads 2; capture into a new"):
        ActivationStore.open(tmp_path)


@pytest.mark.parametrize("shard", [0, 1, 2])
@pytest.mark.parametrize("rows", [None, [40, 3, 3, 20, 12]])
def test_damage_is_named_among_shards_that_are_read_together(
    store: ActivationStore, shard: int, rows: list[int] | None
) -> None:
    path = store.directory / f"shard-{shard:05d}.h5"
    data = bytearray(path.read_bytes())
    row = SHARDS[shard].index(next(n for n in rows if n in SHARDS[shard])) if rows else 4
    where = int(np.frombuffer(data, "<u8", 4, 256)[3]) + row * WIDTH * 4 + 9
    data[where] ^= 1
    path.write_bytes(data)
    words = rf"shard-0000{shard}.h5 is damaged \(acts/resid_post/L1 of its row {row} does not fit the checksum\)"
    with pytest.raises(StoreError, match=words):
        store.read("resid_post", 1, rows)
    np.testing.assert_array_equal(store.read("resid_post", 0, rows), VALUES[0, slice(None) if rows is None else rows])


def test_rows_in_order_are_read_in_place_and_checked(tmp_path: Path) -> None:
    """Shards of consecutive rows, as prompts of one length make them."""
    shards = [list(range(at, min(at + 5, N_ROWS))) for at in range(0, N_ROWS, 5)]
    for dtype in ("float32", "bfloat16"):
        store = fill(tmp_path / dtype, dtype, shards=shards)
        expected = unpack(store_module.pack(VALUES, dtype), dtype)
        np.testing.assert_array_equal(store.stack("resid_post"), expected)
        np.testing.assert_array_equal(store.read("resid_post", 1, np.arange(7, 31)), expected[1, 7:31])
        np.testing.assert_array_equal(store.read("resid_post", 1, np.arange(31, 7, -1)), expected[1, 31:7:-1])
    path = tmp_path / "float32/shard-00003.h5"
    data = bytearray(path.read_bytes())
    data[int(np.frombuffer(data, "<u8", 4, 256)[2])] ^= 1
    path.write_bytes(data)
    with pytest.raises(StoreError, match=r"shard-00003.h5 is damaged \(acts/resid_post/L0 of its row 0 does"):
        _ = ActivationStore.open(tmp_path / "float32")["resid_post", 0]
