"""Window: text beyond the context, each token from a fresh pass over the last `context` ones, whose positions change as
the window slides, so that no cache could serve it.

Shapes: B batch, V vocabulary.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from grt.backbone.context import LoopContext, left_padded
from grt.decode.decoder import check_prompts
from grt.model.depth import Depth
from grt.model.loop import RecurrentDepthModel, last_of


class Window:
    """What Decoder offers, without a cache and without an end."""

    def __init__(
        self, model: RecurrentDepthModel, prompts: Sequence[Sequence[int]], *, depth: int | None = None
    ) -> None:
        check_prompts(model, prompts)
        self.model = model
        self.steps = model.full_depth if depth is None else Depth(depth)
        model.check_depth(self.steps.steps, least=1)
        self.rows = [list(prompt) for prompt in prompts]

    @torch.inference_mode()
    def prefill(self) -> Tensor:
        """Logits (B, V) after each row as it is now."""
        ids, real = left_padded([row[-self.model.config.context :] for row in self.rows], self.model.device)
        ctx = LoopContext(real=real)
        return self.model.logits(last_of(self.model.states(ids, ctx, self.steps)), ctx, last=True)[:, -1]

    def step(self, tokens: Tensor) -> Tensor:
        """Logits (B, V) after one more token of each row; tokens (B,)."""
        for row, token in zip(self.rows, tokens.tolist(), strict=True):
            row.append(token)
        return self.prefill()

    @property
    def depths(self) -> list[int]:
        return [self.steps.steps] * len(self.rows)

    def keep(self, rows: Sequence[int]) -> None:
        """Go on with these rows only, in this order."""
        self.rows = [self.rows[i] for i in rows]
