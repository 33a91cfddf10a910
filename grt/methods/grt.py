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

from grt.config import ModelConfig
from grt.model.context import LoopContext
from grt.model.recurrent import UpdateRule


class Gate(nn.Module):
    """f_g: Linear 2d -> d, SiLU, Linear d -> d; `up` has columns [LN(h) | LN(h_pre)]."""

    def __init__(self, d: int) -> None:
        super().__init__()
        self.up = nn.Linear(2 * d, d)
        self.down = nn.Linear(d, d)


class GRT(UpdateRule):
    """The gated update. Both projections of [. ; h_pre] are split into halves, W [a ; b] = W_a a + W_b b: the half
    that sees only h_pre is the same at every step and is applied once a pass."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        d = config.d_model
        self.d = d
        self.tau, self.gate_bias = config.gate_temperature, config.gate_bias
        self.sigma_x, self.sigma_g = config.state_noise, config.gate_noise
        self.proj = nn.Linear(2 * d, d, bias=False)  # columns [h | h_pre]
        self.ln_state = nn.LayerNorm(d)
        self.ln_anchor = nn.LayerNorm(d)
        self.gate = Gate(d)

    def init_parameters(self) -> None:
        nn.init.constant_(self.gate.down.bias, self.gate_bias)

    def start(self, h_pre: Tensor, ctx: LoopContext) -> Tensor:
        proj_h, proj_pre = self.proj.weight.split(self.d, dim=1)
        gate_h, gate_pre = self.gate.up.weight.split(self.d, dim=1)
        ctx.carry["proj"] = proj_h, F.linear(h_pre, proj_pre)
        ctx.carry["gate"] = gate_h, F.linear(self.ln_anchor(h_pre), gate_pre, self.gate.up.bias)
        return h_pre

    def read(self, h: Tensor, h_pre: Tensor, ctx: LoopContext) -> Tensor:
        weight, from_anchor = ctx.carry["proj"]
        u = F.linear(self.noisy(h, self.sigma_x, "state_noise", ctx), weight) + from_anchor  # eq:proj
        return u.to(h.dtype)  # under autocast the core's residual stream stays as precise as the state

    def write(self, h: Tensor, o: Tensor, h_pre: Tensor, ctx: LoopContext) -> Tensor:
        weight, from_anchor = ctx.carry["gate"]
        a = self.gate.down(F.silu(F.linear(self.ln_state(h), weight) + from_anchor))
        a = a.to(h.dtype) if self.tau == 1 else a.to(h.dtype) / self.tau  # a division by one still reads all of a
        a = self.noisy(a, self.sigma_g, "gate_noise", ctx)
        g = ctx.tap("gate", torch.sigmoid(a))  # eq:gate
        return torch.lerp(o, h, g)  # eq:gate_update: o + g (h - o), exact at g = 0 and g = 1

    def noisy(self, x: Tensor, sigma: float, name: str, ctx: LoopContext) -> Tensor:
        if not self.training or sigma == 0:
            return x
        return x + ctx.tap(name, torch.empty_like(x).normal_(0, sigma))

    def flops(self, steps: int) -> int:
        # 4 d^2 for the anchor halves, once; 2 d^2 each for the state halves and the gate's second layer, per step.
        return (4 + 6 * steps) * self.d**2
