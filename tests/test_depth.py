"""Depth: the samplers of training depths, and the one check of a depth that somebody asks for."""

import math
import random
import subprocess
import sys
import warnings
from collections import Counter

import pytest

from grt.config import ModelConfig
from grt.errors import ConfigError
from grt.methods import METHODS, depth_sampler
from grt.model.depth import Depth, fixed, lognormal_poisson, uniform

R = 6


def chi_square(counts: Counter, keys, n: int) -> float:
    expected = n / len(keys)
    return sum((counts[key] - expected) ** 2 / expected for key in keys)


def test_uniform_over_one_to_R():
    n = 6000
    counts = Counter(
        uniform(R)(seed, step, slot).steps for seed in range(10) for step in range(100) for slot in range(6)
    )
    assert sorted(counts) == [1, 2, 3, 4, 5, 6]
    assert chi_square(counts, range(1, R + 1), n) < 20.5  # 0.1 % of chi-square with 5 degrees of freedom
    skewed = Counter({k: counts[k] for k in range(2, R + 1)}) + Counter({2: counts[1]})
    assert chi_square(skewed, range(1, R + 1), n) > 20.5  # what a sampler over 2..R would give


@pytest.mark.parametrize("which", ["seed", "step", "slot"])
def test_neighbours_are_independent(which):
    """Every pair (depth here, depth next door) is equally frequent: no argument is ignored, none is only added."""
    draw, n = uniform(R), 7200
    pairs = Counter()
    for i in range(n):
        at = {"seed": 2 * i, "step": 2 * i, "slot": 2 * i}
        at = {name: value if name == which else i % 7 for name, value in at.items()}
        pairs[draw(**at).steps, draw(**at | {which: at[which] + 1}).steps] += 1
    keys = [(a, b) for a in range(1, R + 1) for b in range(1, R + 1)]
    assert chi_square(pairs, keys, n) < 66.7  # 0.1 % of chi-square with 35 degrees of freedom


def test_arguments_are_not_mixed_up():
    """As a sum of step and slot, or their digits run together, would."""
    draw = uniform(1000)
    assert (
        len({draw(*at).steps for at in [(0, 1, 12), (0, 11, 2), (0, 2, 11), (1, 0, 12), (0, 12, 1), (11, 0, 2)]}) == 6
    )


def test_a_draw_follows_from_its_arguments():
    want = [uniform(R)(1, step, slot) for step in range(5) for slot in range(3)]
    uniform(R)(9, 9, 9)
    assert [uniform(R)(1, step, slot) for step in range(5) for slot in range(3)] == want
    program = (
        "from grt.model.depth import uniform\n"
        f"print([uniform({R})(1, step, slot).steps for step in range(5) for slot in range(3)])"
    )
    out = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert out.strip() == str([depth.steps for depth in want])  # whatever the process's hash seed


def test_draws_are_pinned():
    """Runs are resumed and compared across versions: these numbers may never change."""
    assert [uniform(R)(1337, step, slot).steps for step in range(4) for slot in range(3)] == [
        6, 6, 1, 5, 4, 5, 2, 1, 3, 5, 5, 3,
    ]  # fmt: skip


def test_means():
    assert uniform(R).mean == 3.5 and uniform(1).mean == 1 and fixed(R).mean == R
    assert {uniform(1)(0, step, 0) for step in range(50)} == {Depth(1)}
    assert {fixed(R)(0, step, 0) for step in range(50)} == {Depth(R)}


UNCAPPED = 10**6
# r-bar, median, 95 % and 99 % quantiles, P(r > r-bar + 1), E[min(r, 8)], E[min(r, 4)]
HEAVY_TAILS = [
    (3, 4, 8, 12, 0.34, 3.88, 3.11),
    (5, 5, 13, 17, 0.36, 5.32, 3.60),
    (9, 9, 21, 29, 0.38, 6.89, 3.90),
    (10, 10, 23, 31, 0.38, 7.11, None),
    (32, 29, 67, 94, 0.40, None, None),
]


def check_draws(mean: int, cap: int, n: int, tolerance: float) -> None:
    """Mean, spread and quantiles of n draws against the exact ones."""
    sampler, rng = lognormal_poisson(mean, 0.5, cap, 8), random.Random(0)
    draws = sorted(sampler.draw(rng) for _ in range(n))
    if cap == UNCAPPED:
        expected, sd = mean + 1, math.sqrt(mean + mean**2 * math.expm1(0.25))
        for share, want in zip((0.5, 0.95, 0.99), *[row[1:4] for row in HEAVY_TAILS if row[0] == mean], strict=True):
            assert abs(draws[int(share * n)] - want) <= 1  # quantiles are whole numbers, and drawn
    else:
        expected = sampler.mean
        sd = math.sqrt(math.fsum(p * (r - expected) ** 2 for r, p in sampler.probabilities.items()))
        assert draws[-1] == cap
    assert draws[0] == 1
    average = sum(draws) / n
    assert average == pytest.approx(expected, rel=tolerance)  # see the callers
    assert math.sqrt(sum((r - average) ** 2 for r in draws) / n) == pytest.approx(sd, rel=tolerance)  # see the callers


@pytest.mark.parametrize(("mean", "cap"), [(5, UNCAPPED), (9, UNCAPPED), (9, 40), (3, 7)])
def test_lognormal_poisson_draws(mean, cap):
    check_draws(mean, cap, n=100_000, tolerance=0.015)  # four standard deviations of the spread


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("mean", [row[0] for row in HEAVY_TAILS])
def test_a_million_lognormal_poisson_draws(mean):
    check_draws(mean, UNCAPPED, n=1_000_000, tolerance=0.005)
    check_draws(mean, 4 * mean + 4, n=1_000_000, tolerance=0.005)


@pytest.mark.parametrize(("mean", "median", "q95", "q99", "deeper", "grad8", "grad4"), HEAVY_TAILS)
def test_lognormal_poisson_probabilities(mean, median, q95, q99, deeper, grad8, grad4):
    sampler = lognormal_poisson(mean, 0.5, 1000, 8)
    p = sampler.probabilities
    assert min(p) == 1 and min(p.values()) >= 0 and math.fsum(p.values()) == pytest.approx(1, abs=1e-12)
    assert sampler.mean == pytest.approx(mean + 1, rel=1e-8)
    variance = math.fsum(q * (r - mean - 1) ** 2 for r, q in p.items())
    assert variance == pytest.approx(mean + mean**2 * math.expm1(0.25), rel=1e-6)
    for share, want in ((0.5, median), (0.95, q95), (0.99, q99)):
        below = math.fsum(q for r, q in p.items() if r < want)
        assert below < share <= below + p[want]
    beyond = math.fsum(q for r, q in p.items() if r > mean + 1)
    assert beyond == pytest.approx(deeper, abs=0.005)  # printed with two digits
    for k, want in ((8, grad8), (4, grad4)):
        if want is not None:
            assert math.fsum(q * min(r, k) for r, q in p.items()) == pytest.approx(want, abs=0.005)  # printed so too


def test_lognormal_poisson_cap_and_limits():
    free, capped = (lognormal_poisson(9, 0.5, cap, 8).probabilities for cap in (1000, 12))
    assert list(capped) == list(range(1, 13))
    assert all(capped[r] == pytest.approx(free[r], rel=1e-9) for r in range(1, 12))
    assert capped[12] == pytest.approx(math.fsum(p for r, p in free.items() if r >= 12), rel=1e-9)
    poisson = lognormal_poisson(4, 0, 60, 8).probabilities
    for r in (1, 5, 20):  # without spread a plain Poisson number
        assert poisson[r] == pytest.approx(math.exp(-4) * 4 ** (r - 1) / math.factorial(r - 1), rel=1e-9)
    for sampler in (lognormal_poisson(0, 0.5, 4, 8), lognormal_poisson(9, 0.5, 1, 8)):
        assert sampler.probabilities == {1: 1.0} and {sampler(0, i, 0) for i in range(50)} == {Depth(1, 8)}


def test_lognormal_poisson_draws_are_pinned():
    draw = lognormal_poisson(9, 0.5, 40, 8)
    assert [draw(1337, step, slot).steps for step in range(4) for slot in range(3)] == [
        15, 5, 16, 3, 7, 7, 10, 13, 7, 5, 6, 5,
    ]  # fmt: skip


HEAVY = lognormal_poisson(5, 0.5, 24, 8)  # a mean depth of R, at most 4R


@pytest.mark.parametrize("method", METHODS)
def test_depth_sampler_of_a_config(method):
    config = ModelConfig(method=method, layout="1+1x6+1")
    sampler, always = depth_sampler(config), method in ("rrt", "mor", "mor-token", "ouro")
    want = fixed(6) if always else uniform(6) if "poisson" not in method and method != "huginn" else HEAVY
    assert sampler.probabilities == want.probabilities and sampler.grad_steps == want.grad_steps
    assert [sampler(0, step, 0) for step in range(300)] == [want(0, step, 0) for step in range(300)]
    assert {depth_sampler(config, "fixed")(0, step, 0) for step in range(20)} == {Depth(6, sampler.grad_steps)}
    dense = ModelConfig(method=method, layout="8L")
    assert {depth_sampler(dense)(0, step, 0) for step in range(20)} == {Depth(0)} and depth_sampler(dense).mean == 0


def test_depths_inside_the_trained_range_pass_in_silence(tiny):
    model = tiny()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for steps in range(4):
            model.check_depth(steps, least=0)
        model.check_depth(1, least=1)
        tiny(layout="4L").check_depth(0, least=1)
    assert told == []


@pytest.mark.parametrize("steps", [4, 192])
def test_depth_beyond_training_warns_once(tiny, steps):
    """The deepest too, 64 times R."""
    with pytest.warns(UserWarning, match=f"depth {steps} is beyond the 3 steps") as told:
        tiny().check_depth(steps, least=0)
    assert len(told) == 1


def test_a_rule_may_refuse_to_go_deeper(tiny):
    model = tiny()
    model.rule.extrapolates = False
    model.check_depth(3, least=0)
    with pytest.raises(ConfigError, match="depth 4 is beyond the 3 steps of grt: choose at most 3"):
        model.check_depth(4, least=0)


@pytest.mark.parametrize(
    ("layout", "steps", "least", "message"),
    [
        ("1+2x3+1", 0, 1, "depth is 0: give at least 1"),
        ("1+2x3+1", -1, 0, "depth is -1: give at least 0"),
        ("1+2x3+1", 193, 0, "depth is 193: give at most 192, 64 times the model's R"),
        ("4L", 1, 0, "depth is 1, but a dense model has no core to repeat"),
        ("4L", -1, 1, "depth is -1: give at least 0"),
    ],
)
def test_impossible_depths(tiny, layout, steps, least, message):
    with pytest.raises(ConfigError, match=message):
        tiny(layout=layout).check_depth(steps, least=least)
