"""One token at a time on a CPU: products with a single row, and attention of a single query, as sums for inductor.

torch's own matrix products reach about a third of the memory's speed where a matrix has to be read for one row;
inductor's loops over `(W * x).sum(-1)` reach most of it (dev/LOG.md has the numbers). For compiled functions only.
"""

import math
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

# Inputs of a sum are computed once and stored: inlined, they would be computed again for every row of the matrix.
OPTIONS: dict[str, Any] = {"realize_reads_threshold": 0, "realize_opcount_threshold": 0}
# Kernels called from C++, without looking at every buffer's strides: a token is a hundred calls of a few microseconds.
OPTIONS |= {"cpp_wrapper": True, "size_asserts": False}


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """F.linear for x (..., d_in) of one row."""
    y = (weight * x.reshape(-1)).sum(-1)
    y = y if bias is None else y + bias
    return y.view(*x.shape[:-1], -1)


def attention(q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None) -> Tensor:
    """Attention of one query (B, H, 1, c) over keys (B, H, T, c); visible (B, 1, 1, T)."""
    scores = (q.float() * k).sum(-1) / math.sqrt(q.shape[-1])  # (B, H, T)
    if visible is not None:
        scores = scores.masked_fill(~visible[:, :, 0], -math.inf)
    return (scores.softmax(-1)[..., None] * v).sum(2, keepdim=True).to(q.dtype)


class OneRow(TorchFunctionMode):
    """While entered, these two stand in for torch's where there is one row. Not for weights that are kept in some other
    way (grt/decode/quantize.py), which bring a product of their own."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.linear and isinstance(args[1], Tensor) and args[0].numel() == args[0].shape[-1]:
            return linear(*args, **kwargs)
        if func is F.scaled_dot_product_attention and args[0].shape[2] == 1:
            q, k, v = args
            return attention(q, k, v, kwargs["attn_mask"])
        return func(*args, **kwargs)
