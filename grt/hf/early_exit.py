"""Early exit in a Hugging Face model: tokens leave the loop one by one (grt/exits/policies.py says when) in a pass that
has a GRTCache with an exit. It computes what grt/decode/early_exit.py does.

Shapes: B batch, T tokens, V vocabulary.
"""

from typing import Any

import torch
from torch import Tensor

from grt.backbone.context import LoopContext
from grt.errors import ConfigError
from grt.exits.loop import run_halting
from grt.hf.cache import GRTCache
from grt.model.loop import RecurrentDepthModel


def halted(loop: RecurrentDepthModel, ids: Tensor, mask: Tensor | None, cache: GRTCache, last: bool) -> Tensor:
    """Logits (B, T, V) of ids (B, T); mask (B, tokens in the cache + T): False where there is padding. last: of the
    last token only, where the policy leaves the choice."""
    past, T = cache.get_seq_length(), ids.shape[1]
    size = 1 if cache.one_at_a_time else T
    pieces = []
    for end in range(size, T + 1, size):
        real = None if mask is None else mask[:, : past + end]
        pieces.append(_pass(loop, ids[:, end - size : end], real, cache, last))
    return torch.cat(pieces, 1)


def _pass(loop: RecurrentDepthModel, ids: Tensor, real: Tensor | None, cache: GRTCache, last: bool) -> Tensor:
    exit, spent = cache.exit, cache.spent
    assert exit is not None
    new = None if real is None else real[:, -ids.shape[1] :]
    ctx = LoopContext(cache=cache.begin(loop, ids, real), real=None if new is None or new.all() else new)
    most = torch.full(ids.shape, exit.steps, device=ids.device)
    if cache.get_seq_length() + ids.shape[1] < cache.prompt_end:
        spent = None  # no token that is generated comes from these
    if spent is not None:
        most[:, -1] = spent.most()
    logits, depths = run_halting(loop, ids, ctx, exit, most, last=last)
    if spent is not None:
        spent.spend(depths[:, -1])
    return logits


def check_halting(inputs: dict[str, Any]) -> None:
    """ConfigError for what a pass whose tokens leave cannot give."""
    given = [name for name, value in inputs.items() if value is not None and value is not False]
    if given:
        raise ConfigError(f"{given[0]} does not go with exit, where each token takes its own steps: leave it out.")
    if torch.is_grad_enabled():
        raise ConfigError("exit keeps no gradients: use it under torch.no_grad(), or leave it out.")
