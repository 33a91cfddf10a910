"""Ouro (arXiv 2510.25741): its update, exits and losses against loops over single tokens.

Shapes: B batch, T tokens, d width, R steps, V vocabulary.
"""

import math
from dataclasses import replace

import pytest
import torch
from naive_ouro import naive_ce, naive_p, naive_states

from grt.backbone.context import LoopContext
from grt.config import ModelConfig
from grt.device import autocast
from grt.methods import build_model, depth_sampler
from grt.model import cost
from grt.model.depth import Depth
from grt.train.memory import training_peak

both_carries = pytest.mark.parametrize("carry", ["normed", "raw"])


def with_zero(x, ctx):
    return torch.zeros_like(x)


def naive_loss(model, ids, targets, k):
    states, lambdas = naive_states(model, ids, k)
    losses = [naive_ce(model, h, targets) for h in states]
    total = 0.0
    for b in range(ids.shape[0]):
        for i in range(ids.shape[1]):
            for t, p_t in enumerate(naive_p([x[b, i] for x in lambdas])):
                total = total + p_t * losses[t][b, i] + model.config.exit_beta * p_t * torch.log(p_t)
    return total / ids.numel(), losses


@both_carries
@pytest.mark.parametrize("k", [2, 3, 4])
@pytest.mark.parametrize("layout", ["1+2x3+1", "0+1x3+0"])
def test_the_loss_of_stage_one_and_its_gradient(tiny, ids, carry, k, layout):
    """p is not detached: the gate learns from CE, everything else from the weighted CE."""
    model, targets = tiny("ouro", layout, loop_carry=carry, exit_beta=0.3).train(), ids.roll(-1, 1)
    want, losses = naive_loss(model, ids, targets, k)
    got = model.loss(ids, targets, Depth(k))
    torch.testing.assert_close(got.total, want, rtol=1e-7, atol=0)
    torch.testing.assert_close(got.lm, losses[-1].mean(), rtol=1e-6, atol=0)
    parameters = list(model.parameters())
    pairs = zip(*(torch.autograd.grad(x, parameters) for x in (got.total, want)), strict=True)
    for a, b in pairs:
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)


@both_carries
def test_states_gates_and_readout(tiny, ids, carry):
    model = tiny("ouro", loop_carry=carry)
    seen, ctx = [], LoopContext()
    ctx.taps = {"exit": lambda x, ctx: seen.append((ctx.step, x))}
    got = list(model.states(ids, ctx, Depth(3)))
    states, lambdas = naive_states(model, ids, 3)
    assert torch.equal(got[0], model.prelude(model.embed(ids), LoopContext()))
    for h, want in zip(got[1:], states, strict=True):
        torch.testing.assert_close(h, want, rtol=1e-12, atol=1e-12)
    assert [step for step, _ in seen] == [0, 1, 2], "h_0 has no gate"
    for (_, x), kept, want in zip(seen, ctx.carry["exit"], lambdas, strict=True):
        assert x.shape == (2, 12) and torch.equal(x, kept)
        torch.testing.assert_close(x, want, rtol=1e-12, atol=1e-12)
    again = list(model.states(ids, ctx, Depth(2)))
    assert len(again) == 3 and len(ctx.carry["exit"]) == 2, "a pass begins with a list of its own"


def test_the_norm_in_the_loop_is_the_final_norm(tiny, ids):
    """No parameter is added, and the state has what ln_f gives it; raw states have not."""
    normed, raw = (tiny("ouro", spread=0, loop_carry=carry) for carry in ("normed", "raw"))
    assert normed.state_dict().keys() == raw.state_dict().keys()
    h, o = (list(model.states(ids, LoopContext(), Depth(1)))[-1] for model in (normed, raw))
    assert torch.equal(h, raw.ln_f(o)) and not torch.equal(h, o)


def test_a_fresh_gate_is_half_open(tiny, ids):
    model = tiny("ouro", spread=0)
    ctx = LoopContext()
    list(model.states(ids, ctx, Depth(3)))
    assert not model.rule.gate.weight.any() and not model.rule.gate.bias.any()
    assert all((x == 0.5).all() for x in ctx.carry["exit"])


def test_the_state_stays_single_under_autocast(tiny, ids):
    model = tiny("ouro", dtype=torch.float32).train()
    ctx = LoopContext()
    with autocast(torch.device("cpu"), torch.bfloat16):
        states = list(model.states(ids, ctx, Depth(3)))
        loss = model.loss(ids, ids, Depth(3))
    assert all(x.dtype == torch.float32 for x in (*states, *ctx.carry["exit"], loss.total))


def test_without_exits_the_loss_is_that_of_the_last_step(tiny, ids):
    model, targets = tiny("ouro", dtype=torch.float32).train(), ids.roll(-1, 1)
    got = model.loss(ids, targets, Depth(3), LoopContext(taps={"exit": with_zero}))
    want = naive_ce(model, naive_states(model, ids, 3)[0][-1], targets).mean()
    assert torch.equal(got.total, got.lm)
    torch.testing.assert_close(got.total, want, rtol=1e-6, atol=0)


def test_the_loss_of_stage_two(tiny, ids):
    model, targets = tiny("ouro").train(), ids.roll(-1, 1)
    states, lambdas = naive_states(model, ids, 3)
    ce, want = [naive_ce(model, h, targets) for h in states], 0.0
    for b in range(2):
        for i in range(12):
            for t in (1, 2):
                gain = max(0.0, ce[t - 1][b, i].item() - ce[t][b, i].item())
                w, x = 1 / (1 + math.exp(-50 * (gain - 0.005))), lambdas[t][b, i]
                want = want - w * torch.log(1 - x) - (1 - w) * torch.log(x)
    got = model.loss(ids, targets, Depth(3), stage=2)
    torch.testing.assert_close(got.total, want / 24 / 3, rtol=1e-6, atol=0)
    gate = list(model.rule.gate.parameters())
    pairs = zip(*(torch.autograd.grad(x, gate) for x in (got.total, want / 72)), strict=True)
    assert all(torch.allclose(a, b, rtol=1e-4, atol=1e-8) for a, b in pairs)
    assert not got.lm.requires_grad


def test_the_read_outs_of_stage_two_are_not_kept(tiny, ids):
    model = tiny("ouro").train()
    flags = []
    taps = {"attention": lambda x, ctx: flags.append(x.requires_grad) if ctx.section == "coda" else None}
    for recompute in (False, True):
        model.loss(ids, ids, Depth(3), LoopContext(taps=taps, recompute=recompute), stage=2).total.backward()
    assert flags == [False] * 6


def test_numbers_of_an_evaluation(tiny, ids):
    model, targets = tiny("ouro"), ids.roll(-1, 1)
    ctx = LoopContext()
    with torch.inference_mode():
        losses = {k: naive_ce(model, h, targets) for k, h in enumerate(model.states(ids, ctx, Depth(5)))}
        got = model.rule.evaluation(losses, ctx)  # two steps beyond R do not enter
    qs = (0.1, 0.3, 0.5, 0.7, 0.9)
    assert list(got) == ["expected_loss", *(f"{what} at q={q}" for q in qs for what in ("loss", "depth"))]
    depths = set()
    for b in range(2):
        for i in range(12):
            p = naive_p([x[b, i].item() for x in ctx.carry["exit"][:3]])
            want = sum(p_t * losses[t][b, i].item() for t, p_t in enumerate(p, 1))
            assert got["expected_loss"][b, i].item() == pytest.approx(want, rel=1e-12)
            for q in qs:
                t = next(t for t in (1, 2, 3) if sum(p[:t]) >= q or t == 3)
                assert got[f"depth at q={q}"][b, i] == t
                assert got[f"loss at q={q}"][b, i] == losses[t][b, i]
                depths.add(t)
    assert depths == {1, 2, 3}


def bend(x, ctx):
    """Intervene in the coda, by another factor at each step."""
    return x * (1 + 0.1 * ctx.step) if ctx.section == "coda" else None


@pytest.mark.parametrize("method", ["ouro", "grt"])
@pytest.mark.parametrize("taps", [{}, {"attention": bend}, {"state": lambda x, ctx: x + 0.1 * ctx.step}], ids=len)
@pytest.mark.parametrize("depth", [Depth(1), Depth(3), Depth(3, grad_steps=2)], ids=str)
def test_computing_read_outs_again_changes_nothing(tiny, ids, method, taps, depth):
    model, results = tiny(method).train(), []
    for recompute in (False, True):
        torch.manual_seed(5)  # GRT's noise
        ctx = LoopContext(taps=taps, recompute=recompute)
        loss = model.loss(ids, ids.roll(-1, 1), depth, ctx)
        results.append([loss.total, loss.lm, *torch.autograd.grad(loss.total, list(model.parameters()))])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)
    assert torch.equal(results[0][0], results[1][0])


def peak_of(method, recompute):
    torch.manual_seed(0)
    config = ModelConfig(method=method, layout="1+1x6+1", d_model=16, n_heads=2, context=64, vocab_size=3001)
    model, ids = build_model(config).train(), torch.zeros(2, 64, dtype=torch.long)
    return training_peak(model, lambda: model.loss(ids, ids, model.full_depth, LoopContext(recompute=recompute)).total)


def test_peak_memory_does_not_grow_with_the_read_outs():
    grt, ouro, kept = peak_of("grt", True), peak_of("ouro", True), peak_of("ouro", False)
    assert ouro <= 1.5 * grt
    assert kept > 2 * grt, "the logits do not dominate: the bound says nothing"


@pytest.mark.parametrize(
    ("layout", "d", "n_heads", "total"),
    [
        ("1+1x10+1", 768, 12, 60_649_729),
        ("2+5x4+2", 1024, 16, 165_880_833),
        ("1+5x6+5", 1280, 20, 282_095_361),
    ],
)
def test_parameters_at_the_papers_sizes(layout, d, n_heads, total):
    config = ModelConfig(method="ouro", layout=layout, d_model=d, n_heads=n_heads)
    with torch.device("meta"):
        ouro, strict = build_model(config), build_model(replace(config, method="ladder"))
    count = cost.parameters(ouro)["total"]
    assert count - cost.parameters(strict)["total"] == d + 1
    assert count == total


def test_every_read_out_costs():
    model = build_model(ModelConfig(method="ouro", layout="1+1x4+1", d_model=16, n_heads=2, context=8, vocab_size=23))
    one, head = 24 * 16**2 + 4 * 8 * 16, 2 * 16 * 23
    assert cost.training_forward_flops(model, 4, 8) == one + 4 * (one + 2 * 16) + 4 * (one + head)


def test_all_steps_always_run():
    sampler = depth_sampler(ModelConfig(method="ouro", layout="1+1x4+1"))
    assert {sampler(0, step, slot).steps for step in range(20) for slot in range(4)} == {4}
    assert sampler.probabilities == {4: 1.0} and sampler.grad_steps is None


def test_beyond_the_trained_depth_there_is_a_warning(tiny, ids):
    model = tiny("ouro")
    with pytest.warns(UserWarning, match="depth 5 is beyond the 3 steps"):
        model.check_depth(5, least=1)
    assert model(ids, Depth(5)).isfinite().all()
