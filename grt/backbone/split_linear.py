"""A linear W of two inputs [a ; b] side by side, of which b is the same at every step: W [a ; b] = W_a a + W_b b, and
the half that sees only b is applied once a pass. Whatever stands in the place of a plain linear, an adapter or weights
of another library, is called as it is, on both.

Shapes: B batch, T tokens, d width of b.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from grt.backbone.context import LoopContext


def anchor(name: str, linear: nn.Module, b: Tensor, ctx: LoopContext) -> None:
    """At the start of a pass: what `anchored` of this name takes from b (B, T, d)."""
    if type(linear) is nn.Linear:
        ctx.carry[name], W_b = linear.weight.split(b.shape[-1], dim=1)
        ctx.of_tokens[name] = F.linear(b, W_b, linear.bias)
    else:
        ctx.carry[name], ctx.of_tokens[name] = None, b


def anchored(name: str, linear: nn.Module, a: Tensor, ctx: LoopContext) -> Tensor:
    """W [a ; b] for a (B, T, d), at each step."""
    W_a, from_b = ctx.carry[name], ctx.of_tokens[name]
    return linear(torch.cat((a, from_b), -1)) if W_a is None else F.linear(a, W_a) + from_b
