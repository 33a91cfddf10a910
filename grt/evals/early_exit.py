"""What halting costs in quality: losses of a text whose tokens leave the loop one by one (grt/exits/policies.py).

All tokens of a window are read at once, which gives what token by token would. With a budget they do come one by one,
since each may use what those before it have left; all of a window's tokens then count as generated.

Shapes: B batch, T tokens, W windows, R steps.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from grt.backbone.context import LoopContext
from grt.data.loader import Split, windows
from grt.device import autocast
from grt.exits.loop import halting_cache, run_halting
from grt.exits.policies import Exit, ExitPolicy, FixedDepth, Spent
from grt.model.loop import RecurrentDepthModel
from grt.schema import at_least

CANDIDATES = 1024  # thresholds that calibration chooses among


@dataclass(frozen=True)
class Halted:
    """Of each window: mean nats per token (W,), and how many of its tokens took each number of steps (W, R + 1)."""

    nats: Tensor
    counts: Tensor

    @property
    def loss(self) -> float:
        return self.nats.mean().item()

    @property
    def shares(self) -> dict[int, float]:
        """Number of steps -> share of the tokens, where there are any."""
        of_all = self.counts.sum(0) / self.counts.sum()
        return {k: share for k, share in enumerate(of_all.tolist()) if share}

    @property
    def mean_depth(self) -> float:
        return math.fsum(k * share for k, share in self.shares.items())

    def of(self, windows: slice) -> "Halted":
        return Halted(self.nats[windows], self.counts[windows])


def halted_loss(
    model: RecurrentDepthModel, split: Split, exit: Exit, *, limit: int | None = None, batch_size: int = 16,
    dtype: torch.dtype = torch.float32, scores: list[Tensor] | None = None,
) -> Halted:  # fmt: skip
    """The model in eval mode. limit: read only the first windows. scores: takes the policy's scores of all tokens that
    each step ran, flat."""
    at_least("windows", 1 if limit is None else limit, 1)
    at_least("batch_size", batch_size, 1)
    nats, counts = [], []
    for ids, targets in windows(split, model.config.context, limit, batch_size):
        with torch.inference_mode(), autocast(model.device, dtype):
            logits, depths = _read(model, ids.to(model.device), exit, scores)
            each = F.cross_entropy(logits.float().flatten(0, 1), targets.to(model.device).flatten(), reduction="none")
        nats.append(each.view_as(targets).double().mean(1).cpu())
        counts.append(F.one_hot(depths, exit.steps + 1).sum(1).cpu())
    return Halted(torch.cat(nats), torch.cat(counts))


def _read(
    model: RecurrentDepthModel, ids: Tensor, exit: Exit, scores: list[Tensor] | None
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Logits (B, T, V) and depths (B, T)."""
    ctx = LoopContext(cache=halting_cache(model, exit, *ids.shape))
    if exit.budget is None:
        here: list[Tensor] = []
        out = run_halting(model, ids, ctx, exit, scores=here)
        if scores is not None:
            scores.extend(score.flatten().cpu() for score in here)
        return out
    logits, depths, spent = [], [], Spent(exit, len(ids), ids.device)
    for one in ids.split(1, dim=1):
        ctx = LoopContext(cache=ctx.cache)
        of_token, depth = run_halting(model, one, ctx, exit, spent.most()[:, None])
        spent.spend(depth[:, 0])
        logits.append(of_token)
        depths.append(depth)
    return torch.cat(logits, 1), torch.cat(depths, 1)


@torch.inference_mode()
def forced_halting(
    model: RecurrentDepthModel, prompt: Tensor, text: Tensor, strategy: str, exit: Exit, real: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Logits (B, M, V) that predict text (B, M) after prompt (B, P), and the steps (B, M) of the tokens that they come
    from, where steps share keys and values by `strategy` behind the prompt. real (B, P): False where a prompt has
    padding, which comes first."""
    (B, P), M = prompt.shape, text.shape[1]
    cache = halting_cache(model, exit, B, P + M - 1, strategy=strategy, prompt=P)
    logits, depths = run_halting(model, prompt, LoopContext(cache=cache, real=real), exit, last=True)
    found = [(logits[:, -1:], depths[:, -1:])]
    cache.commit()
    for piece in text[:, :-1].split(1 if cache.core.sequential else max(M - 1, 1), dim=1):
        if piece.shape[1]:
            found.append(run_halting(model, piece, LoopContext(cache=cache), exit))
            cache.commit()
    logits, depths = zip(*found, strict=True)
    return torch.cat(logits, 1), torch.cat(depths, 1)


def calibrate(
    model: RecurrentDepthModel, split: Split, policy: type[ExitPolicy], steps: int, *, mean_depth: float | None = None,
    loss_increase: float | None = None, limit: int | None = None, batch_size: int = 16,
) -> tuple[ExitPolicy, Halted, Halted]:  # fmt: skip
    """The deepest threshold whose mean depth is at most `mean_depth`, or the shallowest whose loss is at most
    `loss_increase` above that of all steps, by halving; with what it gives, and what all steps give. Both grow, or
    fall, with the threshold but for noise: a token that stays may change what later ones do."""
    options = {"limit": limit, "batch_size": batch_size}
    whole = halted_loss(model, split, Exit.of(model, FixedDepth(steps), steps), **options)
    scores: list[Tensor] = []
    deepest = policy(_thresholds(policy, steps)[-1])
    found = halted_loss(model, split, Exit.of(model, deepest, steps), **options, scores=scores)
    thresholds = _thresholds(policy, steps, torch.cat(scores))

    def deep_enough(result: Halted) -> bool:
        """Whether to look among the shallower ones."""
        if mean_depth is not None:
            return result.mean_depth > mean_depth
        assert loss_increase is not None
        return result.loss - whole.loss <= loss_increase

    # Halving from both ends: `low` is too shallow (or shallow enough), `high` deep enough (or too deep).
    low, high, results = 0, len(thresholds) - 1, {len(thresholds) - 1: found}
    while low < high:
        middle = (low + high) // 2
        exit = Exit.of(model, policy(thresholds[middle]), steps)
        results[middle] = halted_loss(model, split, exit, **options)
        low, high = (low, middle) if deep_enough(results[middle]) else (middle + 1, high)
    at = max(low - 1, 0) if mean_depth is not None and deep_enough(results[low]) else low
    exit = Exit.of(model, policy(thresholds[at]), steps)
    return exit.policy, results.get(at) or halted_loss(model, split, exit, **options), whole


def _thresholds(policy: type[ExitPolicy], steps: int, scores: Tensor | None = None) -> list[float]:
    """From the one at which all leave after the first step to one at which nobody leaves before the last, with those
    between that scores seen on the way tell apart; as they are printed, with six digits."""
    if policy.counts:
        return [float(k) for k in range(1, steps + 1)]
    if scores is None:
        return [0.0] if policy.falls else [1.0]
    ranked = scores.double().sort().values
    if len(ranked) > CANDIDATES:
        ranked = ranked[torch.linspace(0, len(ranked) - 1, CANDIDATES).long()]
    ends = [0.0, 2 * ranked[-1].item()] if policy.falls else [0.0, 1.0]
    rounded = sorted({float(f"{x:.6g}") for x in [*ranked.tolist(), *ends]})
    return rounded[::-1] if policy.falls else rounded
