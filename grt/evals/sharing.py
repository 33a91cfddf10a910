"""What sharing keys and values over the steps costs in quality (fig:kvcache_bar): log-probabilities token by token.

The shared strategies ask for later steps' keys of earlier tokens, so they are defined only where one token comes after
the other: the first part of a text is the prompt, with all of its steps; then the cache is compressed and the rest is
fed token by token, each token the true one.

Shapes: B batch, P prompt tokens, M tokens scored, V vocabulary.
"""

import math

import torch
from torch import Tensor

from grt.backbone.context import LoopContext
from grt.cache.kv import KVCache
from grt.data.loader import Split, n_windows, windows
from grt.device import autocast
from grt.model.depth import Depth
from grt.model.loop import RecurrentDepthModel, last_of


@torch.inference_mode()
def forced_logits(
    model: RecurrentDepthModel, prompt: Tensor, text: Tensor, strategy: str, repeat: int = 1, steps: int | None = None,
    real: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Logits (B, M, V) that predict text (B, M) after prompt (B / repeat, P), each of whose rows `repeat` texts share;
    steps: passes through the core (default R); real (B / repeat, P): False where a prompt has padding, which comes
    first."""
    P, M = prompt.shape[1], text.shape[1]
    depth = model.full_depth if steps is None else Depth(steps)
    cache = KVCache(model, len(prompt), P + M - 1, strategy=strategy, prompt=P, depth=max(depth.steps, 1))
    logits = [_pass(model, prompt, cache, depth, real)[:, -1:].repeat_interleave(repeat, 0)]
    cache.commit()
    cache.reorder(torch.arange(len(prompt), device=prompt.device).repeat_interleave(repeat))
    for piece in text[:, :-1].split(1 if cache.core.sequential else max(M - 1, 1), dim=1):
        if piece.shape[1]:
            logits.append(_pass(model, piece, cache, depth))
            cache.commit()
    return torch.cat(logits, 1)


def forced_log_probs(
    model: RecurrentDepthModel, prompt: Tensor, text: Tensor, strategy: str, repeat: int = 1, steps: int | None = None
) -> Tensor:
    """Log-probabilities (B, M) of text (B, M); arguments as in `forced_logits`."""
    log_probs = forced_logits(model, prompt, text, strategy, repeat, steps).float().log_softmax(-1)
    return log_probs.gather(-1, text[..., None]).squeeze(-1)


def _pass(
    model: RecurrentDepthModel, ids: Tensor, cache: KVCache, depth: Depth, real: Tensor | None = None
) -> Tensor:  # fmt: skip
    ctx = LoopContext(cache=cache, real=real)
    return model.logits(last_of(model.states(ids, ctx, depth)), ctx)


def sharing_loss(
    model: RecurrentDepthModel, split: Split, strategy: str, *, limit: int | None = None, batch_size: int = 16,
    dtype: torch.dtype = torch.float32, steps: int | None = None,
) -> tuple[float, float]:  # fmt: skip
    """Mean nats per token, and their standard error over windows, of the second half of each window of `split`, the
    first half being the prompt. The model in eval mode; limit: read only the first windows."""
    T, device = model.config.context, model.device
    n_windows(split, T, limit)  # ConfigError where there is none
    means = []
    for ids, targets in windows(split, T, limit, batch_size):
        text = torch.cat((ids, targets[:, -1:]), 1).to(device)
        with autocast(device, dtype):
            nats = -forced_log_probs(model, text[:, : T // 2], text[:, T // 2 :], strategy, steps=steps)
        means.append(nats.double().mean(1).cpu())
    each = torch.cat(means)
    return each.mean().item(), (each.std() / math.sqrt(len(each))).item() if len(each) > 1 else math.inf
