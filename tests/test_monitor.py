"""Monitors of the methods beside GRT, counted by hand (GRT's are in test_train.py).

Shapes: B batch, T tokens, R steps.
"""

import math

import pytest
import torch
from torch.nn import functional as F

from grt.backbone.context import LoopContext
from grt.methods.ouro import exit_distribution
from grt.model.depth import Depth
from grt.train.monitor import monitor, warnings_for


def entropy(*p: float) -> float:
    return -sum(x * math.log(x) for x in p if x > 0)


def tapped(model, ids, *names):
    """What each tap shows at each step of a pass, with the states."""
    kept = {name: [] for name in names}
    taps = {name: lambda x, ctx, name=name: kept[name].append(x.clone()) for name in names}
    states = list(model.states(ids, LoopContext(taps=taps), Depth(3)))
    return kept, states


def test_routers_of_expert_choice(tiny, ids):
    model = tiny("mor", dtype=torch.float32).train()
    found = monitor(model, ids, torch.float32)
    kept, _ = tapped(model, ids, "router", "selected")
    for r in range(3):
        scores, chosen = kept["router"][r].flatten().tolist(), kept["selected"][r].flatten().tolist()
        right = [(s >= 0) == c for s, c in zip(scores, chosen, strict=True)]
        uncertain = [entropy(p, 1 - p) for p in (1 / (1 + math.exp(-s)) for s in scores)]
        assert found["router_accuracy"][r] == pytest.approx(sum(right) / len(right))
        assert found["router_entropy"][r] == pytest.approx(sum(uncertain) / len(uncertain), rel=1e-5)
    alive = tapped(model.eval(), ids, "alive")[0]["alive"]
    assert found["alive_share"] == [pytest.approx(a.float().mean().item()) for a in alive]
    assert found["alive_share"][0] == 1 and found["alive_share"] == sorted(found["alive_share"], reverse=True)


def test_the_router_of_token_choice(tiny, ids):
    model = tiny("mor-token", dtype=torch.float32).train()
    found = monitor(model, ids, torch.float32)
    choice = tapped(model, ids, "choice")[0]["choice"][0].flatten(0, 1)
    rows = [entropy(*(row / row.sum()).tolist()) for row in choice]
    assert found["router_entropy"] == [pytest.approx(sum(rows) / len(rows), rel=1e-5)]
    depth = 1 + choice.argmax(-1)
    assert found["alive_share"] == [pytest.approx((depth > r).float().mean().item()) for r in range(3)]


def test_a_step_that_nobody_reaches_is_a_warning(tiny, ids):
    model, few = tiny("mor", dtype=torch.float32).train(), ids[:1, :8]
    after_one = tapped(model.eval(), few)[1][1][0]  # (8, 16): a router can say -1 to each of 8 tokens
    with torch.no_grad():
        model.rule.router.down[1, 0] = torch.linalg.pinv(after_one) @ -torch.ones(8)
    found = monitor(model.train(), few, torch.float32)
    assert found["alive_share"] == [1.0, 0.0, 0.0]
    told = warnings_for({0: 3.0, 1: 2.0, 3: 1.0}, found)
    assert told == ["no token reaches step 2: its router stops all that are left"]


def test_exits(tiny, ids):
    model = tiny("ouro", dtype=torch.float32)
    found = monitor(model, ids, torch.float32)
    p = exit_distribution(tapped(model, ids, "exit")[0]["exit"])
    assert found["exit_share"] == [pytest.approx(share.mean().item(), rel=1e-5) for share in p]
    assert sum(found["exit_share"]) == pytest.approx(1, rel=1e-5)


@pytest.mark.parametrize("method", ["poisson", "huginn", "rrt", "mor", "ouro", "ladder"])
def test_change_and_correlation(tiny, ids, method):
    model = tiny(method, dtype=torch.float32)
    found = monitor(model, ids, torch.float32)
    _, states = tapped(model, ids)
    for r in range(3):
        old, new = states[r], states[r + 1]
        change = ((new - old).norm(dim=-1) / new.norm(dim=-1)).mean().item()
        pairs = [F.cosine_similarity(row[i], row[j], dim=0).item() for row in new for i in range(12) for j in range(i)]
        assert found["state_change"][r] == pytest.approx(change, rel=1e-5)
        assert found["token_correlation"][r] == pytest.approx(sum(pairs) / len(pairs), rel=1e-4, abs=1e-6)


def test_states_that_point_one_way(tiny, ids):
    model = tiny("ladder", dtype=torch.float32)
    with torch.no_grad():
        model.core[-1].mlp.down.bias += 1e4
    found = monitor(model, ids, torch.float32)
    assert found["token_correlation"][0] > 0.999
    told = warnings_for({0: 3.0, 1: 2.0, 3: 1.0}, found)
    assert told == ["the states of all tokens point in one direction after step 1 (cosine 1.000)"]
