"""`probe check`: the table of identities, and the rows that compare with other libraries."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

import activations.checks
from activations.checks import Check
from experiments.cli import app
from experiments.errors import UsageError

pytest.importorskip("nnsight", reason="the command compares with this library")


def probe(*words: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, list(words))
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        return 2 if isinstance(result.exception, UsageError) else 1, str(result.exception)
    return result.exit_code, result.stdout


def test_the_built_in_pair_passes_through_all_libraries() -> None:
    code, shown = probe("check", "builtin", "--adapter", "builtin", "--backends", "all")
    lines = shown.splitlines()
    assert code == 0
    assert {line.split()[0] for line in lines} == {"ok"}
    for library in ("transformer_lens", "nnsight"):
        for adapter in ("", ", grpo"):
            for what in ("logits", "resid_pre", "resid_mid", "resid_post", "attn_out", "mlp_out", "z"):
                assert sum(f"hf = {library}, {what}{adapter} " in line for line in lines) == 1


def test_one_library_as_json() -> None:
    code, shown = probe("check", "builtin", "--backends", "nnsight", "--json")
    rows = json.loads(shown)
    assert code == 0
    assert {row["name"].split(",")[0] for row in rows if row["name"].startswith("hf = ")} == {"hf = nnsight"}
    assert all(set(row) == {"name", "value", "bound", "ok", "note"} and row["ok"] for row in rows)


def test_what_cannot_be_compared_has_no_number_and_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    table = [Check("hf = nnsight, z", None, 5e-5, True, "not layers 0-2: why"), Check("x", 1.0, 1e-5, False)]
    monkeypatch.setattr(activations.checks, "check", lambda *_, **__: table)
    code, shown = probe("check", "builtin", "--json")
    assert code == 1
    assert json.loads(CliRunner().invoke(app, ["check", "builtin", "--json"]).stdout)[0]["value"] is None
    shown = CliRunner().invoke(app, ["check", "builtin"]).stdout
    assert shown.splitlines() == [
        "n/a  hf = nnsight, z         -  bound 5e-05  not layers 0-2: why",
        "FAIL x                1.00e+00  bound 1e-05  ",
    ]


@pytest.mark.parametrize("asked", ["pyvene", "", "all,nnsight"])
def test_an_unknown_library_is_named_before_anything_loads(asked: str) -> None:
    code, message = probe("check", "no-such-model", "--backends", asked)
    assert code == 2
    assert message == f"backends are {asked!r}; give all, or one or more of hf, transformer_lens, nnsight with commas"
