"""Tables of pairs: each number against pandas, scipy and scikit-learn, what is pooled, and what is refused."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pandas as pd
import pytest
from pydantic import ValidationError
from rich.console import Console
from scipy.stats import binomtest
from sklearn.metrics import accuracy_score, cohen_kappa_score, recall_score

from experiments.errors import RunError, UsageError
from experiments.tables import COLUMNS, FigureSpec, TableSpec, check, make_table, printed, show_table
from tests.experiments.made_behaviour import behaviour

PARAMS: dict[str, dict[str, Any]] = {
    f"n={n}, relation={relation}": {
        "n": n, "relation": relation, "presentations": ["original", "equivalent", "reshuffled", "repeat"]
    }
    for n in (4, 8, 16)
    for relation in ("front_behind", "left_right")
}  # fmt: skip
DEFAULT = ("original", "equivalent")


@pytest.fixture(scope="module")
def table() -> pd.DataFrame:
    return behaviour(PARAMS, arms=("base", "adapter"), limit=60)


def made(table: pd.DataFrame, columns: Any, params: Any = PARAMS, **spec: Any) -> pd.DataFrame:
    how = spec.pop("how", {"seed": 3, "resamples": 400})
    return make_table(table, params, TableSpec(columns=columns, **spec), **how)


def wide(table: pd.DataFrame, *, pair: tuple[str, str] = DEFAULT, **chosen: Any) -> pd.DataFrame:
    """One row a pair, by another way: pivoted, with the answers as words."""
    for name, value in chosen.items():
        table = table[table[name] == value]
    index = ["arm", "setting", "key"]
    shown = table[table["presentation"].isin(pair)]
    answers = shown.astype({"answer": object}).pivot(index=index, columns="presentation", values="answer")
    gold = shown.drop_duplicates(index).set_index(index)["gold"]
    return pd.DataFrame({"first": answers[pair[0]], "second": answers[pair[1]], "gold": gold})


def pooled_kappa(pairs: pd.DataFrame) -> float:
    both = pairs.dropna()
    said = pd.concat([both["first"], both["second"]])
    chance = (said.value_counts(normalize=True) ** 2).sum()
    return ((both["first"] == both["second"]).mean() - chance) / (1 - chance)


def test_columns_are_what_pandas_and_sklearn_say(table: pd.DataFrame) -> None:
    found = made(table, list(COLUMNS), rows=["relation", "arm", "n"], how={"seed": 3, "resamples": 50})
    assert len(found) == 2 * 2 * 3
    for row in found.to_dict("records"):
        setting = f"n={row['n']}, relation={row['relation']}"
        here = {"arm": row["arm"], "setting": setting}
        pairs = wide(table, **here)
        both = pairs.dropna()
        right = [pairs[side] == pairs["gold"] for side in ("first", "second")]
        common = [(both[side] == both["gold"]) for side in ("first", "second")]
        assert row["pairs"] == len(pairs) == 60
        assert row["support"] == len(both) < 60
        for side, name in (("first", "original"), ("second", "equivalent")):
            asked = table[
                (table["arm"] == row["arm"]) & (table["setting"] == setting) & (table["presentation"] == name)
            ]
            words = pairs[side].fillna("none")
            assert row[f"accuracy_{name}"] == pytest.approx(accuracy_score(pairs["gold"], words))
            assert row[f"accuracy_yes_{name}"] == pytest.approx(
                recall_score(pairs["gold"], words, labels=["yes"], average="macro")
            )
            assert row[f"accuracy_no_{name}"] == pytest.approx(
                recall_score(pairs["gold"], words, labels=["no"], average="macro")
            )
            assert row[f"polarity_{name}"] == pytest.approx(row[f"accuracy_yes_{name}"] - row[f"accuracy_no_{name}"])
            read = pairs[side].notna()
            assert row[f"parsed_accuracy_{name}"] == pytest.approx((pairs["gold"] == words)[read].mean())
            assert row[f"parsed_accuracy_{name}_n"] == read.sum()
            assert row[f"yes_rate_{name}"] == pytest.approx((words[read] == "yes").mean())
            assert row[f"unparsed_{name}"] == pytest.approx((asked["status"] != "parsed").mean())
            assert row[f"truncated_{name}"] == pytest.approx((asked["status"] == "truncated").mean())
            assert row[f"tokens_{name}"] == pytest.approx(asked["n_tokens"].mean())
            assert row[f"bounds_{name}_low"] == pytest.approx(row[f"accuracy_{name}"])
            assert row[f"bounds_{name}_high"] == pytest.approx(row[f"accuracy_{name}"] + row[f"unparsed_{name}"])
        assert row["common_accuracy_original"] == pytest.approx(common[0].mean())
        assert row["common_accuracy_equivalent"] == pytest.approx(common[1].mean())
        assert row["mean_accuracy"] == pytest.approx((right[0].mean() + right[1].mean()) / 2)
        assert row["common_mean_accuracy"] == pytest.approx((common[0].mean() + common[1].mean()) / 2)
        assert row["common_mean_accuracy"] == pytest.approx(row["robust"] + row["unstable"] / 2)
        assert row["gap"] == pytest.approx(right[0].mean() - right[1].mean())
        same = both["first"] == both["second"]
        assert row["invariance"] == pytest.approx(same.mean())
        assert row["strict_invariance"] == pytest.approx(same.sum() / 60)
        assert row["robust"] == pytest.approx((common[0] & common[1]).mean())
        assert row["shared_wrong"] == pytest.approx((~common[0] & ~common[1]).mean())
        assert row["unstable"] == pytest.approx((common[0] ^ common[1]).mean())
        assert row["kappa"] == row["kappa_bar"] == pytest.approx(pooled_kappa(pairs))
        assert row["kappa_separate"] == pytest.approx(cohen_kappa_score(both["first"], both["second"]))
        rates = [(both[side] == "yes").mean() for side in ("first", "second")]
        assert row["reference_difference"] == pytest.approx((rates[0] - rates[1]) ** 2 / 2)
        b, c = (right[0] & ~right[1]).sum(), (~right[0] & right[1]).sum()
        assert (row["b"], row["c"]) == (b, c)
        assert b + c <= 25
        assert row["mcnemar_p"] == pytest.approx(binomtest(int(b), int(b + c)).pvalue)
        assert row["frechet_low"] <= row["robust"] <= row["frechet_high"] <= min(c.mean() for c in common) + 1e-12
        again = wide(table, pair=("original", "repeat"), **here).dropna()
        assert row["repeat"] == pytest.approx((again["first"] == again["second"]).mean())
        assert row["invariance_minus_repeat"] == pytest.approx(row["invariance"] - row["repeat"])


def test_intervals_hold_the_number_and_say_their_n_and_method(table: pd.DataFrame) -> None:
    found = made(table, list(COLUMNS), rows=["arm"])
    for name, column in COLUMNS.items():
        assert found[name].notna().all() or name in ("mcnemar_p", "mcnemar_p_holm", "unparsed_p"), name
        if column.unit != "count":
            assert (found[f"{name}_n"] > 0).all() and found[f"{name}_method"].notna().all()
        assert (f"{name}_low" in found) == column.interval
        if column.interval:
            assert (found[f"{name}_low"] <= found[name]).all() and (found[name] <= found[f"{name}_high"]).all(), name
    one = made(table, ["invariance"], rows=["arm", "n", "relation"]).iloc[0]
    low, high = binomtest(round(one["invariance"] * one["invariance_n"]), int(one["invariance_n"])).proportion_ci(
        method="wilson"
    )
    assert (one["invariance_low"], one["invariance_high"]) == pytest.approx((low, high))
    assert one["invariance_method"] == "Wilson 95%"


def test_names_of_columns_do_not_meet() -> None:
    names = [name + end for name in COLUMNS for end in ("", "_low", "_high", "_n", "_method", "_reason")]
    assert len(set(names)) == len(names)
    assert len({column.label for column in COLUMNS.values()}) == len(COLUMNS)


def test_kappa_bar_is_the_mean_over_sizes_of_all_that_is_pooled(table: pd.DataFrame) -> None:
    found = made(table, ["kappa_bar", "kappa"], rows=["arm"])
    for row in found.to_dict("records"):
        pairs = wide(table, arm=row["arm"]).reset_index()
        sizes = pairs["setting"].str.extract(r"n=(\d+)")[0]
        each = [pooled_kappa(part[["first", "second", "gold"]]) for _, part in pairs.groupby(sizes)]
        assert row["kappa_bar"] == pytest.approx(np.mean(each))
        assert row["kappa"] == pytest.approx(pooled_kappa(pairs[["first", "second", "gold"]]))
        assert row["kappa_bar"] != pytest.approx(row["kappa"], abs=1e-6)


def test_rows_stand_in_the_order_in_which_they_were_asked(table: pd.DataFrame) -> None:
    pairs = [["original", "repeat"], ["original", "reshuffled"], ["original", "equivalent"]]
    found = made(table, ["pairs"], rows=["pair", "arm", "n"], pairs=pairs)
    assert found["pair"].drop_duplicates().tolist() == ["/".join(pair) for pair in pairs]
    assert found["arm"].tolist()[:6] == ["base"] * 3 + ["adapter"] * 3
    assert found["n"].tolist()[:3] == [4, 8, 16]
    shuffled = table.sample(frac=1, random_state=0)
    again = made(shuffled, ["invariance", "gap"], rows=["n", "relation"])
    pd.testing.assert_frame_equal(again, made(table, ["invariance", "gap"], rows=["n", "relation"]))
    assert again["relation"].tolist()[:2] == ["front_behind", "left_right"]


def test_all_and_cell_are_rows_too(table: pd.DataFrame) -> None:
    assert made(table, ["pairs"], rows=["all"])["pairs"].tolist() == [2 * 6 * 60]
    found = made(table, ["accuracy_original", "accuracy_yes_original"], rows=["cell"])
    assert found["cell"].tolist() == ["forward-yes", "forward-no", "converse-yes", "converse-no"]
    by_cell = table[table["presentation"] == "original"].groupby("cell")["correct"].mean()
    assert found["accuracy_original"].tolist() == pytest.approx(by_cell[found["cell"]].tolist())
    without = found[found["cell"].str.endswith("-no")]
    assert without["accuracy_yes_original"].isna().all() and (without["accuracy_yes_original_reason"] != "").all()


def test_words_of_columns_mean_first_and_second_of_the_pair(table: pd.DataFrame) -> None:
    found = made(
        table,
        ["accuracy_original", "accuracy_equivalent", "invariance"],
        rows=["arm"],
        pairs=[["original", "reshuffled"]],
    )
    pairs = wide(table, pair=("original", "reshuffled"), arm="base")
    assert found["accuracy_equivalent"][0] == pytest.approx((pairs["second"] == pairs["gold"]).mean())
    assert found["invariance"][0] == pytest.approx(
        (pairs["first"] == pairs["second"])[pairs.notna().all(axis=1)].mean()
    )


def test_an_instance_under_two_settings_widens_intervals_and_has_no_p() -> None:
    """Every answer stands twice: twice the pairs, no more knowledge."""
    one = behaviour({"a": {"n": 4, "relation": "x"}}, limit=100, missing=0)
    twice = pd.concat([one, one.assign(setting="b")], ignore_index=True)
    params = {"a": {"n": 4, "relation": "x"}, "b": {"n": 4, "relation": "y"}}
    columns = [
        "accuracy_original",
        "invariance",
        "gap",
        "kappa",
        "polarity_original",
        "truncated_original",
        "mcnemar_p",
    ]
    how = {"seed": 0, "resamples": 4000}
    single = made(one, columns, {"a": params["a"]}, rows=["all"], how=how).iloc[0]
    double = made(twice, columns, params, rows=["all"], how=how).iloc[0]
    for name in columns[:-2]:
        assert double[name] == pytest.approx(single[name])
        widths = [row[f"{name}_high"] - row[f"{name}_low"] for row in (double, single)]
        # Taken for 200 independent pairs they would be narrower by a factor of 1.41.
        assert widths[0] == pytest.approx(widths[1], rel=0.15), name
    assert np.isfinite(single["mcnemar_p"]) and np.isnan(double["mcnemar_p"])
    assert "more than once" in double["mcnemar_p_reason"]
    told = made(twice, ["mcnemar_p"], params, rows=["relation"], how=how)
    assert told["mcnemar_p"].tolist() == pytest.approx([single["mcnemar_p"]] * 2)


def test_gap_has_the_interval_of_a_bootstrap_written_out(table: pd.DataFrame) -> None:
    how = {"seed": 5, "resamples": 5000}
    one = made(table, ["gap"], rows=["arm", "n", "relation"], how=how).iloc[0]
    pairs = wide(table, arm="base", setting="n=4, relation=front_behind")
    change = ((pairs["first"] == pairs["gold"]).astype(int) - (pairs["second"] == pairs["gold"]).astype(int)).to_numpy()
    drawn = np.random.default_rng(0).choice(change, (5000, len(change))).mean(axis=1)
    assert (one["gap_low"], one["gap_high"]) == pytest.approx(tuple(np.quantile(drawn, [0.025, 0.975])), abs=0.02)


def test_holm_is_over_the_rows_of_the_table() -> None:
    params = {f"n={n}": {"n": n} for n in (4, 8, 16)}
    table = behaviour(params, limit=100, missing=0, seed=2)
    # At n = 8 the equivalent is right more often, beyond chance.
    better = (table["n"] == 8) & (table["presentation"] == "equivalent") & (table["key"].str[-1].isin(list("02468")))
    table.loc[better, "answer"] = table.loc[better, "gold"]
    found = made(table, ["mcnemar_p", "mcnemar_p_holm"], params, rows=["n"])
    p = found["mcnemar_p"].to_numpy()
    expected = np.empty(3)
    running = 0.0
    for rank, place in enumerate(np.argsort(p)):
        running = max(running, min(1, p[place] * (3 - rank)))
        expected[place] = running
    assert found["mcnemar_p_holm"].tolist() == pytest.approx(expected.tolist())
    assert p.min() < 0.05 and "Holm over 3 rows" in found["mcnemar_p_holm_method"][0]


def test_undefined_numbers_are_missing_with_a_reason() -> None:
    params: dict[str, dict[str, Any]] = {f"n={n}": {"n": n} for n in (4, 8)}
    table = behaviour(params, missing=0)
    table.loc[table["n"] == 4, "answer"] = "no"
    found = made(table, ["kappa", "reference_difference", "invariance"], params, rows=["n"])
    assert np.isnan(found["kappa"][0]) and "are no" in found["kappa_reason"][0] and found["kappa_reason"][1] == ""
    assert found["reference_difference"][0] == 0 and found["invariance"][0] == 1
    bar = made(table, ["kappa_bar"], params, rows=["arm"]).iloc[0]
    assert bar["kappa_bar"] == pytest.approx(found["kappa"][1]) and "n = 4" in bar["kappa_bar_reason"]
    table["answer"] = pd.NA
    empty = made(table, [name for name in COLUMNS if not COLUMNS[name].needs], params, rows=["n"])
    for name in (
        "invariance",
        "kappa",
        "kappa_bar",
        "robust",
        "yes_rate_original",
        "common_mean_accuracy",
        "frechet_low",
    ):
        assert empty[name].isna().all() and (empty[f"{name}_reason"] != "").all(), name
    assert (empty["accuracy_original"] == 0).all() and (empty["strict_invariance"] == 0).all()
    sizeless = {label: {} for label in params}
    assert "no problem size" in made(table, ["kappa_bar"], sizeless, rows=["arm"])["kappa_bar_reason"][0]


def test_pairs_without_distractors_are_counted_once_whatever_rho() -> None:
    kinds = ["original", "equivalent", "distracted", "distracted_equivalent"]
    params = {f"rho={rho}": {"n": 8, "rho": rho, "presentations": kinds} for rho in (0.5, 2.0)}
    table = behaviour(params, limit=40)
    pairs = [["original", "equivalent"], ["distracted", "distracted_equivalent"]]
    found = made(table, ["pairs", "invariance"], params, rows=["arm", "rho"], pairs=pairs)
    assert found["rho"].tolist() == [0.0, 0.5, 2.0] and found["pairs"].tolist() == [40, 40, 40]
    plain = wide(table, setting="rho=0.5").dropna()
    assert found["invariance"][0] == pytest.approx((plain["first"] == plain["second"]).mean())
    dosed = wide(table, setting="rho=2.0", pair=("distracted", "distracted_equivalent")).dropna()
    assert found["invariance"][2] == pytest.approx((dosed["first"] == dosed["second"]).mean())


def rendered(frame: pd.DataFrame, spec: TableSpec, **how: Any) -> str:
    console = Console(file=io.StringIO(), width=160)
    console.print(show_table(frame, spec, **how))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_shown_numbers_are_rounded_and_explained(table: pd.DataFrame) -> None:
    spec = TableSpec(
        rows=("arm",), columns=("invariance", "kappa", "mcnemar_p", "pairs", "bounds_original"), title="[Title]"
    )
    frame = make_table(table, PARAMS, spec, seed=1, resamples=200)
    text = rendered(frame, spec)
    assert "[Title]" in text and "Inv." in text and "adapter" in text and "360" in text
    assert f"{100 * frame['invariance'][0]:.1f}" in text and f"{frame['kappa'][0]:.2f}" in text
    assert f"{100 * frame['invariance_low'][0]:.1f} – {100 * frame['invariance_high'][0]:.1f}" in text
    assert "–" in text and "p: an instance stands here more than once" in text
    assert "n from " in text and "Below a number" in text
    short = rendered(frame, spec, intervals=False)
    assert "Below a number" not in short and f"{100 * frame['invariance_low'][0]:.1f} – " not in short
    # As it comes back from results.json, where undefined is null.
    back = pd.DataFrame([{key: None if value != value else value for key, value in row.items()}
                         for row in frame.to_dict("records")])  # fmt: skip
    assert rendered(back, spec) == text
    assert printed(0.00012, COLUMNS["mcnemar_p"]) == "<0.001" and printed(0.0501, COLUMNS["gap"]) == "+5.0"


def test_across_prints_a_row_key_side_by_side(table: pd.DataFrame) -> None:
    spec = TableSpec(rows=("arm", "n"), columns=("invariance",), across="n")
    frame = make_table(table, PARAMS, spec, seed=1, resamples=200)
    lines = [line for line in rendered(frame, spec).splitlines() if "base" in line]
    shown = [f"{100 * value:.1f}" for value in frame.loc[frame["arm"] == "base", "invariance"]]
    assert len(lines) == 1 and [cell.strip() for cell in lines[0].split("│")][2:5] == shown


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"columns": ["invarance"]}, "did you mean invariance"),
        ({"columns": []}, "columns"),
        ({"columns": ["kappa", "kappa"]}, "twice"),
        ({"rows": []}, "rows"),
        ({"rows": ["arm", "arm"]}, "twice"),
        ({"pairs": []}, "pairs"),
        ({"pairs": [["original", "original"]]}, "original/original"),
        ({"pairs": [["original", "equivalent"], ["original", "repeat"]]}, "add 'pair' to rows"),
        ({"across": "n"}, "across is 'n'"),
        ({"colums": ["kappa"]}, "colums"),
        ({"rows": ["arm", "repeat"], "columns": ["repeat"]}, "'repeat'"),
    ],
)
def test_bad_specs_are_refused_by_name(change: dict[str, Any], named: str) -> None:
    with pytest.raises(ValidationError, match=named):
        TableSpec(**{"columns": ["invariance"], **change})


def test_a_figure_names_its_table() -> None:
    spec = FigureSpec(x="n", y=("kappa",), lines=("arm",), panels=("relation",))
    assert spec.table().rows == ("n", "relation", "arm")
    with pytest.raises(ValidationError, match="did you mean kappa"):
        FigureSpec(x="n", y=("kapa",))
    with pytest.raises(ValidationError, match="twice"):
        FigureSpec(x="n", y=("kappa",), lines=("n",))


@pytest.mark.parametrize(
    ("spec", "named"),
    [
        ({"rows": ["protocol"]}, "'protocol' is no parameter of setting 'n=4, relation=front_behind'"),
        ({"pairs": [["original", "negated"]]}, "presentation 'negated'"),
        ({"columns": ["repeat"], "pairs": [["reshuffled", "equivalent"]]}, "starts with 'reshuffled'"),
    ],
)
def test_tables_that_settings_cannot_give_are_refused_before_a_run(spec: dict[str, Any], named: str) -> None:
    with pytest.raises(UsageError, match=named):
        check(TableSpec(**{"columns": ["invariance"], **spec}), PARAMS)


def test_a_control_that_was_not_asked_is_named() -> None:
    params: dict[str, dict[str, Any]] = {"n=4": {"n": 4}}
    with pytest.raises(RunError, match="needs 'repeat'"):
        made(behaviour(params), ["repeat"], params)


def corrupted(table: pd.DataFrame, kind: str) -> pd.DataFrame:
    row = table.index[(table["setting"] == "n=8, relation=left_right") & (table["presentation"] == "equivalent")][5]
    if kind == "twice":
        return pd.concat([table, table.loc[[row]]], ignore_index=True)
    if kind == "missing":
        same = (table["key"] == table["key"][row]) & (table["setting"] == table["setting"][row])
        return table[~(same & (table["presentation"] == "equivalent"))]
    if kind == "other items":
        return table.drop(index=row)
    if kind == "versions":
        return table.assign(parser_version=np.where(table.index == row, 2, 1))
    if kind == "no column":
        return table.drop(columns="answer")
    if kind == "no cell":
        return table.drop(columns="cell")
    if kind == "empty":
        return table.iloc[:0]
    name, value = {"gold": ("gold", "no" if table["gold"][row] == "yes" else "yes"), "answer": ("answer", "maybe"),
                   "setting": ("setting", "n=5")}[kind]  # fmt: skip
    broken = table.copy()
    broken.loc[row, name] = value
    return broken


@pytest.mark.parametrize(
    ("kind", "named"),
    [
        ("twice", "key '8-5', presentation 'equivalent' stands twice"),
        ("missing", "key '8-5' has no answer to 'equivalent'"),
        ("other items", "key '8-5', presentation 'equivalent' was not asked in every arm"),
        ("gold", "key '8-5', presentation 'equivalent': gold is"),
        ("answer", "key '8-5'.*answer 'maybe'"),
        ("setting", "setting 'n=5' of the behaviour table has no params"),
        ("versions", "parser_version is 1, 2"),
        ("no column", "no column 'answer'"),
        ("no cell", "no column 'cell'"),
        ("empty", "no rows"),
    ],
)
def test_damaged_tables_are_refused_with_the_row(table: pd.DataFrame, kind: str, named: str) -> None:
    with pytest.raises(RunError, match=named):
        made(corrupted(table, kind), ["invariance"], rows=["arm", "cell"])
