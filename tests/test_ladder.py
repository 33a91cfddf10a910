"""The rows of the paper's component ablation: each adds one thing to the row above it (tab:ablation_ladder_2k)."""

from itertools import pairwise

import torch

from grt.backbone.context import LoopContext
from grt.methods import METHODS
from grt.model.depth import Depth
from grt.model.rule import UpdateRule
from grt.presets import preset

NOISE = {"state_noise": 0.3}


def states_of(model, ids, taps=None, seed=0):
    torch.manual_seed(seed)
    return list(model.states(ids, LoopContext(taps=taps or {}), Depth(3)))


def drawn(model, ids, name="state_noise"):
    """The noise of each step, as a run with the same seed draws it."""
    kept = []
    states_of(model, ids, {name: lambda eps, ctx: kept.append(eps.clone())})
    return kept


def test_rows_2_and_3_are_the_base_rule(tiny, ids):
    """h' = B(h): they differ in their layout only."""
    assert METHODS["ladder"].rule is UpdateRule
    core, ends = preset("ladder-core-nano").model, preset("ladder-nano").model
    assert core.method == ends.method == "ladder"
    assert (core.blocks.p, core.blocks.c) == (0, 0) and ends.blocks.p and ends.blocks.c
    assert core.blocks.n_executions() == ends.blocks.n_executions() == preset("grt-nano").model.blocks.n_executions()
    for layout in ("1+2x3+1", "0+2x3+0"):
        model = tiny("ladder", layout)
        h = model.prelude(model.embed(ids), LoopContext())
        want = [h]
        for _ in range(3):
            h = model.core(h, LoopContext())
            want.append(h)
        assert all(map(torch.equal, states_of(model, ids), want))


def test_row_4_adds_noise_to_what_the_core_reads(tiny, ids):
    model, plain = tiny("ladder-noise", **NOISE), tiny("ladder")
    assert all(map(torch.equal, states_of(model, ids), states_of(plain, ids))), "noise outside of training"
    model.train()
    eps = drawn(model, ids)
    torch.manual_seed(0)
    want = [torch.empty(2, 12, 16, dtype=torch.float64).normal_(0, 0.3) for _ in range(3)]
    assert len(eps) == 3 and all(map(torch.equal, eps, want))
    h = states_of(plain, ids)[0]
    for state, noise in zip(states_of(model, ids)[1:], eps, strict=True):
        h = plain.core(h + noise, LoopContext())
        assert torch.equal(state, h)


def test_row_5_reads_the_anchor_again(tiny, ids):
    model = tiny("ladder-inject", **NOISE).train()
    eps = drawn(model, ids)
    h = h_pre = states_of(model, ids)[0]
    for state, noise in zip(states_of(model, ids)[1:], eps, strict=True):
        h = model.core(torch.cat([h + noise, h_pre], -1) @ model.rule.proj.weight.T, LoopContext())  # eq:proj
        torch.testing.assert_close(state, h, rtol=0, atol=1e-11)


def test_row_6_with_its_gate_at_zero_is_row_5(tiny, ids):
    gated, row_5 = tiny("grt"), tiny("ladder-inject")
    shared = {name: x for name, x in gated.state_dict().items() if name in row_5.state_dict()}
    row_5.load_state_dict(shared)
    for state, want in zip(
        states_of(gated, ids, {"gate": lambda g, ctx: torch.zeros_like(g)}), states_of(row_5, ids), strict=True
    ):
        assert torch.equal(state, want)
    assert gated.state_dict().keys() - shared.keys() == {
        f"rule.{name}.{kind}"
        for name in ("ln_state", "ln_anchor", "gate.up", "gate.down")
        for kind in ("weight", "bias")
    }


def test_each_row_costs_what_it_adds(tiny):
    d, tokens = 16, 12
    flops = [tiny(method).rule.flops(3, tokens) for method in ("ladder", "ladder-noise", "ladder-inject", "grt")]
    inject, gate = 2 * d * d * (1 + 3), 2 * d * d * (1 + 3) + 2 * d * d * 3
    assert [b - a for a, b in pairwise(flops)] == [0, tokens * inject, tokens * gate]
