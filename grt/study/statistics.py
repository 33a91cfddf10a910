"""Means, intervals and verdicts over seeds: differences are paired, and what n seeds could not show is said.

Everything is in the unit of its input (nats, or a share).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from statistics import fmean, stdev

CONFIDENCE = 0.95


@cache
def t_quantile(freedom: int, confidence: float = CONFIDENCE) -> float:
    """t so that a Student variable of that many degrees of freedom lies in [-t, t] with this probability."""
    import mpmath

    low, high = 0.0, 1e4
    for _ in range(80):  # halved until no float lies between
        t = (low + high) / 2
        outside = mpmath.betainc(freedom / 2, 0.5, 0, freedom / (freedom + t * t), regularized=True)
        low, high = (t, high) if outside > 1 - confidence else (low, t)
    return high


@dataclass(frozen=True)
class Summary:
    """Mean over n seeds; `half`: half the 95 % interval by t over seeds, None for one seed."""

    n: int
    mean: float
    sd: float | None
    half: float | None

    def __str__(self) -> str:
        return f"{self.mean:.4f}" + ("" if self.half is None else f" ± {self.half:.4f}")


def summary(values: Sequence[float]) -> Summary:
    """ValueError without a value."""
    if not values:
        raise ValueError("no values: a summary needs one at least.")
    if len(values) == 1:
        return Summary(1, values[0], None, None)
    sd = stdev(values)
    return Summary(len(values), fmean(values), sd, t_quantile(len(values) - 1) * sd / math.sqrt(len(values)))


@dataclass(frozen=True)
class Comparison:
    """`difference`: a minus b, over the seeds that both have. Half its interval is the smallest difference that this
    many seeds could have shown. `verdict`: of the claim that a is below b."""

    difference: Summary | None
    verdict: str


def below(a: Mapping[int, float], b: Mapping[int, float]) -> Comparison:
    """Is a below b? Both map seeds to values. holds or fails where the mean difference lies beyond its interval; else
    undecided; not run where no seed has both."""
    seeds = sorted(a.keys() & b.keys())
    if not seeds:
        return Comparison(None, "not run")
    difference = summary([a[seed] - b[seed] for seed in seeds])
    if difference.half is None or abs(difference.mean) <= difference.half:
        return Comparison(difference, "undecided")
    return Comparison(difference, "holds" if difference.mean < 0 else "fails")
