"""Validation loss at every depth, from one pass through the loop (definition: non-overlapping windows, nats)."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional as F

from grt.config import ConfigError
from grt.data.loader import Split, n_windows, windows
from grt.model.context import LoopContext
from grt.model.depth import Depth
from grt.model.precision import autocast
from grt.model.recurrent import RecurrentDepthModel


@dataclass(frozen=True)
class Evaluation:
    """loss_by_depth: depth -> mean nats per token over `windows` windows, `tokens` tokens in all."""

    loss_by_depth: dict[int, float]
    windows: int
    tokens: int
    tokens_per_byte: float

    def bits_per_byte(self, depth: int) -> float:
        return self.loss_by_depth[depth] / math.log(2) * self.tokens_per_byte


def evaluate(
    model: RecurrentDepthModel,
    split: Split,
    *,
    depths: Sequence[int] | None = None,
    limit: int | None = None,
    batch_size: int = 16,
    dtype: torch.dtype = torch.float32,
) -> Evaluation:
    """Mean next-token loss of `split` at each of `depths` (default 0..R; 0 is the readout of the prelude).

    limit: read only the first windows. Noise is off, and nothing is drawn from the caller's generators: how often
    one evaluates never changes training.
    """
    R = model.config.blocks.R
    depths = list(range(R + 1)) if depths is None else sorted(set(depths))
    model.check_depth(min(depths[0], R), least=0)
    model.check_depth(depths[-1], least=0)  # the only one that may warn
    for name, value in (("windows", limit), ("batch_size", batch_size)):
        if value is not None and value < 1:
            raise ConfigError(f"{name} is {value}: it must be at least 1.")
    context, device = model.config.context, model.device
    count = n_windows(split, context, limit)
    sums = torch.zeros(len(depths), dtype=torch.float64)
    was_training = model.training
    model.eval()
    try:
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), torch.inference_mode():
            torch.manual_seed(0)
            for ids, targets in windows(split, context, limit, batch_size):
                with autocast(device, dtype):
                    sums += _summed_losses(model, ids.to(device), targets.to(device), depths)
    finally:
        model.train(was_training)
    losses = (sums / (count * context)).tolist()
    return Evaluation(
        dict(zip(depths, losses, strict=True)), count, count * context, split.n_tokens / max(split.n_bytes, 1)
    )


def _summed_losses(
    model: RecurrentDepthModel, ids: torch.Tensor, targets: torch.Tensor, depths: list[int]
) -> torch.Tensor:
    ctx, losses = LoopContext(), []
    for k, h in enumerate(model.states(ids, ctx, Depth(max(depths)))):
        if k in depths:
            logits = model.logits(h, ctx).float().flatten(0, 1)
            losses.append(F.cross_entropy(logits, targets.flatten(), reduction="sum"))
    return torch.stack(losses).double().cpu()
