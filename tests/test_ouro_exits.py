"""Ouro (arXiv 2510.25741): exits and losses of given gates, by hand.

Shapes: R steps.
"""

import math
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from naive_ouro import naive_p

from grt.backbone.context import LoopContext
from grt.config import ModelConfig
from grt.errors import ConfigError
from grt.methods.ouro import Ouro, exit_distribution, exit_step

unit = st.floats(0, 1, allow_subnormal=False)


@given(st.lists(unit, min_size=1, max_size=12))
def test_the_exit_distribution(lambdas):
    p = exit_distribution(torch.tensor(lambdas, dtype=torch.float64)[:, None, None])
    assert p.shape == (len(lambdas), 1, 1) and (p >= 0).all()
    assert p.sum().item() == pytest.approx(1, abs=1e-12)
    assert p.flatten().tolist() == pytest.approx(naive_p(lambdas), abs=1e-15)
    listed = exit_distribution([torch.tensor([[x]], dtype=torch.float64) for x in lambdas])
    assert torch.equal(p, listed)


@given(st.lists(unit, min_size=1, max_size=8), unit)
def test_the_exit_step(lambdas, q):
    p = naive_p(lambdas)
    total, want = 0.0, len(p)
    for t, p_t in enumerate(p[:-1], 1):  # the last sum is one
        total += p_t
        if total >= q and q < 1:
            want = t
            break
    got = exit_step(torch.tensor(p, dtype=torch.float64)[:, None, None], q)
    assert got.item() == want
    assert exit_step(torch.tensor(p)[:, None, None], 0).item() == 1
    assert exit_step(torch.tensor(p)[:, None, None], 1).item() == len(p)


@pytest.mark.parametrize("p", [[0.1] * 10, [0.7, 0.2, 0.1], [0.5, 0.5, 1e-12], [1 / 3] * 3, [0.3, 0.6999999]])
def test_rounding_never_decides_the_last_exit(p):
    """In float32 these sums are a little below one, or one before the last step."""
    assert exit_step(torch.tensor(p)[:, None, None], 1).item() == len(p)
    assert exit_step(torch.tensor(p)[:, None, None], 1 - 1e-9).item() in (len(p) - 1, len(p))


def test_exits_at_a_sum_that_is_q():
    assert exit_step(torch.tensor([0.5, 0.25, 0.25])[:, None, None], 0.5).item() == 1
    assert exit_step(torch.tensor([0.5, 0.25, 0.25])[:, None, None], 0.75).item() == 2
    many = torch.rand(4, 3, 5).softmax(0)
    assert exit_step(many, 0.5).shape == (3, 5)


def rule_of(R, **fields):
    return Ouro(ModelConfig(method="ouro", layout=f"1+1x{R}+1", d_model=4, n_heads=1, **fields))


def loss_of(rule, losses, lambdas, second=False):
    """The rule's loss where states have given losses: a state is its own loss."""
    states = iter([torch.full((1, 1), math.nan), *losses])
    loss = rule.second_loss if second else rule.loss
    return loss(states, lambda h: h, LoopContext(carry={"exit": list(lambdas)}))


@pytest.mark.parametrize("R", [2, 4, 10])
def test_entropy_pulls_to_the_uniform_distribution(R):
    uniform = torch.tensor([1 / (R - t) for t in range(R)], dtype=torch.float64)[:, None, None].requires_grad_()
    p = exit_distribution(uniform)
    torch.testing.assert_close(p, torch.full_like(p, 1 / R), rtol=1e-12, atol=0)
    equal = torch.ones(R, 1, 1, dtype=torch.float64)
    total = loss_of(rule_of(R, exit_beta=2.0), equal, uniform).total
    assert total.item() == pytest.approx(1 - 2 * math.log(R), rel=1e-12)
    assert torch.autograd.grad(total, uniform)[0].abs().max() < 1e-12

    ends = {}
    for beta in (0.05, 100.0):
        rule, a = rule_of(R, exit_beta=beta), torch.zeros(R, 1, 1, dtype=torch.float64, requires_grad=True)
        losses = torch.linspace(2, 1, R, dtype=torch.float64)[:, None, None]  # deeper is better
        optimizer = torch.optim.Adam([a], lr=0.05)
        for _ in range(300):
            optimizer.zero_grad()
            loss_of(rule, losses, torch.sigmoid(a)).total.backward()
            optimizer.step()
        ends[beta] = exit_distribution(torch.sigmoid(a)).flatten()
    assert (ends[100.0] - 1 / R).abs().max() < 0.02 / R  # 300 steps on, and losses still count for 1 / 100 of it
    assert ends[0.05][-1] > 1.3 / R, "with a small weight the better steps are taken"


def test_exits_that_are_certain_stay_finite():
    lambdas = torch.tensor([1.0, 0.0, 0.5, 1.0])[:, None, None].requires_grad_()
    losses = torch.tensor([3.0, 2.0, 2.5, 1.0])[:, None, None]
    first = loss_of(rule_of(4), losses, lambdas)
    assert first.total.item() == 3.0 and first.lm.item() == 1.0
    second = loss_of(rule_of(4), losses, lambdas, second=True)
    for loss in (first, second):
        assert loss.total.isfinite() and torch.autograd.grad(loss.total, lambdas)[0].isfinite().all()


def test_labels_of_stage_two_by_hand():
    """A gain of 0.1 nats means go on, a loss that rose means exit, one of gamma is undecided."""
    losses, lambdas = [3.0, 2.9, 2.95, 2.945], [0.9, 0.3, 0.6, 0.2]
    w = [1 / (1 + math.exp(-50 * 0.095)), 1 / (1 + math.exp(50 * 0.005)), 0.5]
    assert w == pytest.approx([0.99142, 0.43782, 0.5], abs=1e-5)
    terms = [
        -w_t * math.log(1 - x) - (1 - w_t) * math.log(x) for w_t, x in zip(w, lambdas[1:], strict=True)
    ]  # lambda_1 has no label
    as_tensor = partial(torch.tensor, dtype=torch.float64)
    got = loss_of(rule_of(4), as_tensor(losses)[:, None, None], as_tensor(lambdas)[:, None, None], second=True)
    assert got.total.item() == pytest.approx(sum(terms) / 4, rel=1e-12)
    assert got.lm.item() == 2.945


def test_a_negative_weight_is_refused():
    with pytest.raises(ConfigError, match=r"^model.exit_beta is -0.1: it must be at least 0.$"):
        rule_of(2, exit_beta=-0.1)
    assert rule_of(2, exit_beta=0.0).beta == 0
