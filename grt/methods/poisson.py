"""Heavy-tailed depths and a random start: Geiping et al. 2025, arXiv 2502.05171 (Huginn), section 3.

    h_0 = sigma * z, z ~ N(0, 1) with |z| <= 3, sigma^2 = 2/5
    u   = A [h ; LN(h_pre)]
    h'  = n_c(B(u))                                               n_c: RMSNorm
    r   ~ Poisson(e^tau) + 1, tau ~ N(log r_bar - s^2 / 2, s)     depths of training; the last 8 steps carry gradient

Where it departs from the original: h_pre is normed (no parameters), since GPT-2's embeddings are small beside n_c's
unit-RMS states; n_c closes every step, as their equations have it, not only the last one, as their code does;
r_bar = R - 1, so that the mean depth is R, and depths are capped at 4R. Outside of training h_0 is a pure function of
(seed, position): a token's start depends neither on its neighbours nor on how a text is cut into pieces.

`huginn` adds what their blocks and start values have: sandwich norms, embeddings times sqrt(d) and Takase's
initialisation. The backbone stays GPT-2's (LayerNorm, learned positions, GELU).

Shapes: B batch, T tokens, d width.
"""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from grt.backbone.block import Block, init_normal
from grt.backbone.context import LoopContext
from grt.backbone.split_linear import anchor, anchored
from grt.config import ModelConfig
from grt.errors import ConfigError
from grt.model.depth import DepthSampler, lognormal_poisson
from grt.model.rule import UpdateRule
from grt.schema import at_least


def check(config: ModelConfig) -> None:
    """ConfigError for fields that cannot work; sampler and rule both ask, as either may be made first."""
    if config.start_std <= 0:
        raise ConfigError(f"model.start_std is {config.start_std}: it must be above 0.")
    if config.depth_sigma > 5:
        raise ConfigError(f"model.depth_sigma is {config.depth_sigma}: it must be at most 5, no depth is so uncertain.")
    for name, least in (("mean_depth", 0), ("depth_sigma", 0), ("depth_cap", 0), ("grad_steps", 1)):
        at_least(f"model.{name}", getattr(config, name), least)


def heavy_tail(config: ModelConfig) -> DepthSampler:
    """The drawn depths: r_bar is R - 1 and the cap 4R where the config leaves them at 0."""
    check(config)
    R = config.blocks.R
    return lognormal_poisson(
        config.mean_depth or R - 1, config.depth_sigma, config.depth_cap or 4 * R, config.grad_steps
    )


def truncated_normal(
    shape: torch.Size, sigma: float, device: torch.device, generator: torch.Generator | None = None
) -> Tensor:
    """sigma * z with z normal given |z| <= 3, from the inverse of its distribution function: torch's own routine
    draws otherwise from one release to the next, and on a GPU waits for its rejections."""
    uniform = torch.rand(shape, device=device, generator=generator, dtype=torch.float32)
    z = math.sqrt(2) * torch.erfinv((2 * uniform - 1) * math.erf(3 / math.sqrt(2)))
    return sigma * z.clamp(-3, 3)  # the clamp is for rounding only


class Poisson(UpdateRule):
    """The adapter A is split into halves as GRT's projection is: the anchor's half is applied once a pass."""

    weights_depend_on = ("start_std",)

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        check(config)
        self.sigma, self.context = config.start_std, config.context
        self.adapter = nn.Linear(2 * self.d, self.d, bias=False)  # A: columns [h | LN(h_pre)]
        self.norm = nn.RMSNorm(self.d, eps=1e-6)  # n_c
        self.table: tuple[object, Tensor] = None, torch.empty(0)  # no buffer: what a seed repeats needs no saving

    def start(self, h_pre: Tensor, ctx: LoopContext) -> Tensor:
        anchor("adapter", self.adapter, F.layer_norm(h_pre, (self.d,)), ctx)
        if self.training:
            return truncated_normal(h_pre.shape, self.sigma, h_pre.device).to(h_pre.dtype)
        table = self.start_table(ctx.seed, h_pre)
        rows = table[: h_pre.shape[1]] if ctx.positions is None else table[ctx.positions]
        return rows.expand_as(h_pre)  # one for all rows of the batch, but for their padding

    def start_table(self, seed: int, like: Tensor) -> Tensor:
        """h_0 by position, (context, d), kept for the next pass. Drawn on the CPU: every device starts alike."""
        key = seed, like.device, like.dtype
        if self.table[0] != key:
            with torch.inference_mode(False):  # else no later pass could take gradients with it
                generator = torch.Generator().manual_seed(seed)
                shape = torch.Size((self.context, self.d))
                self.table = key, truncated_normal(shape, self.sigma, torch.device("cpu"), generator).to(like)
        return self.table[1]

    def read(self, h: Tensor, h_pre: Tensor, ctx: LoopContext) -> Tensor:
        u = anchored("adapter", self.adapter, h, ctx)
        return u.to(h.dtype)  # the core's residual stream is as precise as the state

    def write(self, h: Tensor, o: Tensor, h_pre: Tensor, ctx: LoopContext) -> Tensor:
        return self.norm(o)

    def flops(self, steps: int, tokens: int) -> int:
        # 2 d^2 for the anchor's half, once; 2 d^2 for the state's half, per step.
        return super().flops(steps, tokens) + tokens * 2 * (1 + steps) * self.d**2


class SandwichBlock(Block):
    """LN(x + Attention(LN(x))), then LN(x + MLP(LN(x)))."""

    def __init__(self, d: int, n_heads: int) -> None:
        super().__init__(d, n_heads)
        self.ln1_post = nn.LayerNorm(d)
        self.ln2_post = nn.LayerNorm(d)

    def forward(self, x: Tensor, ctx: LoopContext) -> Tensor:
        x = self.ln1_post(x + self.attn(self.ln1(x), ctx))
        return self.ln2_post(x + self.mlp(self.ln2(x), ctx))


class Huginn(Poisson):
    """Sandwich norms in every block, embeddings times sqrt(d), Takase's initialisation (A included)."""

    block = SandwichBlock

    def embed(self, x: Tensor) -> Tensor:
        return math.sqrt(self.d) * x

    def init_parameters(self, model: nn.Module) -> None:
        variance = 1 / (5 * self.d)
        init_normal(model, math.sqrt(2 * variance), math.sqrt(variance / self.layout.n_executions()))
