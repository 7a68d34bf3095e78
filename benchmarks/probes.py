"""How fast the probes of a whole study are, and whether they are the probes that scikit-learn would fit.

    python benchmarks/probes.py [--quick] [--full] [--json]

The study has the size of a small model: 30 layers, 5 folds, the labels and 100 shuffles of them, 400 rows of 576
features, which makes 15,150 logistic regressions. The features have a decaying spectrum, as residual streams have.

The peer is the usual way: standardise each training side once, then scikit-learn's LogisticRegression with its default
solver and tolerance for one label set after the other, spread by joblib. A slice of its fits is timed and scaled up.
Ours is timed in full. Both may use the same number of threads: all cores, or what OMP_NUM_THREADS says. They take
turns, ten layers at a time, and the median ratio is taken, since other work may run on the machine.

A second study has the size of a larger model: 28 layers of 1,000 rows and 2,048 features. Two of its layers are timed
and scaled up; --full fits all 28.

A third asks what choosing the penalty costs: the first study, with inner folds over the default grid, inside every fold
and for every label set.

Exactness is against scikit-learn run to tol=1e-10, since at its default tolerance it is the less exact of the two.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

# Run as a script, its own folder comes first on the path, and this probes.py would hide the package of that name.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import joblib
import numpy as np
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score
from sklearn.preprocessing import StandardScaler

from probes.directions import Standardiser
from probes.folds import shuffled_labels
from probes.linear import PENALTIES, ProbeResult, fit_probes
from probes.logistic import fit_logistic

LAYERS, FOLDS, SHUFFLES, ROWS, FEATURES = 30, 5, 100, 400, 576
LARGE_LAYERS, LARGE_ROWS, LARGE_FEATURES = 28, 1000, 2048
FITS = FOLDS * (1 + SHUFFLES)  # of one layer
TURN = 10  # layers
TASKS, FITS_PER_TASK = 40, 3
RATIO_BOUND, COEFFICIENT_BOUND, AUROC_BOUND = 30.0, 1e-4, 1e-3
SECONDS_BOUND, LARGE_SECONDS_BOUND, CHOICE_SECONDS_BOUND = 60.0, 600.0, 120.0


def activations(layers: int, rows: int, features: int, *, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Features [layer, row, feature] whose label becomes readable with depth, and the labels [row]."""
    rng = np.random.default_rng(seed)
    labels = np.arange(rows) % 2
    scale = np.arange(1, features + 1) ** -0.5
    found = []
    for layer in range(layers):
        readable = 0.3 * layer / layers * np.outer(labels - 0.5, rng.normal(size=features))
        basis = np.linalg.qr(rng.normal(size=(features, features)))[0]
        found.append(((rng.normal(size=(rows, features)) + readable) * scale @ basis).astype(np.float32))
    return np.stack(found), labels


def usual(features: np.ndarray, sets: np.ndarray, held_out: np.ndarray) -> list[float]:
    """The AUROC of each label set [row, set] on one fold, one scikit-learn fit after the other."""
    scaler = StandardScaler().fit(features[~held_out])
    train, test = scaler.transform(features[~held_out]), scaler.transform(features[held_out])
    areas = []
    for labels in sets.T:
        probe = LogisticRegression(max_iter=1000).fit(train, labels[~held_out])
        areas.append(float(roc_auc_score(labels[held_out], probe.decision_function(test))))
    return areas


def distance(features: np.ndarray, sets: np.ndarray, result: ProbeResult) -> tuple[float, float]:
    """Largest difference from scikit-learn at tol=1e-10, fold 0: coefficients of 4 label sets, AUROC of the labels."""
    held_out = result.folds == 0
    standardise = Standardiser.of(features[~held_out])
    train = standardise(features[~held_out])
    fit = fit_logistic(train, sets[~held_out, :4])
    exact = [LogisticRegression(tol=1e-10, max_iter=100_000).fit(train, sets[~held_out, one]) for one in range(4)]
    weights = np.stack([probe.coef_[0] for probe in exact], axis=1)
    area = roc_auc_score(sets[held_out, 0], exact[0].decision_function(standardise(features[held_out])))
    return float(np.abs(fit.weights - weights).max()), float(abs(area - result.fold_auroc[0, 0]))


def measure(layers: int, threads: int) -> dict[str, Any]:
    """Time both ways in turn, and compare the first layer of each turn with the exact solution."""
    features, labels = activations(layers, ROWS, FEATURES)
    groups = np.arange(ROWS)
    ours, peer, distances = [], [], []
    with joblib.Parallel(n_jobs=threads) as parallel:
        for turn in range(0, layers, TURN):
            part = features[turn : turn + TURN]
            start = time.perf_counter()
            result = fit_probes(part, labels, groups, shuffles=SHUFFLES, folds=FOLDS, seed=0)
            ours.append(time.perf_counter() - start)

            shuffled = shuffled_labels(labels, groups, result.folds, shuffles=SHUFFLES, seed=0)
            sets = np.concatenate([labels[:, None], shuffled], axis=1)
            rows = part[0].astype(np.float64)
            if turn == 0:  # start the workers before the clock
                parallel(joblib.delayed(usual)(rows, sets[:, :2], result.folds == 0) for _ in range(2 * threads))
            tasks = np.array_split(np.arange(TASKS * FITS_PER_TASK) % sets.shape[1], TASKS)
            start = time.perf_counter()
            parallel(
                joblib.delayed(usual)(rows, sets[:, task], result.folds == i % FOLDS) for i, task in enumerate(tasks)
            )
            peer.append((time.perf_counter() - start) * len(part) * FITS / (TASKS * FITS_PER_TASK))
            distances.append(distance(rows, sets, result))
    return {
        "layers": layers,
        "threads": threads,
        "timed": len(peer) * TASKS * FITS_PER_TASK,
        "ours": sum(ours),
        "peer": sum(peer),
        "ratio": statistics.median(one / other for one, other in zip(peer, ours, strict=True)),
        "coefficient": max(one[0] for one in distances),
        "auroc": max(one[1] for one in distances),
    }


def seconds(layers: int, total: int, rows: int, features: int, **options: Any) -> float:
    """Seconds for `total` layers, from `layers` of them."""
    acts, labels = activations(layers, rows, features, seed=1)
    start = time.perf_counter()
    fit_probes(acts, labels, np.arange(rows), shuffles=SHUFFLES, folds=FOLDS, seed=0, **options)
    return (time.perf_counter() - start) * total / layers


def claims(*, quick: bool, full: bool) -> list[dict[str, Any]]:
    """One row a claim; the ratio is to be at least its bound, the others at most."""
    threads = int(os.environ.get("OMP_NUM_THREADS") or os.cpu_count() or 1)
    found = measure(TURN if quick else LAYERS, threads)
    layers = found["layers"]
    large = LARGE_LAYERS if full else threads
    chosen = threads if quick else 2 * threads
    rows = [
        (
            f"seconds for {layers * FITS} probes on {threads} threads ({layers} layers, {FOLDS} folds, {1 + SHUFFLES} "
            f"label sets, {ROWS} rows of {FEATURES} features)",
            found["ours"],
            SECONDS_BOUND * layers / LAYERS,
        ),
        (
            "largest difference of a coefficient from scikit-learn at tol=1e-10",
            found["coefficient"],
            COEFFICIENT_BOUND,
        ),
        (
            "largest difference of a fold's AUROC from scikit-learn at tol=1e-10",
            found["auroc"],
            AUROC_BOUND,
        ),
        (
            f"seconds for {LARGE_LAYERS * FITS} probes of a larger model on {threads} threads ({LARGE_LAYERS} layers, "
            f"{LARGE_ROWS} rows of {LARGE_FEATURES} features; from {large} layers)",
            seconds(large, LARGE_LAYERS, LARGE_ROWS, LARGE_FEATURES),
            LARGE_SECONDS_BOUND,
        ),
        (
            f"seconds for the first study with the penalty chosen from {len(PENALTIES)} by inner folds ({LAYERS} layers, "
            f"from {chosen})",
            seconds(chosen, LAYERS, ROWS, FEATURES, penalty=PENALTIES),
            CHOICE_SECONDS_BOUND,
        ),
    ]
    table = [{"claim": name, "value": value, "bound": bound, "ok": value <= bound} for name, value, bound in rows]
    ratio = {
        "claim": f"times as fast as scikit-learn with joblib on {threads} workers ({found['timed']} of its fits timed, "
        f"scaled to {found['peer']:.0f} s; median of turns; at least)",
        "value": found["ratio"],
        "bound": RATIO_BOUND,
        "ok": found["ratio"] >= RATIO_BOUND,
    }
    return [table[0], ratio, *table[1:]]


def main() -> int:
    parser = argparse.ArgumentParser(description="Speed and exactness of linear probes.")
    parser.add_argument("--quick", action="store_true", help=f"{TURN} layers instead of {LAYERS}")
    parser.add_argument("--full", action="store_true", help=f"all {LARGE_LAYERS} layers of the larger model")
    parser.add_argument("--json", action="store_true", help="print the claims as JSON and nothing else")
    options = parser.parse_args()
    rows = claims(quick=options.quick, full=options.full)
    if options.json:
        print(json.dumps(rows, indent=1))
    else:
        for row in rows:
            print(f"{'ok  ' if row['ok'] else 'FAIL'} {row['claim']}: {row['value']:.3g} (bound {row['bound']:g})")
    return 0 if all(row["ok"] for row in rows) else 1


if __name__ == "__main__":
    raise SystemExit(main())
