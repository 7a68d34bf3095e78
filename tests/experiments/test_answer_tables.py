"""Tables of answers: worked by hand, against pandas, and what is refused."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from pydantic import ValidationError

from experiments.answer_columns import ANSWER_COLUMNS, REFERRING, RELATIVE
from experiments.answer_facts import Facts, choices_of, facts_of, in_order, plain_fact, questions, series
from experiments.answer_tables import AnswerTableSpec, check_answers, make_answer_table
from experiments.errors import RunError, UsageError
from experiments.eval_config import other
from experiments.rundir import RunDirectory
from experiments.tables import show_table
from tasks.files import to_record
from tasks.registry import family as family_named
from tests.experiments.made_answers import LABEL, made

PARAMS: dict[str, dict[str, Any]] = {"one": {}}
OWN = [name for name in ANSWER_COLUMNS if name not in RELATIVE]


def spec(*columns: str, **keys: Any) -> AnswerTableSpec:
    return AnswerTableSpec(**{"of": "answers", "columns": columns, **keys})


def by_hand(answers: str, **also: list[Any]) -> tuple[pd.DataFrame, Facts]:
    """Sets of one valid and one invalid inference, each asked plainly and negated: four letters (y, n, -) for two sets."""
    kinds = [("valid", "original"), ("valid", "negated"), ("invalid", "original"), ("invalid", "negated")]
    rows = []
    for place, letter in enumerate(answers):
        validity, kind = kinds[place % 4]
        gold = "yes" if (validity == "valid") == (kind == "original") else "no"
        rows.append({
            "arm": "base", "setting": "one", "key": f"{place // 4}{validity}", "presentation": kind, "cell": validity,
            "gold": gold, "answer": {"y": "yes", "n": "no", "-": None}[letter], "validity": validity,
            "polarity": "affirmative" if kind == "original" else "negated", "template": validity,
            **{name: values[place] for name, values in also.items()},
        })  # fmt: skip
    table = pd.DataFrame(rows)
    table["answer"] = table["answer"].astype("string")
    names = ("validity", "polarity", "template", *also)
    facts = Facts(table[["setting", "key", "presentation", *names]], names, {"validity": ("valid", "invalid")})
    return table.drop(columns=list(names)), facts


def test_the_four_cells_worked_by_hand() -> None:
    # Three contents. Valid plain: y y n; valid negated: n y y; invalid plain: n n y; invalid negated: y - y.
    table, facts = by_hand("ynny" + "yyn-" + "nyyy")
    (row,) = make_answer_table(table, facts, PARAMS, spec(*OWN), seed=1, resamples=50).to_dict("records")
    expected = {
        "v_aff": 2 / 3, "v_neg": 1 / 3, "i_aff": 2 / 3, "i_neg": 2 / 3, "accuracy": 7 / 12, "uncertain": 1 / 12,
        "accuracy_yes": 2 / 3, "accuracy_no": 1 / 2, "bias": 1 / 6, "abs_bias": 1 / 6, "floor": 1 / 2,
        "affirmative_floor": 2 / 3, "polarity_sensitivity": 1 / 6, "cell_average": 7 / 12, "yes_rate": 7 / 11,
        "accuracy_affirmative": 2 / 3, "accuracy_negated": 1 / 2, "accuracy_drop": 1 / 6, "answers": 12, "sets": 6,
        "pooled_micro": 7 / 12, "pooled_cell": 7 / 12, "pooled_template": 7 / 12, "pooled_frame": 7 / 12,
        "pooled_prompt": 7 / 12, "pooled_spread": 0.0,
    }  # fmt: skip
    for name, value in expected.items():
        assert row[name] == pytest.approx(value), name
    assert row["floor"] + abs(row["bias"]) / 2 == pytest.approx(row["cell_average"])
    assert np.isnan(row["prefix_accuracy"]) and "negated both by a prefix" in row["prefix_accuracy_reason"]
    assert row["matched_pairs"] == 0


def test_a_difference_worked_by_hand() -> None:
    # Sets 0 and 1 are about x, sets 2 and 3 about y; 0 and 2 share place one, 1 and 3 place two.
    answers = "ynny" + "ynnn" + "nnny" + "nynn"
    who = [name for name in "xxyy" for _ in range(4)]
    place = [name for name in ("one", "two", "one", "two") for _ in range(4)]
    table, facts = by_hand(answers, who=who, place=place)
    chosen = spec("accuracy", "difference", "difference_p_holm", rows=("who",), over="who", reference=("y",),
                  blocks=("template", "place"))  # fmt: skip
    rows = make_answer_table(table, facts, PARAMS, chosen, seed=1, resamples=50).set_index("who")
    # Blocks (valid, one): x 1 less y ½; (valid, two): 1 less 0; (invalid, one): 1 less 1; (invalid, two): ½ less ½.
    assert rows.loc["x", "accuracy"] == pytest.approx(7 / 8) and rows.loc["y", "accuracy"] == pytest.approx(4 / 8)
    assert rows.loc["x", "difference"] == pytest.approx((0.5 + 1 + 0 + 0) / 4)
    assert (
        np.isnan(rows.loc["y", "difference"]) and "what others are compared with" in rows.loc["y", "difference_reason"]
    )
    beside = spec("accuracy", rows=("who",), across="who", beside=("range", "largest_difference"), over="who",
                  reference=("y",), blocks=("template", "place"))  # fmt: skip
    both = make_answer_table(table, facts, PARAMS, beside, seed=1, resamples=50)
    assert both["range"].tolist() == pytest.approx([3 / 8, 3 / 8])
    assert both["largest_difference"].tolist() == pytest.approx([3 / 8, 3 / 8])


def test_the_reference_alone_has_no_row_where_nothing_but_differences_is_shown() -> None:
    table, facts = by_hand("ynny" * 4, who=[name for name in "xyzw" for _ in range(4)])
    only = spec("difference", rows=("who",), over="who", reference=("z", "w"), blocks=("template",))
    rows = make_answer_table(table, facts, PARAMS, only, seed=1, resamples=50)
    assert rows["who"].tolist() == ["x", "y"]
    assert rows["difference"].tolist() == [0.0, 0.0]
    assert set(rows["difference_n"]) == {12}  # four of its own and eight of the two that count as one


def test_models_that_lean_apart() -> None:
    # One says always yes, one always no, one always yes: sizes 1, two thirds on one side.
    yes, facts = by_hand("yyyy" * 2)
    no = by_hand("nnnn" * 2)[0]
    table = pd.concat([part.assign(arm=arm) for arm, part in (("a", yes), ("b", no), ("c", yes))], ignore_index=True)
    chosen = spec("mean_lean", "mean_polarity_sensitivity", "agreement", rows=("validity",), over="arm")
    rows = make_answer_table(table, facts, PARAMS, chosen, seed=1, resamples=50)
    assert rows["mean_lean"].tolist() == [1.0, 1.0] and rows["agreement"].tolist() == pytest.approx([2 / 3, 2 / 3])
    # Of valid inferences a model that says yes loses all under negation, one that says no gains all.
    assert rows["mean_polarity_sensitivity"].tolist() == pytest.approx([1 / 3, -1 / 3])


def test_what_no_resample_changes_has_wilsons_interval_or_none() -> None:
    table, facts = by_hand("yyyy" * 8)
    (row,) = make_answer_table(table, facts, PARAMS, spec("v_aff", "v_neg", "floor", "bias", "abs_bias"), seed=1,
                               resamples=50).to_dict("records")  # fmt: skip
    assert row["v_aff"] == 1 and row["v_aff_low"] < 0.8 and row["v_neg"] == 0 and row["v_neg_high"] > 0.2
    assert row["floor"] == 0 and np.isnan(row["floor_low"]) and "no resample changes floor" in row["floor_reason"]
    assert row["abs_bias"] == 1 and np.isnan(row["abs_bias_high"])


def test_columns_agree_with_plain_pandas() -> None:
    table, facts, params = made({"activities": ["party", "event"]}, arms=("base", "tuned"), limit=240)
    chosen = spec(*OWN, rows=("arm", "group"))
    rows = make_answer_table(table, facts, params, chosen, seed=3, resamples=50).set_index(["arm", "group"])
    whole = table.merge(facts.table, on=["setting", "key", "presentation"])
    assert len(rows) == 2 * 8 and len(whole) == len(table)
    for place, part in whole.groupby(["arm", "group"]):
        right = part["correct"]
        cell = right.groupby([part["validity"], part["polarity"]]).mean()
        v_aff, v_neg = cell["valid", "affirmative"], cell["valid", "negated"]
        i_aff, i_neg = cell["invalid", "affirmative"], cell["invalid", "negated"]
        read = part["answer"].dropna()
        styles = part[part["negation"].isin(["prefix", "not"])].pivot_table(
            index=["key", "form"], columns="negation", values="correct", aggfunc="first"
        )
        styles = styles.dropna().astype(float)
        expected = {
            "accuracy": right.mean(), "uncertain": part["answer"].isna().mean(), "yes_rate": (read == "yes").mean(),
            "v_aff": v_aff, "v_neg": v_neg, "i_aff": i_aff, "i_neg": i_neg,
            "bias": (v_aff + i_neg - v_neg - i_aff) / 2, "floor": min(v_aff + i_neg, v_neg + i_aff) / 2,
            "polarity_sensitivity": (v_aff + i_aff - v_neg - i_neg) / 2, "affirmative_floor": min(v_aff, i_aff),
            "accuracy_affirmative": right[part["polarity"] == "affirmative"].mean(),
            "accuracy_drop": right.groupby(part["polarity"]).mean() @ pd.Series({"affirmative": 1, "negated": -1}),
            "lean": part.assign(say=part["answer"].map({"yes": 1, "no": -1}).fillna(0).astype(float))
            .groupby(["validity", "polarity"])["say"].mean().mean(),
            "pooled_prompt": right.groupby(part["key"]).mean().mean(),
            "pooled_template": right.groupby(part["pattern"]).mean().mean(),
            "pooled_frame": right.groupby(part["form"]).mean().mean(),
            "pooled_cell": cell.mean(), "answers": len(part), "sets": part["key"].nunique(),
            "matched_pairs": len(styles),
        }  # fmt: skip
        for name, value in expected.items():
            assert rows.loc[place, name] == pytest.approx(value), (place, name)
        by_set = styles.groupby(level="key").mean().mean()
        assert rows.loc[place, "prefix_gain"] == pytest.approx(by_set["prefix"] - by_set["not"])
        for name in ("accuracy", "bias", "floor", "pooled_spread"):
            assert rows.loc[place, f"{name}_low"] <= rows.loc[place, name] <= rows.loc[place, f"{name}_high"]


def test_a_row_does_not_depend_on_the_others_and_order_is_the_familys() -> None:
    table, facts, params = made({"activities": ["event", "party"]}, limit=120)
    how: Any = {"seed": 1, "resamples": 50}
    rows = make_answer_table(table, facts, params, spec("accuracy", "bias", rows=("activity", "form")), **how)
    assert rows["activity"].drop_duplicates().tolist() == ["party", "event"]
    assert rows["form"].drop_duplicates().tolist() == ["truth", "correct", "valid", "follow", "direct"]
    alone = make_answer_table(table.sample(frac=1, random_state=0), facts, params,
                              spec("accuracy", "bias", rows=("form",), only={"activity": "event"}), **how)  # fmt: skip
    same = rows[rows["activity"] == "event"].reset_index(drop=True)
    assert alone.drop(columns="form").equals(same.drop(columns=["form", "activity"]))


def test_the_prompt_sent_again_counts_once() -> None:
    table, facts, params = made({"presentations": ["original", "truth_negated", "repeat"]}, limit=60)
    once = make_answer_table(table, facts, params, spec("answers"), seed=1, resamples=50)
    assert once["answers"].tolist() == [120]
    shown = make_answer_table(table, facts, params, spec("answers", rows=("presentation",)), seed=1, resamples=50)
    assert shown["presentation"].tolist() == ["original", "truth_negated", "repeat"]


def test_sorted_and_side_by_side() -> None:
    table, facts, params = made(arms=("a", "b", "c"), limit=120)
    chosen = spec("accuracy", rows=("arm", "form"), across="form", beside=("range", "floor"), over="form", sort="floor")
    rows = make_answer_table(table, facts, params, chosen, seed=1, resamples=50)
    floors = rows.drop_duplicates("arm")["floor"].tolist()
    assert floors == sorted(floors, reverse=True) and len(rows) == 15
    assert rows["form"].tolist()[:5] == ["truth", "correct", "valid", "follow", "direct"]
    one = rows[rows["arm"] == "a"]
    assert one["range"].nunique() == 1 and one["range"].iloc[0] == pytest.approx(np.ptp(one["accuracy"]))
    drawn = show_table(rows, chosen)
    assert [str(column.header).split("\n")[-1] for column in drawn.columns][1:6] == one["form"].tolist()
    assert [str(column.header) for column in drawn.columns][-2:] == ["Range", "Floor"]


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"columns": ("range",), "over": "group", "blocks": ("group",)}, ["blocks names 'group', which is compared"]),
        (
            {
                "rows": ("arm", "group"),
                "across": "group",
                "columns": ("accuracy",),
                "beside": ("difference",),
                "over": "group",
                "reference": ("letters",),
                "blocks": ("template",),
            },
            ["column 'difference' tells the values of 'group' apart, which stand across"],
        ),
        ({"columns": ("flor",)}, ["column 'flor' is unknown", "did you mean floor"]),
        ({"columns": ("range",)}, ["'range' compares rows", "over: activity"]),
        (
            {"columns": ("difference",), "over": "form", "rows": ("form",)},
            ["compares with one value of form", "reference"],
        ),
        ({"columns": ("difference",), "over": "form", "reference": ("truth",)}, ["tells the values of 'form' apart"]),
        ({"columns": ("floor",), "beside": ("range",), "over": "form"}, ["nothing is printed across"]),
        ({"columns": ("floor",), "sort": "bias"}, ["sort is 'bias'"]),
        ({"columns": ("floor",), "across": "form"}, ["across is 'form'"]),
        ({"columns": ("floor", "floor")}, ["twice"]),
    ],
)
def test_specifications_that_say_nothing_are_refused(keys: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ValidationError) as error:
        AnswerTableSpec(of="answers", **keys)
    assert all(word in str(error.value) for word in words), str(error.value)


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"rows": ("tempalte",)}, ["table row names 'tempalte'", "did you mean template"]),
        ({"only": {"polarity": ["postive"]}}, ["only.polarity is 'postive'", "affirmative, negated"]),
        ({"without": {"presentation": ["not_corect"]}}, ["without.presentation is 'not_corect'"]),
        ({"columns": ("range",), "over": "activty"}, ["over names 'activty'"]),
        (
            {"columns": ("largest_difference",), "over": "group", "reference": ("numbers",)},
            ["reference is numbers and the questions have group", "letters"],
        ),
        ({"only": {"all": ["all"]}}, ["only names 'all'"]),
        ({"columns": ("range",), "over": "all"}, ["over names 'all'"]),
        ({"blocks": ("foo",)}, ["blocks names 'foo'"]),
    ],
)
def test_tables_that_the_questions_cannot_give_are_refused(keys: dict[str, Any], words: list[str]) -> None:
    _, facts, params = made(limit=8)
    with pytest.raises(UsageError) as error:
        check_answers(AnswerTableSpec(**{"of": "answers", "columns": ("floor",), **keys}), facts, params, {})
    assert all(word in str(error.value) for word in words) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"without": {"cell": ["foo"]}}, ["without.cell is 'foo'", "valid, invalid"]),
        ({"without": {"arm": ["bas"]}}, ["without.arm is 'bas'", "base"]),
        (
            {"columns": ("difference",), "rows": ("arm", "group"), "over": "group", "blocks": ("template",),
             "reference": ("letters",), "without": {"group": ["letters"]}},
            ["reference is letters and the answers that count have group"],
        ),
    ],
)  # fmt: skip
def test_values_that_no_counted_answer_has_are_refused(keys: dict[str, Any], words: list[str]) -> None:
    table, facts, params = made(limit=80)
    with pytest.raises(UsageError) as error:
        make_answer_table(table, facts, params, AnswerTableSpec(**{"of": "answers", "columns": ("floor",), **keys}),
                          seed=1, resamples=50)  # fmt: skip
    assert all(word in str(error.value) for word in words) and "\n" not in str(error.value)


def test_what_is_left_out_may_be_missing_and_what_is_left_may_not_be_nothing() -> None:
    table, facts, params = made({"presentations": ["original", "truth_negated"]}, limit=8)
    without = spec("floor", without={"presentation": ("not_correct", "not_valid")})
    check_answers(without, facts, params, {})
    with pytest.raises(RunError, match="no answer is left"):
        make_answer_table(table, facts, params, spec("floor", without={"presentation": ("original", "truth_negated")}),
                          seed=1, resamples=50)  # fmt: skip
    with pytest.raises(RunError, match=f"the answer to {LABEL}"):
        fewer = Facts(facts.table.iloc[1:], facts.names, facts.choices)
        make_answer_table(table, fewer, params, spec("floor"), seed=1, resamples=50)


def test_a_fact_that_some_presentations_lack_is_none_there_and_a_number_elsewhere(tmp_path: Path) -> None:
    family = family_named("ordering")
    kinds = ["original", "equivalent", "distracted", "distracted_equivalent"]
    params = {"n": 4, "rho": 1.0, "names": "builtin", "presentations": kinds}
    (one,) = islice(family.generate(params, seed=1, split="test"), 1)
    record = {"setting": "s", **to_record(one, version=family.version)}
    (tmp_path / "items.jsonl").write_text(json.dumps(record) + "\n")
    (tmp_path / "resolved.json").write_text(json.dumps({"family": "ordering", "family_version": family.version}))
    table = facts_of(RunDirectory(tmp_path)).table.set_index("presentation")
    assert table.loc["original", "distractors"] == "none"
    assert isinstance(table.loc["distracted", "distractors"], int)
    (tmp_path / "items.jsonl").write_text(json.dumps({**record, "latent": None}) + "\n")
    with pytest.raises(RunError, match=r"line 1 of .*items.jsonl is damaged"):
        facts_of(RunDirectory(tmp_path))


def test_a_table_is_not_written_over_the_runs_own(tmp_path: Path) -> None:
    path = tmp_path / "table.yaml"
    path.write_text("family: modals\ntable: {of: answers, columns: [floor]}\n")
    with pytest.raises(UsageError, match="would be written over the run's own table"):
        other(str(path))


def test_facts_of_any_family() -> None:
    record = {"setting": "s", "key": "k", "gold": "no", "latent": {"who": ["A", "B"], "depth": 2},
              "presentations": [{"kind": "original", "gold": "no", "meta": {}},
                                {"kind": "denied", "gold": "yes", "meta": {"depth": 3}}]}  # fmt: skip
    first, second = questions(record)
    assert first["validity"] == second["validity"] == "invalid" and first["who"] == "A,B"
    assert (first["polarity"], second["polarity"]) == ("affirmative", "negated")
    assert (first["depth"], second["depth"]) == (2, 3)
    assert plain_fact({"a": None}) == "a=none"
    assert in_order(["b", "a"], {"x": ("a", "c"), "y": ("a", "b")}) == ["a", "b"]
    assert in_order(["b", "z", "a"], {"y": ("a", "b")}) == ["b", "z", "a"]
    assert series("google/gemma-3-270m-it") == "gemma-3-it" and series("qwen3:0.6b") == "qwen3" and series("7B") == "7B"
    assert set(REFERRING) <= set(RELATIVE)


def test_a_family_that_negates_nothing_has_two_cells() -> None:
    family = family_named("ordering")
    sets = list(islice(family.generate({"n": 4}, seed=1, split="test"), 16))
    rows = [row for one in sets for row in questions({"setting": "n=4", **to_record(one, version=family.version)})]
    table = pd.DataFrame(rows)
    shown = [(one.instance.cell, each.gold) for one in sets for each in one.presentations]
    behaviour = table[["setting", "key", "presentation"]].assign(
        arm="base", cell=[cell for cell, _ in shown], gold=[gold for _, gold in shown],
        answer=pd.array([gold for _, gold in shown], dtype="string"),
    )  # fmt: skip
    names = tuple(name for name in table if name not in ("setting", "key", "presentation"))
    facts, params = Facts(table, names, choices_of(family)), {"n=4": {"n": 4}}
    found = make_answer_table(behaviour, facts, params, spec("v_aff", "i_aff", "v_neg", "floor", rows=("n", "arm")),
                              seed=1, resamples=50)  # fmt: skip
    (row,) = found.to_dict("records")
    assert (row["n"], row["v_aff"], row["i_aff"]) == (4, 1, 1)
    assert (
        np.isnan(row["v_neg"])
        and np.isnan(row["floor"])
        and "a cell that it needs has no prompt" in row["floor_reason"]
    )
