"""Depth: the samplers of training depths, and the one check of a depth that somebody asks for."""

import subprocess
import sys
import warnings
from collections import Counter

import pytest

from grt.config import ConfigError, ModelConfig
from grt.methods import METHODS, depth_sampler
from grt.model.depth import Depth, fixed, uniform

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


@pytest.mark.parametrize("method", METHODS)
def test_depth_sampler_of_a_config(method):
    config = ModelConfig(method=method, layout="1+1x6+1")
    draws = [depth_sampler(config)(0, step, 0).steps for step in range(300)]
    assert sum(draws) / 300 == pytest.approx(depth_sampler(config).mean, abs=0.4)
    assert {depth_sampler(config, "fixed")(0, step, 0) for step in range(20)} == {Depth(6)}
    dense = ModelConfig(method=method, layout="8L")
    assert {depth_sampler(dense)(0, step, 0) for step in range(20)} == {Depth(0)} and depth_sampler(dense).mean == 0


def test_depths_inside_the_trained_range_pass_in_silence(tiny):
    model = tiny()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for steps in range(4):
            model.check_depth(steps, least=0)
        model.check_depth(1, least=1)
        tiny(layout="4L").check_depth(0, least=1)


def test_depth_beyond_training_warns_once(tiny):
    with pytest.warns(UserWarning, match="depth 4 is beyond the 3 steps") as told:
        tiny().check_depth(4, least=0)
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
        ("4L", 1, 0, "depth is 1, but a dense model has no core to repeat"),
        ("4L", -1, 1, "depth is -1: give at least 0"),
    ],
)
def test_impossible_depths(tiny, layout, steps, least, message):
    with pytest.raises(ConfigError, match=message):
        tiny(layout=layout).check_depth(steps, least=least)
