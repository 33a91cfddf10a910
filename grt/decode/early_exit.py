"""HaltingDecoder: a Decoder whose tokens leave the loop one by one (grt/exits/loop.py).

Shapes: B batch, T tokens, V vocabulary.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from grt.backbone.context import LoopContext
from grt.cache.kv import KVCache
from grt.decode.decoder import Decoder
from grt.exits.loop import halting_cache, run_halting
from grt.exits.policies import Exit, Spent
from grt.model.loop import RecurrentDepthModel


class HaltingDecoder(Decoder):
    """exit: how deep tokens go, those of the prompts too. Its budget is of generated ones: the first of them comes from
    the last token of the prompt, the depth of which it has."""

    def __init__(
        self,
        model: RecurrentDepthModel,
        prompts: Sequence[Sequence[int]],
        max_new: int,
        exit: Exit,
        *,
        kv: str = "full",
    ) -> None:
        self.exit = exit
        super().__init__(model, prompts, max_new, kv=kv, depth=exit.steps)
        self.fixed_shapes = False  # how many rows a step gathers depends on the data
        self.restart(prompts)

    def _cache(self, batch: int, capacity: int, prompt: int, kv: str) -> KVCache:
        return halting_cache(self.model, self.exit, batch, capacity, strategy=kv, prompt=prompt)

    def restart(self, prompts: Sequence[Sequence[int]]) -> None:
        super().restart(prompts)
        self.spent = Spent(self.exit, len(prompts), self.model.device)
        self.ran = self.spent.steps  # (B,), by the last token of each row

    @property
    def depths(self) -> list[int]:
        return self.ran.tolist()

    def prefill(self, chunk: int | None = None) -> Tensor:
        logits = super().prefill(chunk)
        self.spent.spend(self.ran)
        return logits

    def step(self, tokens: Tensor) -> Tensor:
        logits = super().step(tokens)
        self.spent.spend(self.ran)
        return logits

    @torch.inference_mode()
    def keep(self, rows: Sequence[int]) -> None:
        super().keep(rows)
        kept = torch.tensor(rows, device=self.model.device)
        self.spent.keep(kept)
        self.ran = self.ran[kept]

    def _last(self, ids: Tensor, ctx: LoopContext) -> Tensor:
        most = torch.full(ids.shape, self.exit.steps, device=ids.device)
        if self.cache.decoding or self.cache.length + ids.shape[1] == max(map(len, self.prompts)):
            most[:, -1] = self.spent.most()  # not a token that only ends a piece of the prompt
        logits, depths = run_halting(self.model, ids, ctx, self.exit, most, last=True)
        self.ran = depths[:, -1]
        return logits[:, -1]
