"""Validation loss: what evaluate() says against a mean computed one token at a time, and what it leaves alone."""

import math

import numpy as np
import pytest
import torch

from grt.errors import ConfigError
from grt.evals.loss import evaluate
from grt.methods import METHODS
from grt.model.depth import Depth

CASES = [(method, "1+2x3+1") for method in METHODS] + [("ladder", "4L")]
TOKENS = np.random.RandomState(2).randint(0, 23, size=100).tolist()  # 8 windows of 12 and a rest of 3


@pytest.fixture
def split(split_of):
    return split_of(TOKENS)


def naive_loss(model, tokens, depth, n_windows):
    """Mean nats over n_windows non-overlapping windows, token by token, in float64."""
    losses = []
    for window in range(n_windows):
        start = window * 12
        with torch.no_grad():
            logits = model(torch.tensor([tokens[start : start + 12]]), Depth(depth))[0].double()
        for t in range(12):
            p = logits[t].exp() / logits[t].exp().sum()
            losses.append(-math.log(p[tokens[start + t + 1]]))
    assert len(losses) == 12 * n_windows
    return sum(losses) / len(losses)


@pytest.mark.parametrize(("method", "layout"), CASES, ids=[*METHODS, "dense"])
def test_equals_the_naive_mean_at_every_depth(tiny, split, method, layout):
    model = tiny(method, layout)
    result = evaluate(model, split, batch_size=3)
    R = model.config.blocks.R
    assert list(result.loss_by_depth) == list(range(R + 1))
    assert (result.windows, result.tokens) == (8, 96)
    for k, loss in result.loss_by_depth.items():
        assert loss == pytest.approx(naive_loss(model, TOKENS, k, 8), rel=1e-6)
    assert len(set(result.loss_by_depth.values())) == R + 1
    assert result.deepest == result.loss_by_depth[R]


@pytest.mark.parametrize("training", [False, True])
def test_leaves_generator_mode_and_gradients_alone(tiny, split, training):
    model = tiny(dtype=torch.float32)
    want = evaluate(model, split)
    model.train(training)
    torch.manual_seed(5)
    before = torch.random.get_rng_state()
    assert evaluate(model, split) == want  # noise is off in either mode, and nothing is random
    assert torch.equal(torch.random.get_rng_state(), before)
    assert model.training == training and model.rule.training == training
    assert all(p.grad is None for p in model.parameters())


def test_mode_comes_back_after_an_error(tiny, split_of):
    model = tiny(dtype=torch.float32).train()
    with pytest.raises(IndexError):
        evaluate(model, split_of([22] * 13 + [23] * 13))  # an id beyond the vocabulary
    assert model.training


def test_batch_size_does_not_matter(tiny, split):
    model = tiny(dtype=torch.float32)
    want = evaluate(model, split, batch_size=1).loss_by_depth
    for batch_size in (2, 3, 8, 100):
        assert evaluate(model, split, batch_size=batch_size).loss_by_depth == pytest.approx(want, rel=1e-6)


@pytest.mark.parametrize(("limit", "n"), [(1, 1), (5, 5), (8, 8), (1000, 8), (None, 8)])
def test_limit_reads_the_first_windows(tiny, split, limit, n):
    model = tiny()
    result = evaluate(model, split, limit=limit, batch_size=3)
    assert (result.windows, result.tokens) == (n, 12 * n)
    assert result.loss_by_depth[3] == pytest.approx(naive_loss(model, TOKENS, 3, n), rel=1e-6)


@pytest.mark.parametrize(("n_tokens", "n"), [(13, 1), (24, 1), (25, 2), (96, 7), (97, 8)])
def test_a_window_needs_its_last_target(tiny, split_of, n_tokens, n):
    model = tiny()
    result = evaluate(model, split_of(TOKENS[:n_tokens]), depths=[2])
    assert (result.windows, result.tokens) == (n, 12 * n)
    assert result.loss_by_depth == {2: pytest.approx(naive_loss(model, TOKENS, 2, n), rel=1e-6)}


def test_chosen_depths(tiny, split):
    model = tiny(dtype=torch.float32)
    every = evaluate(model, split).loss_by_depth
    assert evaluate(model, split, depths=[3, 1, 3]).loss_by_depth == {k: every[k] for k in (1, 3)}
    assert evaluate(model, split, depths=[0]).loss_by_depth == {0: every[0]}


def test_depths_beyond_training(tiny, split):
    model = tiny()
    for depths in ([5], [5, 6], [1, 6]):
        with pytest.warns(UserWarning, match=f"depth {max(depths)} is beyond the 3 steps") as told:
            losses = evaluate(model, split, depths=depths).loss_by_depth
        assert len(told) == 1
        assert losses[depths[-1]] == pytest.approx(naive_loss(model, TOKENS, depths[-1], 8), rel=1e-6)


def test_a_depth_that_would_never_end(tiny, split):
    with pytest.raises(ConfigError, match="depth is 10000000: give at most 192"):
        evaluate(tiny(), split, depths=[1, 10**7])


def test_bits_per_byte(tiny, split):
    """The split has two bytes a token."""
    result = evaluate(tiny(), split)
    assert result.bits_per_byte(2) == pytest.approx(result.loss_by_depth[2] / math.log(2) / 2, rel=1e-12)


def test_uniform_model_has_the_entropy_of_the_vocabulary(tiny, split):
    model = tiny()
    with torch.no_grad():
        model.embed.tokens.weight.zero_()
    assert evaluate(model, split).loss_by_depth[3] == pytest.approx(math.log(23), rel=1e-6)


@pytest.mark.parametrize(
    ("tokens", "options", "message"),
    [
        (TOKENS, {"depths": [-1]}, "depth is -1"),
        (TOKENS[:12], {}, "12 tokens but a window needs 13"),
    ],
)
def test_errors(tiny, split_of, tokens, options, message):
    with pytest.raises(ConfigError, match=message):
        evaluate(tiny(), split_of(tokens), **options)


@pytest.mark.parametrize("depths", [[1], [-1]])
def test_depth_of_a_dense_model(tiny, split, depths):
    with pytest.raises(ConfigError, match=f"depth is {depths[0]}"):
        evaluate(tiny(layout="4L"), split, depths=depths)
