"""The core's part of a KVCache where a router decides (arXiv 2507.10524, section 2.2.2): a token has keys of the steps
that it took. Token i at step r reads of the tokens j before it, and its own K_r(i):

    prompt phase, and `full`    K_r(j) of those that took step r     (recursion-wise caching)
    `first`, decode phase       K_1(j) of all                        (recursive sharing)

Each step's keys stand close together, row by row, with room for what the capacities say; it grows where the tokens of a
row go deeper than that.

Shapes: B batch, H heads, m new tokens of a pass, K of them in a step, c width of a head, R steps.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from grt.cache.kv import KVCache, Seen
from grt.cache.sharing import append_own, parse_strategy
from grt.errors import ConfigError


class RoutedSteps:
    """`ran` counts the steps of each token: routers are nested, so step r (from 0) is of the tokens with ran > r."""

    fixed_shapes = False  # how many rows a step gathers depends on the data
    sequential = False

    def __init__(self, cache: KVCache, n: int, strategy: str, shares: Sequence[float]) -> None:
        self.cache = cache
        self.strategy, _ = parse_strategy(strategy)
        if strategy not in ("full", "first"):
            raise ConfigError(
                f"kv is {strategy!r}, which may ask for keys of steps that a token did not take: choose full or first."
            )
        self.ran = torch.zeros(cache.batch, cache.capacity, dtype=torch.long, device=cache.device)
        self.n, self.shares = n, shares[: cache.depth]
        self.steps: list[Tensor] = []
        self.clear()
        self.rows = self.chosen = torch.empty(0)

    def tensors(self) -> list[Tensor]:
        return self.steps

    def select(self, step: int, rows: Tensor, chosen: Tensor) -> None:
        """The tokens that step `step` computes: places among the new ones (B, K), and False where that is padding."""
        self.rows, self.chosen = rows, chosen
        new = self.ran[:, self.cache.start : self.cache.length]
        if step == 0:
            new.zero_()
        new.scatter_(1, rows, torch.where(chosen, step + 1, new.gather(1, rows)))

    def extend(self, block: int, step: int, k: Tensor, v: Tensor) -> Seen:
        start, length = self.cache.start, self.cache.length
        if step and self.strategy == "first" and self.cache.decoding:
            keys, values = self.steps[0][0, block], self.steps[0][1, block]
            at = (self.ran[:, :length] > 0).cumsum(1)[:, start:].gather(1, self.rows) - 1  # (B, K) in the first step
            used = torch.arange(int(at.max()) + 1, device=k.device)
            before = (used < at[..., None])[:, None]  # (B, 1, K, used)
            return append_own(keys[:, :, : len(used)], values[:, :, : len(used)], before, k, v)
        earlier = (self.ran[:, :start] > step).sum(1, keepdim=True)
        at = earlier + torch.arange(k.shape[2], device=k.device)  # (B, K); what padding leaves here is written over
        used = torch.arange(int(at.max()) + 1, device=k.device)
        self._grow(step, len(used))
        keys, values = self.steps[step][0, block], self.steps[step][1, block]
        for store, new in ((keys, k), (values, v)):
            store.scatter_(2, at[:, None, :, None].expand_as(new), new)
        return keys[:, :, : len(used)], values[:, :, : len(used)], (used <= at[..., None])[:, None]

    def _grow(self, step: int, needed: int) -> None:
        room = self.steps[step].shape[-2]
        if needed > room:
            self.steps[step] = F.pad(self.steps[step], (0, 0, 0, max(needed - room, room // 2)))

    def pause(self) -> None:
        """Nothing is left to do."""

    def end_pass(self) -> None:
        """Nothing is left to do: what a token did not compute, nobody reads."""

    def compress(self) -> None:
        if self.strategy == "first":
            del self.steps[1:]

    def clear(self) -> None:
        self.ran.zero_()
        for share in self.shares[len(self.steps) :]:  # all of them at first; those that sharing has dropped later on
            self.steps.append(self.cache.room(2, self.n, tokens=math.ceil(share * self.cache.capacity)))

    def reorder(self, rows: Tensor) -> None:
        self.steps = [x.index_select(-4, rows) for x in self.steps]
        self.ran = self.ran[rows]

    def grow(self, tokens: int) -> None:
        self.ran = F.pad(self.ran, (0, tokens))  # the keys grow where they have to
