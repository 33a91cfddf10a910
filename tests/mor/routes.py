"""What the tests of Mixture-of-Recursions share: sizes, a pass, and what a pass did."""

import math

import torch

from grt.backbone.context import LoopContext
from grt.model.depth import Depth

R, T, H = 3, 12, 2
EXACT = {"rtol": 0, "atol": 1e-11}  # float64
SIZES = {"S": (768, 12, "1+1x10+1"), "M": (1024, 16, "2+5x4+2"), "L": (1280, 20, "1+5x6+5")}


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


def score(P, r, x):
    """One token's scores x (d) -> (n_scores)."""
    if "rule.router.up" in P:
        z = P["rule.router.up"][r] @ x
        x = 0.5 * z * (1 + torch.tanh(math.sqrt(2 / math.pi) * (z + 0.044715 * z**3)))
    return P["rule.router.down"][r] @ x
