"""Mixture-of-Recursions: who is routed where, against plain loops over tokens; its losses, costs and errors.

Shapes: B batch, T tokens, d width, R steps.
"""

import math

import pytest
import torch
from test_equations import block
from torch.utils.flop_counter import FlopCounterMode

from grt.config import ConfigError, ModelConfig
from grt.evals.loss import evaluate
from grt.methods import build_model
from grt.model import cost
from grt.model.context import LoopContext
from grt.model.depth import Depth

R, T, H = 3, 12, 2
EXACT = {"rtol": 0, "atol": 1e-11}  # float64
SIZES = {"S": (768, 12, "1+1x10+1"), "M": (1024, 16, "2+5x4+2"), "L": (1280, 20, "1+5x6+5")}


@pytest.fixture
def routed(tiny):
    """A model whose scores lie on both sides of 0 at every step: two sequences keep different numbers of tokens."""

    def make(method="mor", **fields):
        return tiny(method, **{"router_scale": 0.7, "seed": 4, "spread": 0.25} | fields)

    return make


def run(model, ids, taps=None, steps=R):
    ctx = LoopContext(taps=taps or {})
    return list(model.states(ids, ctx, Depth(steps))), ctx


def recorded(model, ids):
    """Values of the taps, a list over steps each; and the rows gathered."""
    seen = {name: [] for name in ("router", "selected", "alive", "choice", "rows")}

    def keep(name):
        return lambda x, ctx: seen[name].append(x.clone())

    taps = {name: keep(name) for name in ("router", "selected", "alive", "choice")}
    taps["input"] = lambda x, ctx: seen["rows"].append(ctx.carry["rows"].clone())
    run(model, ids, taps)
    return seen


# Plain loops


def score(P, r, x):
    """One token's scores x (d) -> (n_scores)."""
    if "rule.router.up" in P:
        z = P["rule.router.up"][r] @ x
        x = 0.5 * z * (1 + torch.tanh(math.sqrt(2 / math.pi) * (z + 0.044715 * z**3)))
    return P["rule.router.down"][r] @ x


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


# Losses


def test_auxiliary_loss_by_hand(routed, ids):
    model = routed(router_loss=0.3, router_z_loss=0.2).train()
    seen = recorded(model, ids)
    want = 0.0
    for scores, chosen in zip(seen["router"], seen["selected"], strict=True):
        rows = [(s.item(), c.item()) for s, c in zip(scores.flatten(), chosen.flatten(), strict=True)]
        bce = [-math.log(1 / (1 + math.exp(-s if c else s))) for s, c in rows]
        want += 0.3 * sum(bce) / len(rows) + 0.2 * sum(s * s for s, _ in rows) / len(rows)
    loss = model.loss(ids, ids.roll(-1, 1), Depth(R))
    assert (loss.total - loss.lm).item() == pytest.approx(want, rel=1e-12)


def test_balancing_loss_by_hand(routed, ids):
    model = routed("mor-token", router_loss=0.3, router_z_loss=0.2).train()
    states, _ = run(model, ids)
    h_0, P = states[0].reshape(-1, 16), model.state_dict()
    logits = torch.stack([score(P, 0, x) for x in h_0])
    p = 0.7 * logits.softmax(-1)
    chosen = p.argmax(-1).tolist()
    want = sum(R * chosen.count(i) / 24 * p[:, i].mean().item() for i in range(R)) * 0.3
    want += 0.2 * sum(math.log(sum(math.exp(x) for x in row)) ** 2 for row in logits.tolist()) / 24
    loss = model.loss(ids, ids.roll(-1, 1), Depth(R))
    assert (loss.total - loss.lm).item() == pytest.approx(want, rel=1e-12)


@pytest.mark.parametrize("method", ["mor", "mor-token"])
def test_no_auxiliary_loss_outside_of_training(routed, ids, method):
    loss = routed(method).loss(ids, ids.roll(-1, 1), Depth(R))
    assert torch.equal(loss.total, loss.lm)


@pytest.mark.parametrize("router", ["linear", "mlp"])
@pytest.mark.parametrize("method", ["mor", "mor-token"])
def test_gradients_reach_the_routers_by_both_ways(routed, ids, method, router):
    """Through g when the routers' own loss has no weight, and through that loss alone."""
    model = routed(method, router=router, router_loss=0.0).train()
    model.loss(ids, ids.roll(-1, 1), Depth(R)).total.backward()
    for p in model.rule.router.parameters():
        assert all(each.any() for each in p.grad)
    model = routed(method, router=router, router_loss=1.0).train()
    loss = model.loss(ids, ids.roll(-1, 1), Depth(R))
    gradients = torch.autograd.grad(loss.total - loss.lm, list(model.rule.router.parameters()))
    assert all(each.any() for gradient in gradients for each in gradient)


@pytest.mark.parametrize("method", ["mor", "mor-token"])
def test_bf16_keeps_the_state_in_float32(tiny, ids, method):
    model = tiny(method, dtype=torch.float32, spread=0).train()
    with torch.autocast("cpu", torch.bfloat16):
        states, _ = run(model, ids)
        loss = model.loss(ids, ids.roll(-1, 1), Depth(R))
    assert {h.dtype for h in states} == {torch.float32}
    loss.total.backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())


# Configs and costs


@pytest.mark.parametrize("text", ["1,0.5", "1,1,1,1", "1,0.5,0.6", "1.1,0.5,0.1", "1,0.5,0", "1,0.5,-0.1", "1,half,0.1",
                                  "1,0.5,", "nan,nan,nan", "1,0.5,1e-999", ","])  # fmt: skip
def test_wrong_capacities_are_named(tiny, text):
    with pytest.raises(ConfigError) as error:
        tiny(method="mor", capacities=text)
    assert str(error.value).startswith(f"model.capacities is {text!r}: give 3 numbers") and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"router": "wide"}, "model.router is 'wide': choose linear or mlp"),
        ({"eval_routing": "best"}, "model.eval_routing is 'best': choose threshold or topk"),
        ({"router_scale": 0.0}, "model.router_scale is 0.0: it must be above 0"),
        ({"router_loss": -1.0}, "model.router_loss is -1.0: it must be at least 0"),
        ({"router_z_loss": -0.1}, "model.router_z_loss is -0.1: it must be at least 0"),
    ],
)
def test_wrong_fields_are_named(tiny, fields, message):
    with pytest.raises(ConfigError, match=message):
        tiny(method="mor", **fields)


@pytest.mark.parametrize("method", ["mor", "mor-token"])
def test_deeper_than_trained_is_refused(tiny, method):
    with pytest.raises(ConfigError, match=f"depth 4 is beyond the 3 steps of {method}: choose at most 3"):
        tiny(method).check_depth(4, least=1)


def on_meta(method, size, layout=None, **fields):
    d, n_heads, isoflop = SIZES[size]
    with torch.device("meta"):
        return build_model(ModelConfig(method=method, layout=layout or isoflop, d_model=d, n_heads=n_heads, **fields))


@pytest.mark.parametrize(
    ("size", "layout", "linear", "mlp"),
    [
        ("S", "1+1x10+1", 60.66, 72.46), ("M", "2+5x4+2", 165.88, 174.28), ("L", "1+5x6+5", 282.10, 301.77),
        ("S", "1+10x10+1", 124.45, 136.25), ("M", "2+20x4+2", 354.83, 363.22), ("L", "3+30x6+3", 774.04, 793.71),
    ],
)  # fmt: skip
def test_parameters(size, layout, linear, mlp):
    d, steps = SIZES[size][0], int(layout.split("x")[1].split("+")[0])
    strict = cost.parameters(on_meta("ladder", size, layout))["total"]
    for router, millions, one in (("linear", linear, d), ("mlp", mlp, 2 * d * d + 2 * d)):
        total = cost.parameters(on_meta("mor", size, layout, router=router))["total"]
        assert total == strict + steps * one and total / 1e6 == pytest.approx(millions, abs=0.0051)
    token = cost.parameters(on_meta("mor-token", size, layout))["total"]
    assert token == strict + steps * d
    token = cost.parameters(on_meta("mor-token", size, layout, router="mlp"))["total"]
    assert token == strict + 2 * d * d + 2 * d * steps


@pytest.mark.parametrize(("size", "ratio"), [("S", 0.60), ("M", 0.67), ("L", 0.64)])
def test_flops_against_the_layout_without_routing(size, ratio):
    plain, routed, token = (on_meta(method, size) for method in ("ladder", "mor", "mor-token"))
    steps = plain.config.blocks.R
    executed = [cost.executed_flops(model, steps, 1024) for model in (plain, routed, token)]
    assert executed[1] / executed[0] == pytest.approx(ratio, abs=0.005)
    assert executed[2] / executed[0] == pytest.approx(ratio, abs=0.005)


@pytest.mark.parametrize("method", ["mor", "mor-token"])
@pytest.mark.parametrize("fields", [{"router": "mlp"}, {"capacities": "1,0.67,0.33"}, {"eval_routing": "topk"}])
def test_counted_flops(method, fields):
    config = ModelConfig(method=method, layout="1+2x3+1", d_model=16, n_heads=2, context=64, vocab_size=23, **fields)
    with torch.device("meta"):
        model = build_model(config)
    for training in (True, False):
        for k in range(R + 1):
            with FlopCounterMode(display=False) as counter:
                model.train(training)(torch.zeros(1, 50, dtype=torch.long, device="meta"), Depth(k))
            want = 50 * (cost.executed_flops(model, k, 50) + cost.head_flops(config))
            assert counter.get_total_flops() == pytest.approx(want, rel=1e-12)


@torch.no_grad()
def test_flops_are_those_of_a_real_pass(routed, ids):
    """Top-k gathers what the closed form says. The tap is there since torch does not count a CPU's fused attention."""
    model = routed(eval_routing="topk", dtype=torch.float32)
    with FlopCounterMode(display=False) as counter:
        model(ids, ctx=LoopContext(taps={"attention": lambda p, ctx: None}))
    want = 24 * (cost.executed_flops(model, R, T) + cost.head_flops(model.config))
    assert counter.get_total_flops() == pytest.approx(want, rel=1e-12)


@pytest.mark.parametrize("method", ["mor", "mor-token"])
def test_kv_slots(method):
    model = on_meta(method, "M")
    assert model.rule.kv_slots() == {"full": 2 + 2 + 5 * 4 * 5 / 8, "first": 9}
    assert cost.kv_bytes_per_token(model) == {"full": 4 * 1024 * 33 // 2, "first": 4 * 1024 * 9}
    assert on_meta("mor", "M", capacities="1,0.5,0.25,0.25").rule.kv_slots()["full"] == 14


# Evaluation


TOKENS = [(7 * i + i // 3) % 23 for i in range(100)]


@pytest.mark.parametrize("method", ["mor", "mor-token"])
def test_evaluation_says_the_mean_depth(routed, split_of, method):
    model, split = routed(method, dtype=torch.float32), split_of(TOKENS)
    result = evaluate(model, split, batch_size=3)
    depths = []
    for w in range(8):
        ctx = run(model, torch.tensor([TOKENS[12 * w : 12 * w + 12]]))[1]
        depths += ctx.carry["depth"].flatten().tolist()
    assert len(set(depths)) > 1
    assert result.extras == {"depth": pytest.approx(sum(depths) / 96, rel=1e-6)}
    assert evaluate(model, split, depths=[1, 2, 3]).extras == pytest.approx(result.extras)
    assert evaluate(model, split, depths=[0, 1, 3]).extras == {}


def test_evaluation_by_either_routing(routed, split_of, monkeypatch):
    model, split = routed(dtype=torch.float32), split_of(TOKENS)
    threshold, topk = (evaluate(model, split, routing=routing) for routing in ("threshold", "topk"))
    assert evaluate(model, split) == threshold and model.rule.routing == "threshold"
    assert topk.extras == {"depth": pytest.approx(2.0)} and topk.loss_by_depth[3] != threshold.loss_by_depth[3]
    model.rule.routing = "topk"
    assert evaluate(model, split) == topk and evaluate(model, split, routing="threshold") == threshold
    assert model.rule.routing == "topk"
    with pytest.raises(IndexError):
        evaluate(model, split_of([23] * 13), routing="threshold")
    assert model.rule.routing == "topk"


@pytest.mark.parametrize(("method", "layout"), [("grt", "1+2x3+1"), ("ladder", "4L"), ("mor-token", "1+2x3+1")])
def test_routing_without_a_choice_is_refused(tiny, split_of, method, layout):
    name = "dense" if layout == "4L" else method
    with pytest.raises(ConfigError, match=f"routing is 'topk', but {name} has no router for it: leave it out."):
        evaluate(tiny(method, layout), split_of(TOKENS), routing="topk")


def test_what_a_rule_adds_is_averaged_over_all_tokens(tiny, split_of, monkeypatch):
    """Called with the losses of every depth that was evaluated, only where 1..R all were."""
    model = tiny(dtype=torch.float32)
    calls = []

    def evaluation(losses, ctx):
        calls.append(sorted(losses))
        assert ctx.step == R - 1 and all(x.shape == (x.shape[0], T) for x in losses.values())
        return {"gain": losses[1] - losses[3], "ones": torch.ones_like(losses[1])}

    monkeypatch.setattr(model.rule, "evaluation", evaluation)
    result = evaluate(model, split_of(TOKENS), batch_size=3)
    assert result.extras["gain"] == pytest.approx(result.loss_by_depth[1] - result.loss_by_depth[3], abs=1e-6)
    assert result.extras["ones"] == 1 and calls == [[0, 1, 2, 3]] * 3
    assert evaluate(model, split_of(TOKENS), depths=[2, 3]).extras == {} and len(calls) == 3
