"""Mixture-of-Recursions (arXiv 2507.10524): a router decides how many steps of the core each token takes.

Expert choice (`mor`), r = 1..R, A_0 = all tokens, f the core with its residuals inside:

    s = theta_r . h                              for the tokens of A_{r-1}
    A_r = the k_r largest s, k_r = max(1, floor(c_r T)), c_r = (R - r + 1) / R
    h' = h + alpha sigmoid(s) f(h)               for the tokens of A_r, which attend to one another alone

with the auxiliary loss w sum_r mean BCE(s, 1[t in A_r]), so that s >= 0 comes to mean "goes on". The best of a sequence
are known only at its end: outside of training a token goes on while s >= 0 (`threshold`, causal; all take step 1),
unless `routing` is `topk`, which the released code evaluates with and which leaks later tokens.

Token choice (`mor-token`): p = alpha softmax(Theta h_0), i = argmax p, and the token takes i steps: h' = f(h), except
that its last one gives h_0 + p_i f(h) (as in the released code; the paper's equation has the factor at each step). So
h_k is final where i <= k and f^k(h_0) elsewhere. Its loss: w sum_i f_i P_i, f_i = (R/T) count of i, P_i the mean p_i.

Departures from the original: GPT-2's learned positions (nothing to gather), ties go to the earlier token, one stacked
tensor for the routers of all steps (none unused in a shallow pass).

Only active rows are computed: each sequence's, ascending, then inactive ones up to the longest of the batch, which no
active row sees and which change nothing. So the "attention" tap shows K x K among the K rows gathered, and K may depend
on later tokens: past logits then keep their values, but not always their last bits. On the meta device no score has a
value: there capacities decide, and the depths of `mor-token` count as evenly spread.

Shapes: B batch, T tokens, d width, K gathered rows, R steps.
"""

import math
from collections.abc import Mapping
from fractions import Fraction

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from grt.backbone.block import Stack, block_flops
from grt.backbone.context import LoopContext
from grt.cache.kv import KVCache
from grt.cache.routed import RoutedSteps
from grt.config import ModelConfig
from grt.errors import ConfigError
from grt.model.rule import UpdateRule
from grt.schema import at_least


def shares_of(config: ModelConfig) -> list[Fraction]:
    """c_1..c_R, exactly: 0.29 of 100 tokens are 29, which floats would round down to 28."""
    R, text = config.blocks.R, config.capacities
    if not text:
        return [Fraction(R - r, R) for r in range(R)]
    try:
        shares = [float(share) for share in text.split(",")]
    except ValueError:
        shares = []
    if len(shares) != R or not all(0 < c <= 1 for c in shares) or shares != sorted(shares, reverse=True):
        raise ConfigError(
            f"model.capacities is {text!r}: give {R} numbers above 0 and up to 1, none larger than the one before it."
        )
    return [Fraction(str(c)) for c in shares]


def take(h: Tensor, rows: Tensor) -> Tensor:
    """Rows (B, K) of h (B, T, d)."""
    return h.gather(1, rows[..., None].expand(-1, -1, h.shape[-1]))


class Router(nn.Module):
    """`n` routers without bias, each d -> n_scores, or d -> 2d -> n_scores with a GELU between (`mlp`)."""

    def __init__(self, kind: str, n: int, d: int, n_scores: int) -> None:
        super().__init__()
        if kind not in ("linear", "mlp"):
            raise ConfigError(f"model.router is {kind!r}: choose linear or mlp.")
        self.up = nn.Parameter(torch.empty(n, 2 * d, d)) if kind == "mlp" else None
        self.down = nn.Parameter(torch.empty(n, n_scores, d if self.up is None else 2 * d))

    def forward(self, x: Tensor, i: int) -> Tensor:
        if self.up is not None:
            x = F.gelu(F.linear(x, self.up[i]), approximate="tanh")
        return F.linear(x, self.down[i]).to(x.dtype)

    @property
    def flops(self) -> int:
        """Of one router, per token."""
        return 2 * sum(p[0].numel() for p in (self.up, self.down) if p is not None)


class Routed(UpdateRule):
    """What both have in common: who is active, and a step that runs the core on those rows only.

    carry: rows (B, K), the positions gathered, and real (B, K), which of them are active and not padding.
    """

    extrapolates = False  # there is no router for a step beyond R
    halts = False
    weights_depend_on = ("router", "router_scale")

    def __init__(self, config: ModelConfig, n_routers: int, n_scores: int) -> None:
        super().__init__(config)
        self.router = Router(config.router, n_routers, self.d, n_scores)
        self.alpha, self.loss_weight, self.z_weight = config.router_scale, config.router_loss, config.router_z_loss
        at_least("model.router_loss", self.loss_weight, 0)
        at_least("model.router_z_loss", self.z_weight, 0)
        if self.alpha <= 0:
            raise ConfigError(f"model.router_scale is {self.alpha}: it must be above 0.")
        self.shares = [Fraction(self.layout.R - r, self.layout.R) for r in range(self.layout.R)]

    def init_parameters(self, model: nn.Module) -> None:
        for p in self.router.parameters():
            nn.init.normal_(p, std=0.02)

    def capacity(self, r: int, tokens: int) -> int:
        """k of step r = 0..R-1."""
        return max(1, math.floor(self.shares[r] * tokens))

    def start(self, h_pre: Tensor, ctx: LoopContext) -> Tensor:
        B, T, _ = h_pre.shape
        rows = torch.arange(T, device=h_pre.device).expand(B, T)
        real = torch.ones_like(rows, dtype=torch.bool) if ctx.real is None else ctx.real
        ctx.carry.update(rows=rows, real=real, depth=torch.zeros_like(rows))
        return h_pre

    def route(self, h: Tensor, ctx: LoopContext) -> tuple[Tensor, Tensor]:
        """Of the rows active so far: which go on, and the weight g of what they add; both (B, K)."""
        raise NotImplementedError

    def n_kept(self, kept: Tensor, h: Tensor, ctx: LoopContext) -> int:
        """Rows to gather: the most that one sequence of the batch keeps."""
        return self.capacity(ctx.step, h.shape[1]) if h.is_meta else int(kept.sum(1).max())

    def step(self, h: Tensor, h_pre: Tensor, core: Stack, ctx: LoopContext) -> Tensor:
        kept, g = self.route(h, ctx)
        # Stable: first those that go on, then the rest, each in the order of their positions.
        first = kept.byte().argsort(dim=1, descending=True, stable=True)[:, : self.n_kept(kept, h, ctx)]
        rows, real = ctx.carry["rows"].gather(1, first), kept.gather(1, first)
        ctx.carry.update(rows=rows, real=real, g=g.gather(1, first) * real)
        alive = torch.zeros(h.shape[:2], dtype=torch.bool, device=h.device).scatter(1, rows, real)
        ctx.carry["depth"] = ctx.carry["depth"] + ctx.tap("alive", alive)
        if not rows.shape[1]:
            return ctx.tap("state", h)
        if ctx.cache is not None:
            assert isinstance(ctx.cache.core, RoutedSteps)
            ctx.cache.core.select(ctx.step, rows, real)
        padding, ctx.real = ctx.real, None  # the rows gathered have theirs at the end, where no active row sees it
        h = super().step(h, h_pre, core, ctx)
        ctx.real = padding
        return h

    def read(self, h: Tensor, h_pre: Tensor, ctx: LoopContext) -> Tensor:
        return take(h, ctx.carry["rows"])  # (B, K, d)

    def evaluation(self, losses: Mapping[int, Tensor], ctx: LoopContext) -> dict[str, Tensor]:
        return {"depth": ctx.carry["depth"].float()}

    def flops(self, steps: int, tokens: int) -> int:
        kept = [self.capacity(r, tokens) for r in range(steps)]
        return sum(self.layout.n * k * block_flops(self.d, k) for k in kept)

    def store(self, cache: KVCache, n: int, strategy: str) -> RoutedSteps:
        if self.routing == "topk":
            raise ConfigError("routing is 'topk', which needs the whole sequence: decode with threshold.")
        return RoutedSteps(cache, n, strategy, [float(share) for share in self.shares])

    def kv_slots(self) -> dict[str, float]:
        """full: a token keeps keys of the steps that it takes. The others need keys of steps that it may not take."""
        outside = self.layout.p + self.layout.c
        return {"full": outside + self.layout.n * float(sum(self.shares)), "first": self.layout.n_unique}


class ExpertChoice(Routed):
    """Each step chooses its tokens among those of the step before."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config, config.blocks.R, 1)
        self.shares = shares_of(config)
        self.routing = config.eval_routing
        if self.routing not in ("threshold", "topk"):
            raise ConfigError(f"model.eval_routing is {self.routing!r}: choose threshold or topk.")

    def by_capacity(self, h: Tensor) -> bool:
        return self.training or self.routing == "topk" or h.is_meta

    def n_kept(self, kept: Tensor, h: Tensor, ctx: LoopContext) -> int:
        # Known in training without waiting for the device.
        return self.capacity(ctx.step, h.shape[1]) if self.training else super().n_kept(kept, h, ctx)

    def route(self, h: Tensor, ctx: LoopContext) -> tuple[Tensor, Tensor]:
        real = ctx.carry["real"]
        s = self.router(take(h, ctx.carry["rows"]), ctx.step).squeeze(-1)
        s = ctx.tap("router", s.masked_fill(~real, -math.inf))  # (B, K)
        if self.by_capacity(h):
            if ctx.real is not None:
                raise ConfigError("a padded batch cannot be routed by capacity (topk): route it by threshold.")
            best = s.argsort(dim=1, descending=True, stable=True)[:, : self.capacity(ctx.step, h.shape[1])]
            kept = torch.zeros_like(real).scatter(1, best, True)
        else:
            kept = s >= 0 if ctx.step else real
        kept = ctx.tap("selected", kept)
        if self.training:
            bce = F.binary_cross_entropy_with_logits(s, kept.to(s.dtype))
            ctx.aux.append(self.loss_weight * bce + self.z_weight * s.square().mean())  # logsumexp of one score is it
        return kept, self.alpha * torch.sigmoid(s)

    def write(self, h: Tensor, o: Tensor, h_pre: Tensor, ctx: LoopContext) -> Tensor:
        rows, g = ctx.carry["rows"], ctx.carry["g"]  # g is 0 in padding
        return h.scatter_add(1, rows[..., None].expand_as(o), g[..., None] * o)

    def flops(self, steps: int, tokens: int) -> int:
        before = [tokens, *(self.capacity(r, tokens) for r in range(steps))][:steps]
        return super().flops(steps, tokens) + self.router.flops * sum(before)


class TokenChoice(Routed):
    """Each token chooses its depth at the entry, from its own state: causal in training and evaluation alike."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config, 1, config.blocks.R)

    def start(self, h_pre: Tensor, ctx: LoopContext) -> Tensor:
        logits = self.router(h_pre, 0)
        p = ctx.tap("choice", self.alpha * logits.softmax(-1))  # (B, T, R)
        choice = p.argmax(-1, keepdim=True)  # steps less one
        ctx.carry.update(choice=choice.squeeze(-1), weight=p.gather(-1, choice).squeeze(-1))
        if self.training:
            frequency = F.one_hot(ctx.carry["choice"], self.layout.R).to(p.dtype).mean((0, 1))
            balance = self.layout.R * (frequency * p.mean((0, 1))).sum()
            ctx.aux.append(self.loss_weight * balance + self.z_weight * logits.logsumexp(-1).square().mean())
        return super().start(h_pre, ctx)

    def route(self, h: Tensor, ctx: LoopContext) -> tuple[Tensor, Tensor]:
        rows = ctx.carry["rows"]
        kept = ctx.carry["real"] & (ctx.carry["choice"].gather(1, rows) >= ctx.step)
        return kept, ctx.carry["weight"].gather(1, rows)

    def write(self, h: Tensor, o: Tensor, h_pre: Tensor, ctx: LoopContext) -> Tensor:
        rows, g = ctx.carry["rows"], ctx.carry["g"]
        leaves = ctx.carry["choice"].gather(1, rows) == ctx.step
        new = torch.where(leaves[..., None], take(h_pre, rows) + g[..., None] * o, o)
        new = torch.where(ctx.carry["real"][..., None], new, take(h, rows))
        return h.scatter(1, rows[..., None].expand_as(o), new)

    def flops(self, steps: int, tokens: int) -> int:
        return super().flops(steps, tokens) + self.router.flops * tokens
