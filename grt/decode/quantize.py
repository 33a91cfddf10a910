"""How a model's weights are kept for inference: in fp32, bf16, or int8 with a scale for each output channel.

    int8    q = round(W / s),  s = max |W| of a row / 127,  W' = s q:  |W - W'| <= s / 2

Symmetric, by rounding to the nearest alone (arXiv 2208.07339, section 2, has this as vector-wise quantisation), and of
weights only: x is not quantised. It covers what products read: every matrix of the blocks, of the rule (GRT's
projection and gate, RRT's deltas, MoR's routers) and the head. The head is tied to the embedding, so that one copy
serves both, with a scale for each token of the vocabulary. Each matrix is kept once, a core's too, however often it is
read. Positions, norms and biases stay as they are.

Shapes: n outputs, k inputs of a matrix.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from grt.backbone.block import Block
from grt.config import Weights
from grt.cpu import kernels
from grt.cpu.fused_block import FEW, RowBlock, RowGate
from grt.device import DTYPES
from grt.errors import ConfigError
from grt.methods.grt import Gate
from grt.model.loop import RecurrentDepthModel


class Kept:
    """A matrix, or several of one shape, (..., n, k): what stands in a module where its parameter was.

    values: fp32, bf16 or int8. scale: (..., n) for int8. dtype: of what is computed with it. fast: by our kernels. It
    can be taken apart as rules do it, and torch's linear and embedding come to __torch_function__.
    """

    def __init__(self, values: Tensor, scale: Tensor | None, dtype: torch.dtype, fast: bool) -> None:
        self.pieces, self.scale, self.dtype, self.fast = [values], scale, dtype, fast

    @property
    def values(self) -> Tensor:
        return self.pieces[0] if len(self.pieces) == 1 else torch.cat(self.pieces, -1)

    @property
    def device(self) -> torch.device:
        return self.pieces[0].device

    def numel(self) -> int:
        return sum(piece.numel() for piece in self.pieces)

    @property
    def itemsize(self) -> int:
        return self.pieces[0].itemsize

    def _with(self, values: Tensor, scale: Tensor | None) -> "Kept":
        return Kept(values, scale, self.dtype, self.fast)

    def __getitem__(self, i: int | slice | Tensor) -> "Kept":
        return self._with(self.values[i], None if self.scale is None else self.scale[i])

    def __iter__(self) -> "Iterator[Kept]":
        return iter([self[i] for i in range(len(self.values))])

    def __rmul__(self, factor: float) -> "Kept":
        if self.scale is None:
            return self._with(factor * self.values, None)
        return self._with(self.values, factor * self.scale)

    def flatten(self, start: int, end: int) -> "Kept":
        scale = None if self.scale is None else self.scale.flatten(start, end)
        return self._with(self.values.flatten(start, end), scale)

    def split(self, size: int, dim: int) -> "list[Kept]":
        """Into columns, which share their rows' scales. From now on each lies in one piece: processors read ahead, and
        other columns between its rows would take the place of weights in their caches."""
        assert dim == self.pieces[0].ndim - 1, "rows are not what rules split"
        if self.pieces[0].shape[-1] != size:
            self.pieces = [piece.contiguous() for piece in self.values.split(size, dim)]
        return [self._with(piece, self.scale) for piece in self.pieces]

    def float32_product(self, x: Tensor) -> Tensor:
        """F.linear for x (..., k) of bf16, in float32, which our kernels sum in: so many rows at a time."""
        x = x.float()
        if x.numel() <= FEW * x.shape[-1]:
            return linear(x, self)
        return torch.cat([linear(few, self) for few in x.flatten(0, -2).split(FEW)]).unflatten(0, x.shape[:-1])

    def float(self) -> Tensor:
        return self._in(torch.float32)

    def dense(self) -> Tensor:
        """(..., n, k) as it is meant, in dtype."""
        return self._in(self.dtype)

    def _in(self, dtype: torch.dtype) -> Tensor:
        return self.values.to(dtype) if self.scale is None else (self.values * self.scale[..., None]).to(dtype)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return OPERATIONS[func](*args, **(kwargs or {})) if func in OPERATIONS else NotImplemented


def linear(x: Tensor, weight: Kept, bias: Tensor | None = None) -> Tensor:
    """F.linear for x (..., k)."""
    if weight.fast and x.numel() <= FEW * x.shape[-1]:
        return torch.ops.grt.row_product(x.contiguous(), weight.values, weight.scale, bias)
    if weight.scale is None:
        return F.linear(x, weight.values.to(x.dtype), bias)
    y = F.linear(x, weight.values.to(x.dtype))  # bf16 has room for int8
    scaled = y * weight.scale
    return (scaled if bias is None else scaled + bias).to(y.dtype)


def embedding(ids: Tensor, weight: Kept, *_: Any, **__: Any) -> Tensor:
    """F.embedding: (..., k) of ids (...)."""
    return weight._with(weight.values[ids], None if weight.scale is None else weight.scale[ids]).dense()


OPERATIONS: dict[Callable[..., Any], Callable[..., Tensor]] = {F.linear: linear, F.embedding: embedding}


def kept(weight: Tensor, weights: Weights, dtype: torch.dtype, fast: bool) -> Kept:
    """A matrix (..., n, k) of fp32 as `weights` keeps it."""
    if weights != "int8":
        return Kept(weight.to(DTYPES[weights]), None, dtype, fast)
    scale = weight.abs().amax(-1) / 127
    values = (weight / scale.clamp_min(torch.finfo(scale.dtype).tiny)[..., None]).round().to(torch.int8)
    return Kept(values, scale, dtype, fast)


@torch.no_grad()
def keep_weights(model: RecurrentDepthModel, weights: Weights | None, dtype: torch.dtype) -> RecurrentDepthModel:
    """A model of fp32, in place, for inference in `dtype`, its matrices in the precision that `weights` names (None: in
    that of all the rest), multiplied on a CPU by our kernels. Its state dict has no matrices any more, and it cannot
    be cast or moved from there. ConfigError for a model or a dtype that is neither what it says here, nor bf16 or fp32.
    """
    if weights is not None:
        if {weight.dtype for weight in model.parameters()} != {torch.float32}:
            raise ConfigError("weights are kept from those of a model of fp32: load it in fp32, then ask for others.")
        if dtype not in DTYPES.values():
            raise ConfigError(f"dtype is {dtype}: kept weights compute in fp32 or bf16, choose one.")
        fast = model.device.type == "cpu" and kernels.load()
        for module in model.modules():
            for name, weight in list(module.named_parameters(recurse=False)):
                if weight.ndim > 1 and module is not model.embed.positions:
                    delattr(module, name)
                    setattr(module, name, kept(weight.detach(), weights, dtype, fast))
        for stack in (model.prelude, model.core, model.coda):
            for i, block in enumerate(stack if fast else ()):
                if type(block) is Block:  # others have further parts
                    stack[i] = RowBlock(block)
        gate = getattr(model.rule, "gate", None)
        if fast and type(gate) is Gate:
            model.rule.gate = RowGate(gate)
    return model.to(dtype)
