"""How many pairs are enough: the width of an interval and the difference that could be seen, before any is measured.

Both are normal approximations for planning; what was measured has its own interval. A paired difference depends on the
discordance, the share of instances on which two arms differ in what is counted: two arms that agree with each other nearly
everywhere show a small change with few instances. Two arms that both count 0.8 and are independent differ on
2 × 0.8 × 0.2 = 0.32 of the instances; arms that come from one model differ on fewer.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from experiments.statistics.columns import inside, percent, whole


@dataclass(frozen=True, slots=True, kw_only=True)
class HalfWidth:
    """Half the width of an interval for a `share` on `n` items."""

    value: float
    share: float
    n: int
    level: float
    method: str
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Detectable:
    """The smallest difference of two paired shares that a test finds with probability `power`.

    `discordant` is the share of the `n` instances on which the arms differ. NaN with a `reason` where even a difference
    as large as the discordance would be missed.
    """

    value: float
    discordant: float
    n: int
    power: float
    level: float
    method: str
    reason: str = ""


def half_width(share: float, n: int, *, level: float = 0.95) -> HalfWidth:
    """Return the half-width of the normal interval for a share: z sqrt(share (1 - share) / n)."""
    share, n, level = inside("share", share, ends=True), whole("n", n, 1), inside("level", level)
    value = _z((1 + level) / 2) * float(np.sqrt(share * (1 - share) / n))
    return HalfWidth(value=value, share=share, n=n, level=level, method=f"normal approximation, {percent(level)}")


def detectable_difference(discordant: float, n: int, *, power: float = 0.8, level: float = 0.95) -> Detectable:
    """Return the smallest paired difference d that McNemar's test at `level` finds with `power`.

    The test statistic has variance ψ without a difference and ψ - d² with it, ψ the discordance (Connor 1987), so
    d sqrt(n) = z sqrt(ψ) + z' sqrt(ψ - d²) with z, z' the normal quantiles of the level and the power.
    """
    psi, n = inside("discordant", discordant, ends=True), whole("n", n, 1)
    power, level = inside("power", power), inside("level", level)
    z, z_power = _z((1 + level) / 2), _z(power)
    value = float(np.sqrt(psi) * (z * np.sqrt(n) + z_power * np.sqrt(max(0.0, n - z**2 + z_power**2))))
    value /= n + z_power**2
    reachable = 0 < value <= psi
    return Detectable(
        value=value if reachable else np.nan, discordant=psi, n=n, power=power, level=level,
        method=f"McNemar's test, normal approximation, two-sided {percent(level)}, power {percent(power)}",
        reason="" if reachable else f"{n} instances can't show it, with arms that differ on {psi:g} of them",
    )  # fmt: skip


def _z(probability: float) -> float:
    from scipy.special import ndtri

    return float(ndtri(probability))
