"""Ouro, the looped language model that learns how deep to go (arXiv 2510.25741).

    h_t = ln_f(B(h_{t-1})),  h_0 = h_pre;   lambda_t = sigmoid(w . h_t + b)
    S_t = prod_{j<=t} (1 - lambda_j);   p_t = lambda_t S_{t-1} for t < R,   p_R = S_{R-1}
    stage 1:  mean over tokens of  sum_t p_t CE_t - beta H(p)
    stage 2:  mean over tokens of  1/R sum_{t>=2} BCE(1 - lambda_t; sigmoid(k (I_t - gamma))),
              I_t = max(0, CE_{t-1} - CE_t), the gate alone being trained

w and b, one gate for all steps, start at zero (the paper does not say). The norm in the loop is the model's final one,
as in the authors' code; with loop_carry "raw" it only stands before the gate. Gain and gate have the index that the
paper gives them, so that a token goes on where its last step paid: lambda_1 has no label of its own, and lambda_R,
which decides no exit, has one.

Departures: the paper has no coda. Here one is part of every step's read-out, CE_t = CE(head(ln_f(coda(h_t)))), as it
would have no role otherwise; so that a state is normed once more on its way out. The blocks are GPT-2's, without the
original's norms behind attention and MLP; the loop starts from the prelude instead of the embedding. A pass of fewer
than R steps has its distribution over those. The loss is the expectation that the paper defines, where the authors'
released code reads out expected logits.

Shapes: B batch, T tokens, d width, R steps.
"""

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from grt.backbone.context import LoopContext
from grt.config import ModelConfig
from grt.errors import ConfigError
from grt.model.rule import CrossEntropy, Loss, UpdateRule

SMALLEST = 1e-8  # a probability below it counts as this in a logarithm
SHARPNESS, ENOUGH = 50.0, 0.005  # k and gamma, in nats: the paper's values for stage 2
QUANTILES = (0.1, 0.3, 0.5, 0.7, 0.9)  # q of the exits that an evaluation compares


def log(p: Tensor) -> Tensor:
    return p.clamp_min(SMALLEST).log()


def exit_distribution(lambdas: Sequence[Tensor] | Tensor) -> Tensor:
    """p_1..p_R (R, B, T), which sum to one, from lambda_1..lambda_R, each (B, T).

    lambda_R has no part in it; it enters times zero, so that the gate has a gradient even where R is 1.
    """
    S, p = torch.ones_like(lambdas[0]), []
    for lambda_t in lambdas[:-1]:
        p.append(lambda_t * S)
        S = S * (1 - lambda_t)
    return torch.stack([*p, S + 0 * lambdas[-1]])


def exit_step(p: Tensor, q: float) -> Tensor:
    """The first step t, counted from one, where p_1 + ... + p_t >= q: (R, B, T) -> (B, T). q = 1 asks for every step,
    however the sum is rounded."""
    goes_on = (p.cumsum(0) < q) | (q >= 1)
    return 1 + goes_on[:-1].sum(0)


class Ouro(UpdateRule):
    """Plain weight tying with a norm in the loop, a read-out of every step and a learned exit."""

    reads_out_often = True
    learned_exit = True
    second_stage = ("rule.gate",)
    weights_depend_on = ("loop_carry",)

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        if config.exit_beta < 0:
            raise ConfigError(f"model.exit_beta is {config.exit_beta}: it must be at least 0.")
        self.beta, self.normed = config.exit_beta, config.loop_carry == "normed"
        self.gate = nn.Linear(self.d, 1)

    def init_parameters(self, model: nn.Module) -> None:
        nn.init.zeros_(self.gate.weight)  # lambda = 1/2 everywhere

    def start(self, h_pre: Tensor, ctx: LoopContext) -> Tensor:
        ctx.carry["exit"] = []
        return h_pre

    def write(self, h: Tensor, o: Tensor, h_pre: Tensor, ctx: LoopContext) -> Tensor:
        assert ctx.norm is not None
        z = ctx.norm(o)
        a = self.gate(z).squeeze(-1).to(o.dtype)  # products of (1 - lambda) want more than bf16's three digits
        ctx.carry["exit"].append(ctx.tap("exit", torch.sigmoid(a)))  # (B, T)
        return z if self.normed else o

    def exit_probability(self, ctx: LoopContext) -> Tensor:
        return ctx.carry["exit"][-1]

    def loss(self, states: Iterator[Tensor], ce: CrossEntropy, ctx: LoopContext) -> Loss:
        next(states)  # h_0 is no exit
        losses = torch.stack([ce(h) for h in states])  # (R, B, T)
        p = exit_distribution(ctx.carry["exit"])
        entropy = -(p * log(p)).sum(0)
        return Loss(((p * losses).sum(0) - self.beta * entropy).mean(), losses[-1].mean())

    def second_loss(self, states: Iterator[Tensor], ce: CrossEntropy, ctx: LoopContext) -> Loss:
        next(states)
        losses = []
        for h in states:
            with torch.no_grad():
                losses.append(ce(h))
        assert len(losses) > 1, "one step leaves no choice"
        total = torch.zeros_like(losses[0])
        for t, lambda_t in enumerate(ctx.carry["exit"][1:], 1):
            w = torch.sigmoid(SHARPNESS * ((losses[t - 1] - losses[t]).clamp_min(0) - ENOUGH))  # whether this step paid
            total = total - w * log(1 - lambda_t) - (1 - w) * log(lambda_t)
        return Loss(total.mean() / len(losses), losses[-1].mean())

    def evaluation(self, losses: Mapping[int, Tensor], ctx: LoopContext) -> dict[str, Tensor]:
        R = self.layout.R
        p = exit_distribution(ctx.carry["exit"][:R])
        each = torch.stack([losses[t] for t in range(1, R + 1)])  # (R, B, T)
        numbers = {"expected_loss": (p * each).sum(0)}
        for q in QUANTILES:
            t = exit_step(p, q)
            numbers[f"loss at q={q}"] = each.gather(0, t[None] - 1)[0]
            numbers[f"depth at q={q}"] = t.to(p.dtype)
        return numbers

    def flops(self, steps: int, tokens: int) -> int:
        return super().flops(steps, tokens) + tokens * steps * 2 * self.d  # the gate

    def readout_flops(self, steps: int, one: int) -> int:
        return steps * one
