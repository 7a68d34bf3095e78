"""The code of docs/activation-store.md runs as it stands, and says what is true."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from activations.capturing import Plan, capture
from activations.model import from_modules
from activations.readout import answer_tokens
from tests import tiny_models as tiny

DOC = Path(__file__).parents[2] / "docs/activation-store.md"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_block_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str) -> None:
    pytest.importorskip("transformer_lens")
    model = from_modules(*tiny.tiny_llama())
    prompts, answers = model.encode(tiny.MESSAGES), answer_tokens(model, tiny.ANSWERS)
    plan = Plan(sites=("resid_post", "z"), dtype=dtype, batch_tokens=60, positions=("answer", "index:0"))
    index = [(f"k{n}", "original") for n in range(4)]
    for name, rows in (("acts", slice(0, 4)), ("acts-0", slice(0, 3)), ("acts-1", slice(3, 4))):
        capture(model, prompts[rows], plan, tmp_path / name, answers=answers, index=index[rows])
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"^```python\n(.*?)^```", DOC.read_text(), re.DOTALL | re.MULTILINE)
    assert len(blocks) == 7
    space: dict[str, Any] = {}
    for block in blocks:
        # The tiny store has no premises; the rest of the text is run as it stands.
        exec(block.replace('label="premise:"', 'label="index:"'), space)
    store = space["store"]
    np.testing.assert_array_equal(space["layer"], store["resid_post", 2])
    assert space["labels"] == store.rows["label"].tolist()
    assert space["faults"] == ()
    assert len(space["merged"]) == len(store)
    assert space["cache"]["z", 0].shape == (4, 2, 4, 8)
    # A merged store reads alike in plain h5py.
    plain = next(block for block in blocks if "import h5py" in block)
    exec(plain.replace('"acts"', '"acts-both"'), space)
    np.testing.assert_array_equal(space["layer"], space["merged"]["resid_post", 2])
    for path in Path("acts").glob("shard-*.h5"):
        data = path.read_bytes()
        assert data.split(b"\n")[2] == b"sha256 " + hashlib.sha256(data[256:]).hexdigest().encode() + b" " * (
            len(data.split(b"\n")[2]) - 71
        )
