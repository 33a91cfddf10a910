"""The GPT-2 backbone: pre-norm blocks with their residuals inside, embedding and tied head.

Shapes: B batch, T tokens, d width, H heads.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from grt.backbone.context import LoopContext, LowRank
from grt.errors import ConfigError

HAS_AMX = torch.cpu._is_amx_tile_supported()
PRODUCTS_UP_TO = 512  # tokens; at 1,024 the fused kernel, which skips the future, has overtaken them


def block_flops(d: int, tokens: int) -> int:
    """One block, per token of a sequence of `tokens` (eq:flops): linears 24 d^2, attention products 4 T d."""
    return 24 * d * d + 4 * tokens * d


def project(name: str, linear: nn.Linear, x: Tensor, ctx: LoopContext) -> Tensor:
    """One of a block's four linears, and what a rule adds to it at this step."""
    y = linear(x)
    if ctx.low_rank is None or name not in ctx.low_rank:
        return y
    A, B = ctx.low_rank[name]
    return y + F.linear(F.linear(x, A), B)


def is_short_bf16_on_cpu(q: Tensor) -> bool:
    """Whether q (B, H, T, c) is of a length up to which something is done about bf16 on a CPU."""
    return q.device.type == "cpu" and q.dtype == torch.bfloat16 and q.shape[2] <= PRODUCTS_UP_TO


def fused(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
    """torch's fused kernel. For decoding in bf16 on a CPU without AMX it is given float32: one query then takes a
    quarter to a half of the time, a prompt of 128 or 256 as much, and probabilities are not rounded: vLLM's are not."""
    if HAS_AMX or not is_short_bf16_on_cpu(q) or torch.is_grad_enabled() or torch.is_autocast_enabled("cpu"):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=is_causal)
    y = F.scaled_dot_product_attention(q.float(), k.float(), v.float(), attn_mask=mask, is_causal=is_causal)
    return y.to(q.dtype)


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention, each (B, H, T, c): torch's fused kernel, except for training in bf16 on a CPU.

    There the kernel's backward pass is slow, and plain bf16 products take about half the time of both passes
    together (T = 64 to 512). Scores are then rounded to bf16, as every matrix product of such a pass is.
    """
    B, H, T, c = q.shape
    if not (is_short_bf16_on_cpu(q) and torch.is_grad_enabled()):
        return fused(q, k, v, is_causal=True)
    q, k, v = (z.reshape(B * H, T, c) for z in (q, k, v))
    future = torch.full((T, T), -math.inf, dtype=q.dtype).triu(1)
    scores = torch.baddbmm(future.expand(B * H, T, T), q, k.transpose(1, 2), alpha=1 / math.sqrt(c))
    return (scores.softmax(-1) @ v).view(B, H, T, c)


def causal(new: int, tokens: int, device: torch.device) -> Tensor:
    """Which of `tokens` keys the last `new` of them see: (new, tokens), those up to their own."""
    return torch.ones(new, tokens, dtype=torch.bool, device=device).tril(tokens - new)


class Attention(nn.Module):
    """Causal multi-head self-attention."""

    def __init__(self, d: int, n_heads: int) -> None:
        super().__init__()
        self.n_heads = n_heads
        self.qkv = nn.Linear(d, 3 * d)
        self.out = nn.Linear(d, d)

    def forward(self, x: Tensor, ctx: LoopContext) -> Tensor:
        B, T, d = x.shape
        # Split before the heads: the backward pass of unbinding a 5-d view would copy all of q, k, v once more.
        thirds = project("attn.qkv", self.qkv, x, ctx).split(d, dim=2)
        q, k, v = (z.view(B, T, self.n_heads, -1).transpose(1, 2) for z in thirds)  # (B, H, T, d/H)
        visible = None
        if ctx.cache is not None:
            k, v, visible = ctx.cache.extend((ctx.section, ctx.block, ctx.step), k, v)
        elif ctx.real is not None:
            visible = causal(T, T, x.device) & ctx.real[:, None, None] | torch.eye(T, dtype=torch.bool, device=x.device)
        if "attention" in ctx.taps:  # the fused kernel never forms the probabilities that a tap wants to see
            scores = (q @ k.transpose(-2, -1)) / math.sqrt(d // self.n_heads)
            seen = causal(T, k.shape[2], x.device) if visible is None else visible
            y = ctx.tap("attention", scores.masked_fill(~seen, -math.inf).softmax(-1)) @ v
        elif ctx.cache is None and visible is None:
            y = attend(q, k, v)
        else:
            y = fused(q, k, v, visible, is_causal=visible is None and T > 1)
        return project("attn.out", self.out, y.transpose(1, 2).reshape(B, T, d), ctx)


class MLP(nn.Module):
    """Linear d -> 4d, GELU (tanh form), Linear 4d -> d."""

    def __init__(self, d: int) -> None:
        super().__init__()
        self.up = nn.Linear(d, 4 * d)
        self.down = nn.Linear(4 * d, d)

    def forward(self, x: Tensor, ctx: LoopContext) -> Tensor:
        return project("mlp.down", self.down, F.gelu(project("mlp.up", self.up, x, ctx), approximate="tanh"), ctx)


class Block(nn.Module):
    """x + Attention(LN(x)), then x + MLP(LN(x)): the residuals are inside."""

    def __init__(self, d: int, n_heads: int) -> None:
        super().__init__()
        self.ln1 = nn.LayerNorm(d)
        self.attn = Attention(d, n_heads)
        self.ln2 = nn.LayerNorm(d)
        self.mlp = MLP(d)

    def forward(self, x: Tensor, ctx: LoopContext) -> Tensor:
        x = x + self.attn(self.ln1(x), ctx)
        return x + self.mlp(self.ln2(x), ctx)


class Stack(nn.ModuleList):
    """Blocks one after the other: prelude, core or coda (possibly empty)."""

    def __init__(self, section: str, n_blocks: int, d: int, n_heads: int, block: type[Block] = Block) -> None:
        super().__init__(block(d, n_heads) for _ in range(n_blocks))
        self.section = section

    def forward(self, x: Tensor, ctx: LoopContext, low_rank: Sequence[LowRank] | None = None) -> Tensor:
        """low_rank: what is added to each block's linears."""
        ctx.section = self.section
        for ctx.block, block in enumerate(self):
            # Handed over as tensors and not as a step's number, which would make a compiled block one graph a step.
            ctx.low_rank = None if low_rank is None else low_rank[ctx.block]
            x = block(x, ctx) if ctx.around is None else ctx.around(block, x, ctx)
        ctx.low_rank = None
        return x


class TokenEmbedding(nn.Embedding):
    """Rows for the vocabulary, and for the hardware's sake `padding` more below them that stay zero: no id reads
    them, no logit leaves the head, so their gradient is zero and AdamW (decay included) leaves them where they are.

    They are no part of the model: the state dict has the true rows only, whatever the padding on either side.
    """

    def __init__(self, vocab_size: int, d: int, padding: int) -> None:
        super().__init__(vocab_size, d)  # draws as many numbers as without padding: the same seed, the same weights
        self.padding = padding
        if padding:
            self.weight = nn.Parameter(F.pad(self.weight.detach(), (0, 0, 0, padding)))
            self.register_state_dict_post_hook(_drop_padding)
            self.register_load_state_dict_pre_hook(_add_padding)


def _drop_padding(tokens: nn.Module, state: dict[str, Tensor], prefix: str, *_: object) -> None:
    assert isinstance(tokens, TokenEmbedding)
    state[prefix + "weight"] = state[prefix + "weight"][: tokens.num_embeddings]


def _add_padding(tokens: nn.Module, state: dict[str, Tensor], prefix: str, *_: object) -> None:
    assert isinstance(tokens, TokenEmbedding)
    if prefix + "weight" in state:
        state[prefix + "weight"] = F.pad(state[prefix + "weight"], (0, 0, 0, tokens.padding))


class Embedding(nn.Module):
    """Token plus learned absolute position embedding."""

    def __init__(self, vocab_size: int, context: int, d: int, padding: int = 0) -> None:
        super().__init__()
        self.tokens = TokenEmbedding(vocab_size, d, padding)
        self.positions = nn.Embedding(context, d)

    def forward(self, ids: Tensor, positions: Tensor | None = None) -> Tensor:  # (B, T) -> (B, T, d)
        if positions is not None:
            return self.tokens(ids) + self.positions(positions)
        context = self.positions.num_embeddings
        if ids.shape[1] > context:
            raise ConfigError(f"the input has {ids.shape[1]} tokens, model.context is {context}: give a shorter one.")
        return self.tokens(ids) + self.positions.weight[: ids.shape[1]]


def init_normal(model: nn.Module, std: float, into_residual_std: float) -> None:
    """Linears and embeddings from N(0, std), those that project into the residual stream apart, and zero biases."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            into_residual = name.endswith(("attn.out", "mlp.down"))
            nn.init.normal_(module.weight, std=into_residual_std if into_residual else std)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight[: module.num_embeddings], std=std)  # rows of padding stay zero


def init_gpt2(model: nn.Module, n_executions: int) -> None:
    """GPT-2's initialisation: N(0, 0.02), zero biases; projections into the residual stream are smaller by
    sqrt(2L), with L the block executions of a full pass, since each of them adds to the stream."""
    init_normal(model, 0.02, 0.02 / math.sqrt(2 * n_executions))
