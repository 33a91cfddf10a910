"""The recurrent loop, once: everything else in grt is built on `RecurrentDepthModel.states`.

    h_pre = prelude(embed(ids));  h_0 = rule.start(h_pre)
    for r = 1..k:  u = rule.read(h_{r-1});  o = core(u);  h_r = rule.write(h_{r-1}, o)
    logits_k = head(ln_f(coda(h_k)))

Shapes: B batch, T tokens, d width, R steps, V vocabulary.
"""

import warnings
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from grt.backbone.block import Embedding, Stack, init_gpt2
from grt.backbone.context import LoopContext
from grt.backbone.head import logits_for_decoding
from grt.config import ModelConfig
from grt.errors import ConfigError
from grt.model.depth import DEEPEST, Depth
from grt.model.rule import Loss, UpdateRule, last_of


class RecurrentDepthModel(nn.Module):
    """Prelude, recurrent core, coda. Dense GPT-2 is the layout without a core."""

    def __init__(self, config: ModelConfig, rule: UpdateRule) -> None:
        super().__init__()
        self.config = config
        layout, d, n_heads = config.blocks, config.d_model, config.n_heads
        self.embed = Embedding(config.vocab_size, config.context, d, config.n_padding)
        self.prelude = Stack("prelude", layout.p, d, n_heads, rule.block)
        self.core = Stack("core", layout.n, d, n_heads, rule.block)
        self.coda = Stack("coda", layout.c, d, n_heads, rule.block)
        self.ln_f = nn.LayerNorm(d)
        self.rule = rule
        init_gpt2(self, layout.n_executions())
        rule.init_parameters(self)

    @property
    def full_depth(self) -> Depth:
        return Depth(self.config.blocks.R)

    def check_depth(self, steps: int, least: int) -> None:
        """ConfigError for a depth that this model cannot run; one warning where it goes beyond training."""
        R, name = self.config.blocks.R, self.config.method_name
        if self.config.blocks.is_dense and steps > 0:
            raise ConfigError(f"depth is {steps}, but a dense model has no core to repeat: leave depth out.")
        least = min(least, R)  # 0 for a dense model
        if steps < least:
            raise ConfigError(f"depth is {steps}: give at least {least}.")
        if steps > R:
            if not self.rule.extrapolates:
                raise ConfigError(f"depth {steps} is beyond the {R} steps of {name}: choose at most {R}.")
            if steps > DEEPEST * R:
                raise ConfigError(f"depth is {steps}: give at most {DEEPEST * R}, {DEEPEST} times the model's R.")
            warnings.warn(f"depth {steps} is beyond the {R} steps that this model was trained for", stacklevel=3)

    def states(self, ids: Tensor, ctx: LoopContext, depth: Depth) -> Iterator[Tensor]:
        """Yield h_0, h_1, ..., h_steps, each (B, T, d), for ids (B, T)."""
        if ctx.cache is not None:
            ctx.cache.check_steps(depth.steps)  # before the cache makes room for tokens that then do not come
        yield from self.walk(*self.enter(ids, ctx), ctx, depth)

    def enter(self, ids: Tensor, ctx: LoopContext) -> tuple[Tensor, Tensor]:
        """h_0 and h_pre, each (B, T, d), for ids (B, T)."""
        if ctx.cache is not None:
            ctx.positions = ctx.cache.begin(ids.shape[1], ctx.real)
        elif ctx.real is not None:
            ctx.positions = (ctx.real.cumsum(1) - 1).clamp_min(0)
        h_pre = ctx.tap("anchor", self.prelude(self.rule.embed(self.embed(ids, ctx.positions)), ctx))
        return self.rule.start(h_pre, ctx), h_pre

    def resume(self, h: Tensor, h_pre: Tensor, ctx: LoopContext, depth: Depth, done: int) -> Iterator[Tensor]:
        """Yield h_done, ..., h_steps of tokens whose passes stopped after `done` steps, each beside others than now; h
        and h_pre (B, T, d) are theirs. Not for rules that route."""
        self.rule.start(h_pre, ctx)  # for what the rule carries along, which follows from h_pre
        yield from self.walk(h, h_pre, ctx, depth, done)

    def walk(self, h: Tensor, h_pre: Tensor, ctx: LoopContext, depth: Depth, done: int = 0) -> Iterator[Tensor]:
        """The loop: yield h_done, which is h, and what the steps behind it make of it."""
        ctx.norm = self.ln_f
        yield h
        for ctx.step in range(done, depth.steps):
            if depth.grad_steps is not None and 0 < ctx.step <= depth.steps - depth.grad_steps:
                # Truncated back-propagation (torch.no_grad would break DDP and the compiler), at each of the early
                # steps, so that no more than one of them is kept.
                h = h.detach()
            h = self._step(h, h_pre, ctx)
            yield h

    def _step(self, h: Tensor, h_pre: Tensor, ctx: LoopContext) -> Tensor:
        """One step of the tokens that go on: of all of them, unless some have left (grt/exits/loop.py)."""
        going = None if ctx.cache is None else ctx.cache.going
        if going is None:
            return self.rule.step(h, h_pre, self.core, ctx)
        everyone = ctx.of_tokens
        ctx.of_tokens = {name: going.take(x) for name, x in everyone.items()}
        new = self.rule.step(going.take(h), going.take(h_pre), self.core, ctx)
        ctx.of_tokens = everyone
        return going.put(new, h)

    def logits(self, h: Tensor, ctx: LoopContext, last: bool = False) -> Tensor:
        """Read a state out: coda, final norm, tied head. (B, T, d) -> (B, T, V), the true vocabulary in any case;
        last: of the last position only, (B, 1, V). These, and all that are read with a cache, are for choosing tokens:
        of a model in bf16 they are in float32 (grt/backbone/head.py)."""
        z = self.coda(h, ctx)
        return self.head(z[:, -1:] if last else z, decoding=last or ctx.cache is not None)

    def head(self, z: Tensor, decoding: bool = False) -> Tensor:
        """What follows the coda, of each token by itself: (..., d) -> (..., V)."""
        weight, V = self.embed.tokens.weight, self.config.vocab_size
        if decoding:
            return logits_for_decoding(self.ln_f(z), weight[:V] if self.config.n_padding else weight)
        logits = F.linear(self.ln_f(z), weight)
        return logits[..., :V] if self.config.n_padding else logits

    def forward(self, ids: Tensor, depth: Depth | None = None, ctx: LoopContext | None = None) -> Tensor:
        """Logits (B, T, V) at `depth` (default: R steps) for ids (B, T)."""
        ctx = ctx or LoopContext()
        return self.logits(last_of(self.states(ids, ctx, depth or self.full_depth)), ctx)

    def loss(self, ids: Tensor, targets: Tensor, depth: Depth, ctx: LoopContext | None = None, stage: int = 1) -> Loss:
        """The training loss of one slot, as the method defines it; targets (B, T) are the next tokens."""
        ctx = ctx or LoopContext()

        def ce(h: Tensor, ctx: LoopContext = ctx) -> Tensor:
            logits = self.logits(h, ctx).float().flatten(0, 1)
            return F.cross_entropy(logits, targets.flatten(), reduction="none").view_as(targets)

        def recomputed(h: Tensor) -> Tensor:
            return checkpoint(ce, h, replace(ctx), use_reentrant=False)  # the loop moves on: keep where it is

        loss = self.rule.loss if stage == 1 else self.rule.second_loss
        return loss(self.states(ids, ctx, depth), recomputed if ctx.recompute else ce, ctx)

    @property
    def device(self) -> torch.device:
        return self.embed.tokens.weight.device
