"""Validation loss at every depth, from one pass through the loop (definition: non-overlapping windows, nats)."""

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional as F

from grt.backbone.context import LoopContext
from grt.data.loader import Split, n_windows, windows
from grt.device import autocast
from grt.errors import ConfigError
from grt.model.depth import Depth
from grt.model.loop import RecurrentDepthModel


@dataclass(frozen=True)
class Evaluation:
    """loss_by_depth: depth -> mean nats per token over `windows` windows, `tokens` tokens in all.

    extras: what the method adds (UpdateRule.evaluation), means over the tokens; only where every depth was evaluated.
    """

    loss_by_depth: dict[int, float]
    windows: int
    tokens: int
    tokens_per_byte: float
    extras: dict[str, float] = field(default_factory=dict)

    @property
    def deepest(self) -> float:
        """Loss at the deepest depth evaluated."""
        return self.loss_by_depth[max(self.loss_by_depth)]

    def bits_per_byte(self, depth: int) -> float:
        return self.loss_by_depth[depth] / math.log(2) * self.tokens_per_byte


def evaluate(
    model: RecurrentDepthModel, split: Split, *, depths: Sequence[int] | None = None, limit: int | None = None,
    batch_size: int = 16, dtype: torch.dtype = torch.float32, routing: str | None = None,
    between: Callable[[], None] | None = None,
) -> Evaluation:  # fmt: skip
    """Mean next-token loss of `split` at each of `depths` (default 0..R; 0 is the readout of the prelude).

    limit: read only the first windows. routing: threshold or topk, for a method with a router, in place of what its
    rule has set. between: called before each batch; what it raises ends the evaluation. Noise is off, and nothing is
    drawn from the caller's generators: how often one evaluates never changes training.
    """
    R = model.config.blocks.R
    depths = list(range(R + 1)) if depths is None else sorted(set(depths))
    model.check_depth(min(depths[0], R), least=0)
    model.check_depth(depths[-1], least=0)  # the only one that may warn
    for name, value in (("windows", limit), ("batch_size", batch_size)):
        if value is not None and value < 1:
            raise ConfigError(f"{name} is {value}: it must be at least 1.")
    rule, own_routing = model.rule, model.rule.routing
    if routing is not None and own_routing is None:
        name = model.config.method_name
        raise ConfigError(f"routing is {routing!r}, but {name} has no router for it: leave it out.")
    context, device = model.config.context, model.device
    count = n_windows(split, context, limit)
    sums: dict[int | str, float] = defaultdict(float)
    was_training = model.training
    model.eval()
    try:
        rule.routing = routing or own_routing
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), torch.inference_mode():
            torch.manual_seed(0)
            for ids, targets in windows(split, context, limit, batch_size):
                if between is not None:
                    between()
                with autocast(device, dtype):
                    values = _values(model, ids.to(device), targets.to(device), depths)
                of_batch = torch.stack([value.sum() for value in values.values()]).tolist()
                for name, total in zip(values, of_batch, strict=True):
                    sums[name] += total
    finally:
        model.train(was_training)
        rule.routing = own_routing
    tokens = count * context
    losses = {k: sums[k] / tokens for k in depths}
    extras = {name: total / tokens for name, total in sums.items() if isinstance(name, str)}
    return Evaluation(losses, count, tokens, split.n_tokens / max(split.n_bytes, 1), extras)


def _values(model: RecurrentDepthModel, ids: Tensor, targets: Tensor, depths: list[int]) -> dict[int | str, Tensor]:
    """Nats at each depth, and what the rule adds to them under names of its own; each (B, T)."""
    ctx, losses = LoopContext(), {}
    for k, h in enumerate(model.states(ids, ctx, Depth(max(depths)))):
        if k in depths:
            logits = model.logits(h, ctx).float().flatten(0, 1)
            losses[k] = F.cross_entropy(logits, targets.flatten(), reduction="none").view_as(targets)
    every = set(range(1, model.config.blocks.R + 1)) <= losses.keys()
    return losses | (model.rule.evaluation(losses, ctx) if every else {})
