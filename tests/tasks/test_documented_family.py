"""The family in docs/add-a-family.md works as it stands there."""

from __future__ import annotations

import re
from pathlib import Path

from tasks.registry import family
from tasks.validation import validate_family


def test_the_documented_family_keeps_every_promise(tmp_path: Path) -> None:
    text = (Path(__file__).parents[2] / "docs" / "add-a-family.md").read_text()
    code = re.search(r"```python\n(.*?)```", text, re.S)
    assert code is not None
    file = tmp_path / "greater.py"
    file.write_text(code[1])
    found = family(f"{file}:Greater")
    findings = validate_family(found, found.validate({}), sets=60, seed=0)
    assert {one.promise for one in findings if not one.ok} == set()
    assert all(one.checked for one in findings if "spans" not in one.promise)
