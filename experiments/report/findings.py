"""A few sentences for a reader who has two minutes, each one written only if the numbers carry it.

The thresholds stand at the top. A comparison is stated only where its interval leaves out "no difference"; a share is
called high or low by the near end of its interval; a choice (best layer) is named as such. Where nothing can be said
nothing is said. The sentences describe what was measured; none of them claims a mechanism.
"""

from __future__ import annotations

from collections.abc import Iterator

from experiments.inside import PAIR
from experiments.report.findings_wrong import Finding, wrong_answers
from experiments.report.intervention_findings_heads import competence
from experiments.report.intervention_source import of_study
from experiments.report.plots_inside import OTHER
from experiments.report.source import Source, shown
from experiments.report.text import listed, p_text, percent, percent_span, signed, span

ONE_SIDED = 0.75  # lower end of the share of one answer from which answers count as one-sided
SMALL_P = 0.05  # of the best probe layer against the best layers of shuffled labels, and of McNemar's test
STRONG = 0.9  # AUROC called high
UNSTABLE = 0.1  # lower end of U from which equal accuracies are said to hide changes
AGREEING = 0.75  # lower end of ι from which agreement on wrong answers is pointed out
SHARED_WRONG = 0.25  # lower end of D for the same
CHANCE = 0.5  # AUROC of a probe that knows nothing
BASELINE_NAMES = {"embed": "the last token's embedding", "length": "prompt length", "tokens": "bag of tokens"}
ONE_ANSWER = "One answer to most prompts"
MISREAD = 0.02  # share of answers that could not be read, or that differ from the readout, from which the page says so


def findings(source: Source) -> list[Finding]:
    """What can be said, arm by arm, then base against adapters."""
    found = []
    for arm in source.arms:
        rules = (_answers, _one_sided, _profile, _hidden, _shared, _readable, _surface, wrong_answers, _patched, _ablated,
                 _competence, _unread)  # fmt: skip
        said = [one for rule in rules if (one := rule(source, arm)) is not None]
        if not any(one.lead == ONE_ANSWER for one in said) and (lean := _lean(source, arm)):
            said.insert(1, lean)
        found += said
    for arm in source.arms:
        found += _changes(source, arm)
    return found


def _answers(source: Source, arm: str) -> Finding:
    one = source.profile(arm)
    shares = [f"{percent(one[kind]['accuracy']['value'], one['n'])} of {kind}" for kind in PAIR]
    text = f"{shown(arm)} is right on {listed(shares)} prompts."
    if one["n_parsed"]:
        r, d, u = (one[key]["value"] for key in ("robust", "shared_wrong", "unstable"))
        n = one["n_parsed"]
        text += (
            f" Of the {n} pairs whose two answers were read, both are right in {percent(r, n)}, both wrong in "
            f"{percent(d, n)}, and one of the two is right in {percent(u, n)}."
        )
    return Finding(arm, "What it answers", text, "profile")


def _one_sided(source: Source, arm: str) -> Finding | None:
    """Nearly the same answer on both presentations; the default is added where it has the same sign."""
    one = source.profile(arm)
    rates = [one[kind]["yes_rate"] for kind in PAIR]
    if any(rate["value"] is None for rate in rates):
        return None
    if all(rate["low"] >= ONE_SIDED for rate in rates):
        answer, sign, said = "yes", 1, [rate["value"] for rate in rates]
    elif all(rate["high"] <= 1 - ONE_SIDED for rate in rates):
        answer, sign, said = "no", -1, [1 - rate["value"] for rate in rates]
    else:
        return None
    gold = one["original"][f"accuracy_{answer}"]["n"] / one["n"]
    shares = [f"{percent(share, rate['n'])} of {kind}" for share, rate, kind in zip(said, rates, PAIR, strict=True)]
    text = (
        f"{shown(arm)} answers “{answer}” to {listed(shares)} prompts, where {percent(gold, one['n'])} have that gold "
        "answer."
    )
    split = source.arm(arm)["decomposition"]
    ends = [(split[kind]["all"]["delta_low"], split[kind]["all"]["delta_high"]) for kind in PAIR]
    if all(low is not None and high is not None and min(low * sign, high * sign) > 0 for low, high in ends):
        text += f" {_defaults(source, arm)}"
    return Finding(arm, ONE_ANSWER, text, "link")


def _lean(source: Source, arm: str) -> Finding | None:
    """Accuracy by gold answer apart in the same direction on both presentations, and a default of that sign."""
    one, split = source.profile(arm), source.arm(arm)["decomposition"]
    for answer, other, sign in (("yes", "no", 1), ("no", "yes", -1)):
        scores = [(one[kind][f"accuracy_{answer}"], one[kind][f"accuracy_{other}"]) for kind in PAIR]
        if any(first["value"] is None or second["value"] is None for first, second in scores):
            return None
        ends = [(split[kind]["all"]["delta_low"], split[kind]["all"]["delta_high"]) for kind in PAIR]
        pulled = all(low is not None and high is not None and min(low * sign, high * sign) > 0 for low, high in ends)
        if not pulled or not all(first["low"] > second["high"] for first, second in scores):
            continue
        parts = [
            f"{percent(first['value'], first['n'])} of gold-{answer} and {percent(second['value'], second['n'])} of "
            f"gold-{other} {kind} prompts"
            for (first, second), kind in zip(scores, PAIR, strict=True)
        ]
        text = f"{shown(arm)} is right on {listed(parts)}. {_defaults(source, arm)}"
        return Finding(arm, f"Leans to “{answer}”", text, "link")
    return None


def _defaults(source: Source, arm: str) -> str:
    split = {kind: source.arm(arm)["decomposition"][kind]["all"] for kind in PAIR}
    parts = [
        f"{signed(one['delta'])} {span(one['delta_low'], one['delta_high'])} on {kind}" for kind, one in split.items()
    ]
    return f"Its default δ is {listed(parts)} prompts, in logits toward “yes”."


def _profile(source: Source, arm: str) -> Finding | None:
    """R at the first and last setting, where the settings are ordered and the intervals are apart."""
    if source.axis == "setting" or len(source.settings) < 2:
        return None
    first, last = (source.profile(arm, source.settings[place])["robust"] for place in (0, -1))
    if first["value"] is None or last["value"] is None:
        return None
    apart = first["low"] > last["high"] or first["high"] < last["low"]
    if not apart:
        return None
    ends = [
        f"{percent(one['value'], one['n'])} {percent_span(one['low'], one['high'], one['n'])} at {setting}"
        for one, setting in ((first, source.settings[0]), (last, source.settings[-1]))
    ]
    verb = "falls" if first["value"] > last["value"] else "rises"
    return Finding(
        arm,
        f"Competence {verb} with {source.axis}",
        f"Both answers are right in {ends[0]} and in {ends[1]}.",
        "profile",
    )


def _hidden(source: Source, arm: str) -> Finding | None:
    one = source.profile(arm)
    test, u = one["mcnemar"], one["unstable"]
    if u["value"] is None or test["p"] is None or test["p"] <= SMALL_P or u["low"] < UNSTABLE:
        return None
    return Finding(
        arm,
        "Similar accuracies hide changes",
        f"McNemar's test finds no difference between the two accuracies (p = {p_text(test['p'])}), yet {test['b']} pairs "
        f"are right on the original only and {test['c']} on the equivalent only.",
        "profile",
    )


def _shared(source: Source, arm: str) -> Finding | None:
    one = source.profile(arm)
    iota, wrong = one["invariance"], one["shared_wrong"]
    if iota["value"] is None or iota["low"] < AGREEING or wrong["low"] < SHARED_WRONG:
        return None
    kappa = one["kappa"]["value"]
    chance = "" if kappa is None else f"; beyond what its yes-rate alone gives, κ is {signed(kappa)}"
    return Finding(
        arm,
        "Agreement is not competence here",
        f"The two answers agree in {percent(iota['value'], iota['n'])} of pairs, and in "
        f"{percent(wrong['value'], wrong['n'])} of pairs they agree on the wrong one{chance}.",
        "profile",
    )


def _readable(source: Source, arm: str) -> Finding | None:
    """Presentations whose best probe layer is beyond that of the shuffled labels."""
    probes = source.arm(arm)["probes"]
    found = [
        (kind, probes[kind])
        for kind in PAIR
        if probes[kind]["auroc"] is not None and probes[kind]["p_max"] is not None and probes[kind]["p_max"] <= SMALL_P
    ]
    if not found:
        return None
    parts = []
    for kind, one in found:
        last = ", the last" if source.is_last(one["layer"]) else ""
        parts.append(f"{one['auroc']:.2f} on {kind} prompts (best layer: {one['layer']}{last})")
    text = (
        f"A linear probe at the answer position gives the gold answer on held-out problems at AUROC {listed(parts)}, "
        "above shuffled labels."
    )
    strong = all(one["auroc"] >= STRONG for _, one in found)
    lead = "Readable, though not answered" if strong and _one_sided(source, arm) else "Readable inside"
    return Finding(arm, lead, text, "probes")


def _surface(source: Source, arm: str) -> Finding | None:
    """A baseline that reads the gold answer without the model, about as well as the probe does."""
    probes = source.arm(arm)["probes"]
    parts = []
    for kind in PAIR:
        best = probes[kind]["auroc_low"]
        fitted = [(name, one) for name, one in probes[kind]["baselines"].items() if one["auroc"] is not None]
        name, one = max(fitted, key=lambda pair: pair[1]["auroc"], default=("", {"auroc_low": None}))
        if (
            best is not None
            and one["auroc_low"] is not None
            and one["auroc_low"] > CHANCE
            and one["auroc_high"] >= best
        ):
            ends = span(one["auroc_low"], one["auroc_high"], sign=False)
            parts.append(f"{one['auroc']:.2f} {ends} on {kind} prompts ({BASELINE_NAMES[name]})")
    if not parts:
        return None
    text = (
        f"A probe that does not look into the model reads the gold answer at AUROC {listed(parts)}: {shown(arm)}'s probes "
        "may read the surface."
    )
    return Finding(arm, "Readable from the surface", text, "probes")


def _patched(source: Source, arm: str) -> Finding | None:
    """For each direction the layer where the matched donor is furthest from both controls, if intervals are apart.

    The last layer is left out: the readout there is the donor's by construction.
    """
    parts = []
    for kind in PAIR:
        found = source.arm(arm)["patching"]
        curves = found["curves"][kind]
        if any(curve["flipped"] is None for curve in curves.values()):
            continue
        matched, controls = curves["matched"], (curves["unrelated"], curves["random"])
        gaps = {
            place: matched["flipped"][place] - max(control["flipped"][place] for control in controls)
            for place, layer in enumerate(found["layers"])
            if not source.is_last(layer) and matched["low"][place] > max(control["high"][place] for control in controls)
        }
        if not gaps:
            continue
        n, place = matched["n"], max(gaps, key=lambda one: gaps[one])
        layer = found["layers"][place]
        shares = [percent(curve["flipped"][place], n) for curve in (matched, *controls)]
        parts.append(
            f"Put into {kind} prompts at layer {layer} (where it does most beyond the controls), the residual of the "
            f"pair's {OTHER[kind]} prompt turns {shares[0]} of {n} disagreeing answers; an unrelated problem's turns "
            f"{shares[1]}, a random direction {shares[2]}."
        )
    return Finding(arm, "Patching moves it", " ".join(parts), "patching") if parts else None


def _ablated(source: Source, arm: str) -> Finding | None:
    """Top heads against none: signal by its paired interval, and only outside what random sets do."""
    sets = source.arm(arm)["ablation"]["sets"]
    top, none = sets["top"], sets["none"]
    random = [found for label, found in sets.items() if label not in ("none", "top")]
    parts = []
    for kind in PAIR:
        change = top[kind]["change"]
        low, high = change["signal_low"], change["signal_high"]
        others = [found[kind]["change"]["signal"] for found in random]
        if low is None or high is None or low <= 0 <= high or any(other is None for other in others):
            continue
        if min([*others, 0]) <= change["signal"] <= max([*others, 0]):
            continue
        parts.append(
            f"{signed(none[kind]['signal'])} to {signed(top[kind]['signal'])} on {kind} prompts (change {span(low, high)}; "
            f"random sets {signed(min(others))} to {signed(max(others))})"
        )
    if not parts:
        return None
    count = len(top["heads"].split())
    text = f"Without the {count} top heads the signal s goes from {listed(parts)}, in logits."
    return Finding(arm, "Heads that carry signal", text, "heads")


def _competence(source: Source, arm: str) -> Finding | None:
    """Agreement that rises while competence falls, as far as paired intervals carry it."""
    text, plain = competence(of_study(source), arm)
    return Finding(arm, "More agreement, less competence", text, "heads") if plain else None


def _unread(source: Source, arm: str) -> Finding | None:
    behaviour = source.arm(arm)["behaviour"]
    unread, same = behaviour["unparsed"], behaviour["text_equals_readout"]
    parts = []
    if unread["value"] is not None and unread["value"] > MISREAD:
        parts.append(f"{unread['count']} of {unread['n']} answers could not be read and count as wrong.")
    if same["value"] is not None and same["value"] < 1 - MISREAD:
        parts.append(
            f"The readout has the sign of the text's answer in {percent(same['value'], same['n'])} of the answers read; "
            "what is measured inside speaks about the readout."
        )
    return Finding(arm, "Mind the answers", " ".join(parts), "profile") if parts else None


def _changes(source: Source, arm: str) -> Iterator[Finding]:
    """Differences to the base whose paired interval leaves out zero, with both ends."""
    found = source.results["comparison"].get(arm)
    if found is None:
        return
    parts = []
    for key, name in (
        *((f"accuracy_{kind}", f"accuracy on {kind} prompts") for kind in PAIR),
        ("robust", "R"),
        ("invariance", "invariance"),
    ):
        one = found[key]
        if _apart(one["low"], one["high"]):
            ends = [percent(one[end], one["n"]) for end in ("before", "after")]
            parts.append(
                f"{name} goes from {ends[0]} to {ends[1]} ({signed(100 * one['difference'], 1)} points "
                f"{span(100 * one['low'], 100 * one['high'], 1)})"
            )
    if parts:
        yield Finding(arm, f"{shown(arm)}: answers", f"{_capital(listed(parts))}.", "comparison")
    parts = []
    for field, name in (("signal", "signal s"), ("delta", "default δ")):
        for kind in PAIR:
            one = found[f"readout_{kind}"]
            low, high = one[f"{field}_low"], one[f"{field}_high"]
            if _apart(low, high):
                ends = [signed(source.arm(each)["decomposition"][kind]["all"][field]) for each in ("base", arm)]
                parts.append(
                    f"the {name} on {kind} prompts goes from {ends[0]} to {ends[1]} ({signed(one[field])} "
                    f"{span(low, high)})"
                )
    if parts:
        yield Finding(arm, f"{shown(arm)}: readout", f"In logits, {listed(parts)}.", "comparison")


def _apart(low: float | None, high: float | None) -> bool:
    """Whether an interval exists and leaves out zero."""
    return low is not None and high is not None and not low <= 0 <= high


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]
