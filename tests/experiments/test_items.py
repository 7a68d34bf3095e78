"""What a run can be asked: pairs of presentations, and labels called yes and no."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from experiments.config import Setting, load, settings
from experiments.errors import RunError, UsageError
from experiments.items import check_presentations, frame, make, rows, stored
from experiments.rundir import RunDirectory
from tasks.ordering import Ordering


def test_labels_other_than_yes_and_no_are_refused() -> None:
    class TrueFalse(Ordering):
        answers = {"true": ("True",), "false": ("False",)}  # noqa: RUF012

    class Free(Ordering):
        answers = None  # type: ignore[assignment]

    grid = [Setting("n=4", Ordering().validate({"n": 4}))]
    check_presentations(Ordering(), grid)
    with pytest.raises(UsageError, match="the labels true, false"):
        check_presentations(TrueFalse(), grid)
    with pytest.raises(UsageError, match="free-form answers"):
        check_presentations(Free(), grid)


def test_a_family_that_flips_the_gold_or_lacks_a_partner_is_refused(tmp_path: Path) -> None:
    """Both presentations of a pair are scored against one gold answer."""

    class Changed(Ordering):
        def generate(self, params, *, seed, split):
            for matched in super().generate(params, seed=seed, split=split):
                yield replace(matched, presentations=self.change(matched.presentations))

    class Flipping(Changed):
        @staticmethod
        def change(shown):
            return (shown[0], replace(shown[1], gold="no" if shown[1].gold == "yes" else "yes"))

    class Alone(Changed):
        @staticmethod
        def change(shown):
            return shown[:1]

    config = load(None, ["n=4"], {"limit": 8})
    for family, words in ((Flipping(), "flips the gold answer"), (Alone(), "one original and one equivalent")):
        run = RunDirectory(tmp_path)
        with pytest.raises(RunError, match=words):
            make(run, config, family, settings(config, family))
        assert not run.items.exists()


def test_items_are_written_once_and_rows_follow_the_file(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    config = load(None, ["n=3,4", "relation=front_behind,left_right"], {"limit": 8})
    family = Ordering()
    grid = settings(config, family)
    make(run, config, family, grid)
    written = run.items.read_bytes()
    make(run, config, family, grid)
    assert run.items.read_bytes() == written
    labels, groups = zip(*stored(run), strict=True)
    assert list(labels) == [setting.label for setting in grid]
    asked = [row for group in groups for row in rows(group)]
    assert len(asked) == 4 * 8 * 2
    table = frame(asked)
    assert table["setting"].nunique() == 4
    # The same instance under two relations keeps its key, which is what folds are grouped by.
    by_relation = {
        relation: table[table["setting"] == f"n=4, relation={relation}"]["key"].tolist()
        for relation in ("front_behind", "left_right")
    }
    assert by_relation["front_behind"] == by_relation["left_right"]
    assert json.loads(written.splitlines()[0])["setting"] == "n=3, relation=front_behind"
