"""The tied head of a model in bf16, for decoding: the largest logits in float32.

A product in bf16 keeps 8 bits of each sum. Between 8 and 16, logits are then 1/16 apart, so that the two largest are
often the same number, and which one is taken depends on who computes them: one token at a time or several, this library
or another. So the few that compete are computed once more, in float32, from the same state and weights.

Shapes: V vocabulary, d width.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

FEW = 8  # that many of the largest


def logits_for_decoding(z: Tensor, weight: Any) -> Tensor:
    """(..., V) of z (..., d), in float32 if z is of bf16: all of them as precise where that costs nothing, else the FEW
    largest. weight: (V, d), or one that is kept in another way (grt/decode/quantize.py)."""
    if z.dtype != torch.bfloat16:
        return F.linear(z, weight)
    if not isinstance(weight, Tensor) and weight.fast:
        return weight.float32_product(z)
    return largest_again(F.linear(z, weight), z, weight)


def largest_again(logits: Tensor, z: Tensor, weight: Any) -> Tensor:
    """Logits (..., V) of z (..., d) and the head's weight (V or more, d), in float32, the FEW largest exactly."""
    logits = logits.float()
    largest = logits.topk(min(FEW, logits.shape[-1])).indices
    # No matrix product: under autocast that would be in bf16 again.
    return logits.scatter(-1, largest, (weight[largest].float() * z.float()[..., None, :]).sum(-1))
