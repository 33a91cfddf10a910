"""Sampling: what each option does to the distribution, and that draws follow it.

Shapes: V vocabulary.
"""

import math

import pytest
import torch

from grt.decode.sampling import Sampling
from grt.decode.stream import generate
from grt.errors import ConfigError


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


PAST = [1, 2, 1]


def punished(by, ids=(1, 2)):
    """Naively, as the penalty is defined."""
    out = LOGITS.clone()
    for i in ids:
        out[i] = out[i] / by if out[i] > 0 else out[i] * by
    return out


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
        ({"top_k": 4, "top_p": 0.7}, {"keep": {1, 6}}, {"keep": {1, 6, 3}}),  # 0.7 of what top-k left
        ({"min_p": 0.5}, {"keep": {1, 6}}, {"keep": {1, 6, 3}}),
        # after the temperature: by the model's own probabilities only 1 and 6 would be left
        ({"min_p": 0.5, "temperature": 2.0}, {"keep": {1, 6, 3, 4}, "temperature": 2.0}, {"keep": {1, 6}}),
        ({"min_p": 1.0}, {"keep": {1}}, {"keep": {1, 6}}),
        ({"repetition_penalty": 1.5}, {"logits": punished(1.5)}, {}),
        ({"repetition_penalty": 1.5}, {"logits": punished(1.5)}, {"logits": punished(1.5, PAST)}),  # once, not twice
        ({"repetition_penalty": 0.8}, {"logits": punished(0.8)}, {"logits": punished(1.25)}),
        (
            {"repetition_penalty": 1.5, "top_k": 2},
            {"logits": punished(1.5), "keep": {6, 1}},
            {"logits": LOGITS, "keep": {6, 1}},
        ),
        (
            {"repetition_penalty": 2.0, "top_k": 2, "temperature": 0.7},
            {"logits": punished(2.0), "keep": {6, 3}, "temperature": 0.7},
            {"logits": punished(2.0), "keep": {6, 1}, "temperature": 0.7},
        ),
    ],
    ids=str,
)
def test_picks_follow_the_distribution(options, right, wrong):
    sampling, generator = Sampling(**options), torch.Generator().manual_seed(11)
    counts = torch.zeros(8, dtype=torch.float64)
    for _ in range(6000):
        counts[sampling.pick(LOGITS, PAST, generator)[0]] += 1
    bound = 24.3  # 0.1 % of chi-square with 7 degrees of freedom
    right, wrong = ({"logits": LOGITS} | want for want in (right, wrong))
    assert chi_square(counts, probabilities_of(**right)) < bound
    assert chi_square(counts, probabilities_of(**wrong)) > bound  # the test can tell
    torch.testing.assert_close(sampling.probabilities(LOGITS, PAST), probabilities_of(**right))


def test_first_token_follows_the_models_softmax(tiny):
    """The whole path, not only the draw: 1,000 seeds against the forward pass, with temperature."""
    model, prompt = tiny(dtype=torch.float32), [3, 1, 4]
    with torch.no_grad():
        logits = model(torch.tensor([prompt]))[0, -1]
    counts = torch.zeros(23, dtype=torch.float64)
    for seed in range(1000):
        counts[next(generate(model, prompt, seed=seed, temperature=2.0))] += 1
    assert (1000 * probabilities_of(logits, 2.0)).min() > 3, "too rare for a chi-square"
    bound = 48.3  # 0.1 % of chi-square with 22 degrees of freedom
    assert chi_square(counts, probabilities_of(logits, 2.0)) < bound
    assert chi_square(counts, probabilities_of(logits, 1.0)) > bound


@pytest.mark.parametrize(
    "options",
    [{"temperature": 0}, {"temperature": 1e-3}, {"temperature": 1e-300}, {"top_k": 1}, {"top_p": 1e-9}, {"min_p": 1}],
    ids=str,
)
def test_narrow_sampling_is_greedy(options):
    generator = torch.Generator().manual_seed(0)
    assert {Sampling(**options).pick(LOGITS, PAST, generator)[0] for _ in range(50)} == {1}
    with_penalty = Sampling(**options, repetition_penalty=2.0)  # halves what was the largest
    assert {with_penalty.pick(LOGITS, PAST, generator)[0] for _ in range(50)} == {6}


def test_the_logprob_is_the_models_own():
    sampling = Sampling(0.3, top_k=2, top_p=0.9, min_p=0.1, repetition_penalty=1.7)
    for seed in range(9):
        token, logprob = sampling.pick(LOGITS, PAST, torch.Generator().manual_seed(seed))
        assert logprob == pytest.approx(math.log(probabilities_of(LOGITS)[token]), rel=1e-12)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": -0.5}, "temperature is -0.5"),
        ({"temperature": math.nan}, "temperature is nan"),
        ({"temperature": math.inf}, "temperature is inf"),
        ({"top_p": 0.0}, "top_p is 0.0"),
        ({"top_p": 1.5}, "top_p is 1.5"),
        ({"top_p": math.nan}, "top_p is nan"),
        ({"top_k": -1}, "top_k is -1"),
        ({"min_p": -0.1}, "min_p is -0.1"),
        ({"min_p": 1.1}, "min_p is 1.1"),
        ({"min_p": math.nan}, "min_p is nan"),
        ({"repetition_penalty": 0.0}, "repetition_penalty is 0.0"),
        ({"repetition_penalty": math.inf}, "repetition_penalty is inf"),
        ({"repetition_penalty": math.nan}, "repetition_penalty is nan"),
    ],
    ids=str,
)
def test_values_that_cannot_be(options, message):
    with pytest.raises(ConfigError, match=message):
        Sampling(**options)


@pytest.mark.parametrize("top_p", [0.2, 0.9, 0.9999])
@pytest.mark.parametrize("scale", [0.1, 3.0, 10.0])  # from next to all tokens of a text to a few
def test_top_p_of_a_large_vocabulary(scale: float, top_p: float) -> None:
    logits = scale * torch.randn(3, 5000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    narrowed = Sampling(top_p=top_p).narrowed(logits)
    for p, row in zip(narrowed, logits.softmax(-1).tolist(), strict=True):
        kept, held = {}, 0.0
        for i in sorted(range(len(row)), key=row.__getitem__, reverse=True):
            if held >= top_p:
                break
            kept[i], held = row[i], held + row[i]
        assert set(p.nonzero().flatten().tolist()) == set(kept)
        torch.testing.assert_close(p[list(kept)], torch.tensor(list(kept.values()), dtype=p.dtype) / held)
