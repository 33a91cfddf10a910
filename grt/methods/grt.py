"""Gated Recurrent Transformer (the paper, sec:method).

    u   = W_proj [h + eps_x ; h_pre]                                              eq:proj
    o   = B_shared(u)                                                             eq:block
    g   = sigmoid(f_g([LN(h) ; LN(h_pre)]) / tau + eps_g)                         eq:gate
    h'  = g * h + (1 - g) * o                                                     eq:gate_update

g is always the fraction that is *copied*. Noise is drawn afresh at every step, in training only. Where the paper
leaves a choice: h_0 = h_pre, two LayerNorms, W_proj without bias.

Shapes: B batch, T tokens, d width.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from grt.backbone.context import LoopContext
from grt.backbone.split_linear import anchor, anchored
from grt.config import ModelConfig
from grt.model.rule import UpdateRule


def noisy(x: Tensor, sigma: float, name: str, ctx: LoopContext) -> Tensor:
    """x plus fresh noise of standard deviation sigma, for training."""
    return x + ctx.tap(name, torch.empty_like(x).normal_(0, sigma)) if sigma else x


class Reinjection(UpdateRule):
    """eq:proj: the core reads the noisy state together with the anchor h_pre. Its output is the next state.

    Of the projection of [h ; h_pre], the half that sees only h_pre is applied once a pass
    (grt/backbone/split_linear.py).
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.sigma_x = config.state_noise
        self.proj = nn.Linear(2 * self.d, self.d, bias=False)  # columns [h | h_pre]

    def start(self, h_pre: Tensor, ctx: LoopContext) -> Tensor:
        anchor("proj", self.proj, h_pre, ctx)
        return h_pre

    def read(self, h: Tensor, h_pre: Tensor, ctx: LoopContext) -> Tensor:
        noisy_h = noisy(h, self.sigma_x, "state_noise", ctx) if self.training else h
        u = anchored("proj", self.proj, noisy_h, ctx)  # eq:proj
        return u.to(h.dtype)  # under autocast the core's residual stream stays as precise as the state

    def flops(self, steps: int, tokens: int) -> int:
        # 2 d^2 for the anchor's half, once; 2 d^2 for the state's half, per step.
        return super().flops(steps, tokens) + tokens * 2 * (1 + steps) * self.d**2


class Gate(nn.Module):
    """f_g: Linear 2d -> d, SiLU, Linear d -> d; `up` has columns [LN(h) | LN(h_pre)], split into halves as the
    projection is."""

    def __init__(self, d: int) -> None:
        super().__init__()
        self.up = nn.Linear(2 * d, d)
        self.down = nn.Linear(d, d)

    def forward(self, h: Tensor, norm: nn.LayerNorm, ctx: LoopContext) -> Tensor:  # (B, T, d) -> (B, T, d)
        return self.down(F.silu(anchored("gate", self.up, norm(h), ctx)))


class GRT(Reinjection):
    """The gated update."""

    weights_depend_on = ("gate_temperature",)

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.tau, self.gate_bias, self.sigma_g = config.gate_temperature, config.gate_bias, config.gate_noise
        self.ln_state = nn.LayerNorm(self.d)
        self.ln_anchor = nn.LayerNorm(self.d)
        self.gate = Gate(self.d)

    def init_parameters(self, model: nn.Module) -> None:
        nn.init.constant_(self.gate.down.bias, self.gate_bias)

    def start(self, h_pre: Tensor, ctx: LoopContext) -> Tensor:
        anchor("gate", self.gate.up, self.ln_anchor(h_pre), ctx)
        return super().start(h_pre, ctx)

    def write(self, h: Tensor, o: Tensor, h_pre: Tensor, ctx: LoopContext) -> Tensor:
        a = self.gate(h, self.ln_state, ctx)
        a = a.to(h.dtype) if self.tau == 1 else a.to(h.dtype) / self.tau  # a division by one still reads all of a
        a = noisy(a, self.sigma_g, "gate_noise", ctx) if self.training else a
        g = ctx.tap("gate", torch.sigmoid(a))  # eq:gate
        return torch.lerp(o, h, g)  # eq:gate_update: o + g (h - o), exact at g = 0 and g = 1

    def flops(self, steps: int, tokens: int) -> int:
        # 2 d^2 for the anchor's half, once; 2 d^2 each for the state's half and the second layer, per step.
        return super().flops(steps, tokens) + tokens * 2 * (1 + 2 * steps) * self.d**2
