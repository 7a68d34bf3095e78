"""What can be asked of the probes of a run, and what is refused because it can't apply."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from experiments import fitting, probe_options, probe_targets, probe_units
from experiments.config import load, settings
from experiments.errors import UsageError
from experiments.pipeline import _check as check
from experiments.pipeline import run
from experiments.progress import Reporter
from probes.linear import MEMBERS, PENALTIES
from tasks.registry import family

ORDERING = family("ordering")


def checked(*pairs: str):
    config = load(None, list(pairs), {})
    probe_targets.check(config, ORDERING)
    check(config, settings(config, ORDERING))
    return config.probe


def test_defaults_are_spelled_out_so_that_the_digest_covers_them() -> None:
    probe = checked()
    assert (probe.member, probe.penalty, probe.folds, probe.splits) == ("logistic", PENALTIES, 5, 5)
    assert probe.target == ("gold",) and probe.held_out is None and probe.inner_folds is None
    assert checked("probe.member=mean_difference").penalty is None
    assert checked("probe.penalty=0.1").penalty == (0.1,)
    held = checked("probe.held_out=n")
    assert (held.folds, held.splits) == (None, 1)


def test_every_member_can_be_asked_for() -> None:
    for member in MEMBERS:
        assert checked(f"probe.member={member}").member == member


def test_gold_is_always_there_and_once() -> None:
    assert checked("probe.target=answer").target == ("gold", "answer")
    assert checked("probe.target=correct,gold,correct").target == ("gold", "correct")


@pytest.mark.parametrize(
    ("pairs", "words"),
    [
        (["probe.held_out=relation"], ["has one value of it, front_behind", "--set relation="]),
        (["probe.held_out=colour"], ["probe.held_out is 'colour'", "template", "relation"]),
        (["probe.held_out=n", "probe.folds=3"], ["probe.folds is 3", "a fold of each value"]),
        (["probe.held_out=n", "probe.splits=3"], ["probe.splits is 3", "one way only"]),
        (["probe.member=mean_difference", "probe.penalty=1"], ["mean_difference, which has none"]),
        (["probe.member=mean_difference", "probe.inner_folds=2"], ["inner_folds is 2", "there is none"]),
        (["probe.penalty=1", "probe.inner_folds=2"], ["inner_folds is 2", "choose between several"]),
        (["probe.folds=2"], ["probe.folds is 2", "none is left to choose a penalty", "probe.penalty=0.01"]),
        (["probe.penalty=1,0"], ["probe.penalty is 0", "greater than 0"]),
        (["probe.penalty=1,1"], ["none twice"]),
        (["probe.penalty=1e+30"], ["probe.penalty is", "less than or equal to 1000000"]),
        (["probe.inner_folds=5"], ["probe.inner_folds is 5", "probe.folds is 5", "at most 4"]),
        (["probe.folds=3", "probe.inner_folds=3"], ["inner_folds is 3", "at most 2"]),
        (["lens=true"], ["lens is True", "give keys and values"]),
        (["table.columns="], ["table.columns is empty", "give a list"]),
        (["probe.target=gold,1"], ["probe.target is 1"]),
        (["probe.penalty=[]"], ["probe.penalty is []", "at least one"]),
        (["probe.member=svm"], ["probe.member is 'svm'", "'logistic', 'ridge' or 'mean_difference'"]),
        (["probe.target=mood"], ["'mood'", "gold, answer, correct, presentation, or of ordering: front_half"]),
        (["probe.threshold=1"], ["threshold is 1", "less than 1"]),
        (["table={rows: [colour]}"], ["names 'colour', which is no parameter"]),
        (["table={columns: [size]}"], ["'size'", "'accuracy'"]),
    ],
)
def test_what_cannot_apply_is_refused_in_a_line(pairs: list[str], words: list[str]) -> None:
    with pytest.raises(UsageError) as caught:
        checked(*pairs)
    assert all(word in str(caught.value) for word in words), str(caught.value)
    assert "\n" not in str(caught.value)


def rows(per_cell: int, settings: int, cells: tuple[str, ...]) -> pd.DataFrame:
    table = [
        {"setting": f"n={number}", "cell": cell, "gold": cell.rpartition("-")[2], "key": f"{number} {cell} {one}",
         "presentation": "original"}
        for number in range(settings) for cell in cells for one in range(per_cell)
    ]  # fmt: skip
    return pd.DataFrame(table)


def test_units_are_checked_once_the_items_are_there() -> None:
    two = {f"n={number}": {"n": number} for number in range(2)}
    for name in ("n", "template"):
        one, several = (checked(f"probe.held_out={name}", f"probe.penalty={value}") for value in ("0.1", "0.1,1"))
        probe_options.check_units(one, two, rows(4, 2, ORDERED))
        with pytest.raises(UsageError, match=r"makes 2 folds .* none is left to choose a penalty"):
            probe_options.check_units(several, two, rows(4, 2, ORDERED))
    probe_options.check_units(checked("probe.held_out=n"), {f"n={n}": {"n": n} for n in range(3)}, rows(4, 3, ORDERED))
    # Where the other values hold the same instances, nothing is left to train on.
    shared = rows(4, 2, ORDERED).assign(key=[str(number % 16) for number in range(32)])
    with pytest.raises(
        UsageError, match=r"nothing is left to train on: .* then give the run to `probe fit --held-out n`"
    ):
        probe_options.check_units(checked("probe.held_out=n", "probe.penalty=1"), two, shared)
    template = checked("probe.held_out=template", "probe.penalty=1")
    with pytest.raises(UsageError, match="all prompts of derived have one gold answer"):
        probe_options.check_units(template, two, rows(4, 2, ("derived-yes", "severed-no")))
    with pytest.raises(UsageError, match="have one value, forward: leave it out"):
        probe_options.check_units(template, two, rows(4, 2, ("forward-yes", "forward-no")))


def test_what_only_the_items_show_is_refused_before_a_file_is_written(tmp_path: Path) -> None:
    for pairs in (["probe.held_out=template"], ["relation=front_behind,above_below", "probe.held_out=relation"]):
        config = load(None, ["n=4", "names=census", *pairs], {"model": "none", "limit": 12})
        with pytest.raises(UsageError, match=r"none is left to choose a penalty|nothing is left to train on"):
            run(config, tmp_path / "run", config_text="", reporter=Reporter(quiet=True))
    assert not (tmp_path / "run").exists()


def test_an_empty_name_is_no_configuration() -> None:
    with pytest.raises(UsageError, match="the configuration's name is empty"):
        load("", [], {})


def test_folds_of_few_instances_are_stratified_by_what_can_be() -> None:
    for per_cell in (1, 2, 3):
        table = rows(per_cell, 2, ORDERED)
        folds = table.assign(fold=table["key"].map(fitting.shared_folds(table, 4, 1)))
        assert set(folds.groupby("fold")["gold"].nunique()) == {2}


ORDERED = ("forward-yes", "forward-no", "converse-yes", "converse-no")


def test_the_null_exchanges_within_setting_and_phrase_where_enough_can_be_exchanged() -> None:
    table = rows(10, 2, ORDERED)
    assert set(probe_units.phrases(table)) == {"forward", "converse"}
    assert set(fitting.strata(table, 5)) == {f"n={n} {phrase}" for n in (0, 1) for phrase in ("forward", "converse")}
    # 4 a cell: 32 rows in 5 folds are too few for 4 strata, and for 2.
    assert fitting.strata(rows(4, 2, ORDERED), 5) is None
    assert set(fitting.strata(rows(5, 2, ORDERED), 5)) == {"n=0", "n=1"}
    # Cells that are nothing but the gold answer under another name would leave no label to exchange.
    horn = rows(40, 1, ("derived-yes", "severed-no"))
    assert fitting.strata(horn, 5) is None
    assert set(fitting.strata(rows(40, 2, ("derived-yes", "severed-no")), 5)) == {"n=0", "n=1"}


def test_shared_folds_have_both_golds_of_each_setting_in_every_fold() -> None:
    table = rows(5, 3, ORDERED)
    folds = fitting.shared_folds(table, 5, 1)
    assert folds == fitting.shared_folds(table, 5, 1) != fitting.shared_folds(table, 5, 2)
    dealt = table.assign(fold=table["key"].map(folds))
    counts = dealt.groupby(["setting", "cell", "fold"]).size()
    assert len(counts) == 3 * 4 * 5 and set(counts) == {1}
    # An instance under two settings lies in one fold.
    twice = pd.concat([table, table.assign(setting="again")], ignore_index=True)
    assert set(fitting.shared_folds(twice, 5, 1)) == set(table["key"])
    assert np.bincount(list(fitting.shared_folds(twice, 5, 1).values())).tolist() == [12] * 5
