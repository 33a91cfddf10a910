"""Auxiliary losses of Mixture-of-Recursions, their gradients, and what an evaluation says of its depths."""

import math

import pytest
import torch
from routes import R, T, recorded, run, score

from grt.errors import ConfigError
from grt.evals.loss import evaluate
from grt.model.depth import Depth


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
