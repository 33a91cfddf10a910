"""Sampling from a model: greedy, distributions, truncations, stops, depths and the context window."""

import math

import pytest
import torch

from grt.config import ConfigError
from grt.infer.generate import generate, pick
from grt.methods import METHODS
from grt.model.depth import Depth

PROMPT = [3, 1, 4]
CASES = [(method, "1+2x3+1") for method in METHODS] + [("ladder", "4L")]


@pytest.fixture
def model(tiny):
    return tiny(dtype=torch.float32)


def text(model, prompt=PROMPT, n=10, **options):
    return list(generate(model, prompt, max_new_tokens=n, **options))


def greedy_by_hand(model, ids, n, depth=None):
    """argmax of the full forward pass over the last `context` tokens, again and again."""
    ids = list(ids)
    for _ in range(n):
        with torch.no_grad():
            logits = model(torch.tensor([ids[-model.config.context :]]), depth)
        ids.append(int(logits[0, -1].argmax()))
    return ids[-n:]


@pytest.mark.parametrize(("method", "layout"), CASES, ids=[*METHODS, "dense"])
def test_greedy_is_the_argmax_of_the_full_forward(tiny, method, layout):
    """25 tokens: past the context of 12."""
    model = tiny(method, layout, dtype=torch.float32)
    got = text(model, n=25, temperature=0)
    assert got == greedy_by_hand(model, PROMPT, 25) and len(set(got)) > 1


def test_a_long_prompt_uses_its_last_tokens(model):
    long = [i % 23 for i in range(0, 200, 7)]
    for options in ({"temperature": 0}, {"seed": 5}):
        assert text(model, long, 1, **options) == text(model, long[-12:], 1, **options)
    assert text(model, long, 5, temperature=0) == greedy_by_hand(model, long, 5)
    firsts = {text(model, long[-k:], 1, temperature=0)[0] for k in range(1, 13)}
    assert len(firsts) > 1, "the model ignores its prompt"


def test_seed_decides_the_text(model):
    torch.manual_seed(0)
    a = text(model, seed=3)
    before = torch.random.get_rng_state()
    assert text(model, seed=3) == a  # whatever the global generator does
    assert torch.equal(torch.random.get_rng_state(), before)
    assert len({tuple(text(model, seed=seed)) for seed in range(5)}) == 5
    assert text(model, n=4, seed=3) == a[:4]


@pytest.mark.parametrize("options", [{"top_k": 1}, {"top_p": 1e-6}, {"temperature": 1e-4}], ids=str)
def test_narrow_sampling_is_greedy(model, options):
    want = text(model, temperature=0)
    assert all(text(model, seed=seed, **options) == want for seed in range(3))
    assert any(text(model, seed=seed) != want for seed in range(3))


def chi_square(counts, probabilities) -> float:
    """Infinite where something impossible happened."""
    expected = counts.sum() * probabilities
    possible = expected > 0
    if counts[~possible].any():
        return math.inf
    return ((counts - expected)[possible].square() / expected[possible]).sum().item()


def probabilities_of(logits, temperature=1.0, keep=None):
    p = (logits.double() / temperature).exp()
    if keep is not None:
        p[[i for i in range(len(p)) if i not in keep]] = 0
    return p / p.sum()


LOGITS = torch.tensor([0.3, 2.0, -0.5, 1.1, 0.9, -1.5, 1.7, 0.0])
# by probability: 1, 6, 3, 4, 0, 7, 2, 5; cumulated .36, .63, .77, .89 and so on


@pytest.mark.parametrize(
    ("options", "right", "wrong"),
    [
        ({}, {}, {"temperature": 1.1}),
        ({"temperature": 0.7}, {"temperature": 0.7}, {}),
        ({"temperature": 1.6}, {"temperature": 1.6}, {"temperature": 1 / 1.6}),
        ({"top_k": 3}, {"keep": {1, 6, 3}}, {"keep": {1, 6}}),
        ({"top_k": 3}, {"keep": {1, 6, 3}}, {"keep": {1, 6, 3, 4}}),
        ({"top_k": 99}, {}, {"keep": {1, 6, 3, 4, 0, 7, 2}}),
        ({"top_p": 0.7}, {"keep": {1, 6, 3}}, {"keep": {1, 6}}),  # the token that reaches 0.7 is kept
        ({"top_p": 0.7}, {"keep": {1, 6, 3}}, {"keep": {1, 6, 3, 4}}),
        (
            {"top_k": 4, "top_p": 0.5, "temperature": 0.9},
            {"keep": {1, 6}, "temperature": 0.9},
            {"keep": {1, 6}, "temperature": 0.5},
        ),
    ],
    ids=str,
)
def test_picks_follow_the_distribution(options, right, wrong):
    options = {"temperature": 1.0, "top_k": 0, "top_p": 1.0} | options
    generator, counts = torch.Generator().manual_seed(11), torch.zeros(8, dtype=torch.float64)
    for _ in range(6000):
        counts[int(pick(LOGITS, generator=generator, **options))] += 1
    bound = 24.3  # 0.1 % of chi-square with 7 degrees of freedom
    assert chi_square(counts, probabilities_of(LOGITS, **right)) < bound
    assert chi_square(counts, probabilities_of(LOGITS, **wrong)) > bound  # the test can tell


def test_first_token_follows_the_models_softmax(model):
    """The whole path, not only `pick`: 1,000 seeds against the forward pass, with temperature."""
    with torch.no_grad():
        logits = model(torch.tensor([PROMPT]))[0, -1]
    counts = torch.zeros(23, dtype=torch.float64)
    for seed in range(1000):
        counts[text(model, n=1, seed=seed, temperature=2.0)[0]] += 1
    assert (1000 * probabilities_of(logits, 2.0)).min() > 3, "too rare for a chi-square"
    bound = 48.3  # 0.1 % of chi-square with 22 degrees of freedom
    assert chi_square(counts, probabilities_of(logits, 2.0)) < bound
    assert chi_square(counts, probabilities_of(logits, 1.0)) > bound


def test_stop_token_ends_and_is_not_part(model):
    plain = text(model, temperature=0, n=12)
    stop = plain[4]
    assert text(model, temperature=0, n=12, stop=stop) == plain[: plain.index(stop)]
    assert text(model, temperature=0, n=12, stop=next(i for i in range(23) if i not in plain)) == plain
    assert text(model, n=0) == []


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_depth_is_the_truncated_models(tiny, model, depth):
    shallow = tiny(layout=f"1+2x{depth}+1", dtype=torch.float32)
    shallow.load_state_dict(model.state_dict())
    got = text(model, temperature=0, n=20, depth=depth)
    assert got == text(shallow, temperature=0, n=20) == greedy_by_hand(model, PROMPT, 20, Depth(depth))
    others = [text(model, temperature=0, n=20, depth=k) for k in (1, 2, 3) if k != depth]
    assert got not in others


def test_training_mode_and_noise(tiny):
    """Noise is off while generating, also for a model in training, which stays in training."""
    model = tiny(dtype=torch.float32, state_noise=9.0, gate_noise=9.0)
    want = text(model)
    assert text(model.train()) == want and model.training
    stream = generate(model, PROMPT, max_new_tokens=5)
    next(stream)
    stream.close()  # a reader that leaves early
    assert model.training
    assert not model.eval().training and text(model) == want and not model.training


@pytest.mark.parametrize(
    ("prompt", "options", "message"),
    [
        ([], {}, "the prompt is empty"),
        (PROMPT, {"temperature": -0.5}, "temperature is -0.5"),
        (PROMPT, {"temperature": math.nan}, "temperature is nan"),
        (PROMPT, {"top_p": 0.0}, "top_p is 0.0"),
        (PROMPT, {"top_p": 1.5}, "top_p is 1.5"),
        (PROMPT, {"top_p": math.nan}, "top_p is nan"),
        (PROMPT, {"top_k": -1}, "top_k is -1"),
        (PROMPT, {"depth": 0}, "depth is 0: give at least 1"),
        (PROMPT, {"depth": -2}, "depth is -2: give at least 1"),
    ],
    ids=str,
)
def test_errors(model, prompt, options, message):
    with pytest.raises(ConfigError, match=message):
        text(model, prompt, **options)


def test_depth_of_a_dense_model(tiny):
    dense = tiny(layout="4L", dtype=torch.float32)
    assert text(dense, depth=0) == text(dense)
    with pytest.raises(ConfigError, match="dense model has no core"):
        text(dense, depth=1)
