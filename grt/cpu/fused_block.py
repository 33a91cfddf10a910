"""RowBlock and RowGate: a block of one token a row in two calls of our kernels (grt/decode/kernels), GRT's gate in one.

Shapes: B batch, d width, H heads, T tokens in the cache, c width of a head.
"""

from typing import Any

import torch
from torch import Tensor, nn

from grt.backbone.block import Block
from grt.backbone.context import LoopContext
from grt.methods.grt import Gate

FEW = 16  # rows up to which a product takes as long as reading its matrix


class RowBlock(Block):
    """Takes a block's parts over, their linears' weights being Kept (grt/decode/quantize.py). Anything but one token a
    row that reads a cache goes through them as before, and so does what a rule adds to the linears or a tap listens to.
    """

    def __init__(self, block: Block) -> None:
        nn.Module.__init__(self)
        self.ln1, self.attn, self.ln2, self.mlp = block.ln1, block.attn, block.ln2, block.mlp

    def forward(self, x: Tensor, ctx: LoopContext) -> Tensor:
        B, T, d = x.shape
        if T > 1 or B > FEW or ctx.cache is None or ctx.low_rank is not None or "attention" in ctx.taps:
            return super().forward(x, ctx)
        x, H = x.contiguous(), self.attn.n_heads
        qkv = torch.ops.grt.row_product(x, *parts(self.attn.qkv), *of_norm(self.ln1))
        k, v = (z.view(B, 1, H, d // H).transpose(1, 2) for z in qkv[..., d:].split(d, dim=2))
        keys, values, visible = ctx.cache.extend((ctx.section, ctx.block, ctx.step), k, v)  # (B, H, T, c)
        if visible is not None:
            visible = visible.expand(B, 1, 1, keys.shape[2])[:, 0, 0]
        after = *parts(self.attn.out), *of_norm(self.ln2), *parts(self.mlp.up), *parts(self.mlp.down)
        return torch.ops.grt.rest_of_block(x, qkv, keys, values, visible, *after)


class RowGate(Gate):
    """Takes a gate's parts over in the same way."""

    def __init__(self, gate: Gate) -> None:
        nn.Module.__init__(self)
        self.up, self.down = gate.up, gate.down

    def forward(self, h: Tensor, norm: nn.LayerNorm, ctx: LoopContext) -> Tensor:
        B, T, _ = h.shape
        W: Any = ctx.carry["gate"]  # Kept, but for adapters
        if B * T > FEW or W is None:
            return super().forward(h, norm, ctx)
        up = W.values, W.scale, ctx.of_tokens["gate"]
        return torch.ops.grt.gate(h.contiguous(), *of_norm(norm), *up, *parts(self.down))


def of_norm(layer: nn.LayerNorm) -> tuple[Tensor, Tensor, float]:
    return layer.weight, layer.bias, layer.eps


def parts(linear: nn.Linear) -> tuple[Tensor, Tensor | None, Tensor | None]:
    weight: Any = linear.weight  # Kept
    return weight.values, weight.scale, linear.bias
