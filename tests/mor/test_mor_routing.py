"""Mixture-of-Recursions: who is routed where, against plain loops over tokens.

Shapes: B batch, T tokens, d width, R steps.
"""

import math

import pytest
import torch
from routes import EXACT, H, R, T, recorded, run, score
from test_equations import block

from grt.backbone.context import LoopContext

# Plain loops


def core(P, h, active):
    """f for some tokens of one sequence, which attend to one another; position -> (d)."""
    if not active:
        return {}
    x = torch.stack([h[t] for t in active])[None]
    for i in range(2):
        x = block(P, f"core.{i}", x, H)
    return dict(zip(active, x[0], strict=True))


def expert_by_hand(P, h_0, alpha, topk):
    """States h_0..h_R (T, d) of one sequence and A_1..A_R."""
    h, active = list(h_0), list(range(T))
    states, sets = [h_0], []
    for r in range(R):
        s = {t: score(P, r, h[t]).item() for t in active}
        if topk:
            best = sorted(active, key=lambda t: (-s[t], t))[: max(1, (R - r) * T // R)]
            active = [t for t in range(T) if t in best]
        elif r > 0:
            active = [t for t in active if s[t] >= 0]
        for t, f in core(P, h, active).items():
            h[t] = h[t] + alpha / (1 + math.exp(-s[t])) * f
        states.append(torch.stack(h))
        sets.append(active)
    return states, sets


def token_by_hand(P, h_0, alpha):
    h, states, sets = list(h_0), [h_0], []
    p = [alpha * score(P, 0, x).softmax(-1) for x in h_0]
    depth = [int(x.argmax()) + 1 for x in p]
    for r in range(1, R + 1):
        active = [t for t in range(T) if depth[t] >= r]
        for t, f in core(P, h, active).items():
            h[t] = h_0[t] + p[t][r - 1] * f if depth[t] == r else f
        states.append(torch.stack(h))
        sets.append(active)
    return states, sets


@torch.no_grad()
@pytest.mark.parametrize("router", ["linear", "mlp"])
@pytest.mark.parametrize("mode", ["training", "topk", "threshold"])
def test_expert_choice_is_the_plain_loop(routed, ids, mode, router):
    model = routed(router=router, eval_routing="threshold" if mode == "threshold" else "topk")
    model.train(mode == "training")
    states, ctx = run(model, ids)
    alive = recorded(model, ids)["alive"]
    for b in range(2):
        want, sets = expert_by_hand(model.state_dict(), states[0][b], 0.7, topk=mode != "threshold")
        for got, state in zip(states, want, strict=True):
            torch.testing.assert_close(got[b], state, **EXACT)
        assert [x[b].nonzero().flatten().tolist() for x in alive] == sets
        assert ctx.carry["depth"][b].tolist() == [sum(t in active for active in sets) for t in range(T)]
    counts = [x.sum(1).tolist() for x in alive]
    if mode == "threshold" and router == "linear":
        assert any(a != b for a, b in counts) and 0 < max(counts[-1]) < T, "nothing is padded: choose another seed"


@torch.no_grad()
@pytest.mark.parametrize("router", ["linear", "mlp"])
@pytest.mark.parametrize("training", [True, False])
def test_token_choice_is_the_plain_loop(routed, ids, training, router):
    model = routed("mor-token", router=router).train(training)
    states, ctx = run(model, ids)
    alive = recorded(model, ids)["alive"]
    for b in range(2):
        want, sets = token_by_hand(model.state_dict(), states[0][b], 0.7)
        for got, state in zip(states, want, strict=True):
            torch.testing.assert_close(got[b], state, **EXACT)
        assert [x[b].nonzero().flatten().tolist() for x in alive] == sets
        assert ctx.carry["depth"][b].tolist() == [sum(t in active for active in sets) for t in range(T)]
    counts = [x.sum(1).tolist() for x in alive]
    assert counts[0] == [T, T] and any(a != b for a, b in counts) and 0 < max(counts[-1]) < T


# Who goes on


@pytest.mark.parametrize("training", [True, False])
def test_capacities_nest_and_are_ascending(routed, ids, training):
    model = routed(eval_routing="topk").train(training)
    seen = recorded(model, ids)
    assert [rows.shape for rows in seen["rows"]] == [(2, 12), (2, 8), (2, 4)]
    assert [x.shape for x in seen["router"]] == [(2, 12), (2, 12), (2, 8)]
    for rows in seen["rows"]:
        assert (rows.diff(dim=1) > 0).all()
    for before, after in zip(seen["alive"], seen["alive"][1:], strict=False):
        assert not (after & ~before).any()
    assert [x.sum(1).tolist() for x in seen["alive"]] == [[12, 12], [8, 8], [4, 4]]
    assert [x.sum(1).tolist() for x in seen["selected"]] == [[12, 12], [8, 8], [4, 4]]
    for scores, chosen in zip(seen["router"], seen["selected"], strict=True):
        for s, c in zip(scores, chosen, strict=True):
            assert c.all() or s[c].min() > s[~c].max()


def test_threshold_pads_the_shorter_sequence(routed, ids):
    seen = recorded(routed(), ids)
    for step in range(R):
        real = seen["router"][step].isfinite()
        before = seen["alive"][step - 1] if step else torch.ones(2, T, dtype=torch.bool)
        assert real.sum(1).tolist() == before.sum(1).tolist()
        want = (seen["router"][step] >= 0) if step else real
        assert torch.equal(seen["selected"][step], want) and not (seen["selected"][step] & ~real).any()
        rows, n = seen["rows"][step], seen["alive"][step].sum(1)
        assert rows.shape[1] == n.max()
        for b in range(2):  # the active rows first and ascending, then others
            assert rows[b, : n[b]].tolist() == seen["alive"][step][b].nonzero().flatten().tolist()
            assert len(set(rows[b].tolist())) == rows.shape[1]


def test_ties_go_to_the_earlier_token(routed):
    model = routed(eval_routing="topk", context=90)
    seen = []
    taps = {"router": lambda s, ctx: torch.zeros_like(s), "alive": lambda x, ctx: seen.append(x.clone())}
    run(model, torch.zeros(1, 90, dtype=torch.long), taps)
    assert [x[0].nonzero().flatten().tolist() for x in seen] == [list(range(k)) for k in (90, 60, 30)]


def test_a_score_of_zero_goes_on(routed, ids):
    _, ctx = run(routed(), ids, {"router": lambda s, ctx: torch.zeros_like(s)})
    assert (ctx.carry["depth"] == R).all()


@torch.no_grad()
def test_permuted_future_tokens(routed, ids):
    """They leave past logits alone under the threshold, and do not under top-k."""
    model = routed()
    order = torch.cat([torch.arange(6), torch.tensor([9, 11, 6, 10, 8, 7])])
    torch.testing.assert_close(model(ids[:, order])[:, :6], model(ids)[:, :6], **EXACT)
    model.rule.routing = "topk"
    assert (model(ids[:, order])[:, :6] - model(ids)[:, :6]).abs().max() > 1e-3


@torch.no_grad()
@pytest.mark.parametrize("method", ["mor", "mor-token"])
def test_a_growing_prefix_has_the_depths_of_the_sequence(routed, ids, method):
    model = routed(method)
    states, ctx = run(model, ids)
    depth = ctx.carry["depth"]
    assert len(set(depth.flatten().tolist())) == R, "too few depths: choose another seed"
    for n in range(1, T + 1):
        for b in range(2):
            prefix, own = run(model, ids[b : b + 1, :n])
            assert torch.equal(own.carry["depth"][0], depth[b, :n])
            torch.testing.assert_close(prefix[-1][0], states[-1][b, :n], **EXACT)


@torch.no_grad()
@pytest.mark.parametrize("method", ["mor", "mor-token"])
def test_padding_never_leaks(routed, ids, method):
    """A sequence alone, and beside one that keeps more or fewer tokens; and whatever padding rows compute."""
    model = routed(method)
    together, ctx = run(model, ids)
    for b in range(2):
        alone, own = run(model, ids[b : b + 1])
        for x, y in zip(together, alone, strict=True):
            torch.testing.assert_close(x[b], y[0], **EXACT)
        assert torch.equal(own.carry["depth"][0], ctx.carry["depth"][b])
    padded = []

    def spoil(x, ctx):
        padding = ~ctx.carry["real"][..., None]
        padded.append(padding.any().item())
        return x.masked_fill(padding, 1e6)

    for name in ("input", "proposal"):
        spoiled, _ = run(model, ids, {name: spoil})
        for x, y in zip(spoiled, together, strict=True):
            torch.testing.assert_close(x, y, **EXACT)
    assert any(padded)


@torch.no_grad()
def test_no_token_left(routed, ids):
    """Nobody goes on after step 1: the state stays, in one sequence or in all."""
    model = routed()
    seen = []
    taps = {
        "attention": lambda p, ctx: seen.append((ctx.section, ctx.step)),
        "router": lambda s, ctx: s - 1e3 * (ctx.step > 0),
    }
    states, ctx = run(model, ids, taps)
    assert not torch.equal(states[0], states[1])
    assert torch.equal(states[1], states[2]) and torch.equal(states[2], states[3])
    assert (ctx.carry["depth"] == 1).all() and ctx.carry["rows"].shape == (2, 0)
    assert [step for section, step in seen if section == "core"] == [0, 0]
    assert model(ids, ctx=LoopContext(taps=taps)).isfinite().all()
    one = torch.tensor([[1e3], [0.0]])
    states, ctx = run(model, ids, {"router": lambda s, ctx: s - one * (ctx.step > 0)})
    plain, _ = run(model, ids)
    assert torch.equal(states[1][0], states[3][0])
    torch.testing.assert_close(states[3][1], plain[3][1], **EXACT)


def test_no_token_chooses_a_deeper_step(routed, ids):
    model = routed("mor-token").train()
    taps = {"choice": lambda p, ctx: p * torch.tensor([1e3, 1.0, 1.0])}
    states, ctx = run(model, ids, taps)
    assert (ctx.carry["depth"] == 1).all() and torch.equal(states[1], states[3])


@torch.no_grad()
def test_with_all_tokens_and_full_weight_it_is_h_plus_core_of_h(routed, ids):
    model = routed(capacities="1,1,1", router_scale=1.0, eval_routing="topk")
    states, _ = run(model, ids, {"router": lambda s, ctx: torch.full_like(s, 100.0)})
    h = states[0]
    for state in states[1:]:
        h = h + model.core(h, LoopContext())
        torch.testing.assert_close(state, h, **EXACT)


@torch.no_grad()
def test_capacities_of_the_config(routed, ids):
    """Exact shares: 0.29 of 100 tokens are 29, which a product of floats rounds down to 28; and never no token."""
    assert int(0.29 * 100) == 28
    model = routed(capacities="1, 0.29,0.29")
    assert [model.rule.capacity(r, 100) for r in range(R)] == [100, 29, 29]
    assert [model.rule.capacity(r, 1) for r in range(R)] == [1, 1, 1]
    assert [x.sum(1).tolist() for x in recorded(model.train(), ids)["alive"]] == [[12, 12], [3, 3], [3, 3]]
    tenths = routed(layout="1+1x10+1").rule
    assert [tenths.capacity(r, 1000) for r in range(10)] == list(range(1000, 0, -100))
    assert [tenths.capacity(r, 1024) for r in range(10)] == [1024, 921, 819, 716, 614, 512, 409, 307, 204, 102]
