"""How the core's R steps share keys and values (subsec:kvcache). K_r(j) is what token j computed in step r. Token i at
step r reads C_r(j) of the tokens j before it, and its own K_r(i):

    prompt phase, until the first commit()    C_r(j) = K_r(j)
    decode phase    full     K_r(j)                       first     K_1(j)
                    last     K of the last step j ran     mean      the mean over the steps j ran
                    mod:K    K_s(j), the largest s that j ran with s = r modulo K
    first:all       K_1(j) for the own position too, in both phases

A token that ran fewer steps than another asks for is read at its deepest one.

Shapes: B batch, H heads, m new tokens of a pass, T tokens, c width of a head, R steps, n core blocks, S slots.
"""

import re
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F

from grt.errors import ConfigError

if TYPE_CHECKING:
    from grt.cache.kv import KVCache, Seen

STRATEGIES = ("full", "first", "last", "mean", "mod:K", "first:all")


def parse_strategy(text: str) -> tuple[str, int]:
    """Name and K of a strategy, K = 0 but for `mod:K`; ConfigError names the ones there are."""
    if found := re.fullmatch(r"mod:([1-9]\d{0,5})", text, re.ASCII):
        return "mod", int(found[1])
    if text in STRATEGIES and text != "mod:K":
        return text, 0
    raise ConfigError(f"kv is {text!r}: choose one of {', '.join(STRATEGIES)}, with a number of at least 1 for K.")


class SharedSteps:
    """The core's part of a KVCache: all R steps of the prompt in `prompt`, then S slots a token in `slots`.

    A token that is being decoded writes K_r where its slot is, so that it reads itself there; commit() leaves what the
    tokens after it are to read.
    """

    fixed_shapes = True

    def __init__(self, cache: "KVCache", n: int, strategy: str) -> None:
        self.cache = cache
        self.strategy, self.modulus = parse_strategy(strategy)
        self.executed = 0  # steps of the pass in progress
        self.ran = torch.zeros(cache.batch, cache.capacity, dtype=torch.long, device=cache.device)  # of each token
        self.uniform = 0, 0  # from where on, and what, `ran` says alike of all, tokens to come among them
        self.S = {"full": cache.depth, "mod": min(self.modulus, cache.depth)}.get(self.strategy, 1)
        self.slots = [[cache.room(2) for _ in range(self.S)] for _ in range(n)]
        self.prompt: Tensor | None = None
        self.clear()
        # Of the token in progress: K_1, or the sum of its K_r so far.
        precise = torch.promote_types(cache.dtype, torch.float32)
        self.first = [cache.room(2, tokens=1) for _ in range(n)] if self.strategy == "first" else []
        self.sums = [cache.room(2, tokens=1, dtype=precise) for _ in range(n)] if self.strategy == "mean" else []

    @property
    def sequential(self) -> bool:
        return self.strategy in ("last", "mean", "mod")

    def tensors(self) -> list[Tensor]:
        prompt = [] if self.prompt is None else [self.prompt]
        return [*(x for slots in self.slots for x in slots), *prompt, *self.first, *self.sums]

    def slot(self, step: int) -> int:
        return {"full": step, "mod": step % max(self.modulus, 1)}.get(self.strategy, 0)

    def extend(self, block: int, step: int, k: Tensor, v: Tensor) -> "Seen":
        cache, self.executed = self.cache, step + 1
        if self.strategy == "first:all":
            store = self.slots[block][0]
            return cache.write(store, k, v) if step == 0 else cache.read(store)
        if self.prompt is not None:
            return cache.write(self.prompt[:, block, step], k, v, self.prompt[:, block, max(step - 1, 0)])
        if self.first:
            return self._extend_first(block, step, k, v)
        if self.sums:
            self._add(self.sums[block], torch.stack((k, v)), step)
        slot = self.slot(step)
        # A token that has left takes its keys along, from step to step; a slot of an earlier step has some already.
        before = self.slots[block][step - 1] if 0 < step == slot else None
        return cache.write(self.slots[block][slot], k, v, before)

    def _add(self, sums: Tensor, new: Tensor, step: int) -> None:
        """new (2, B, H, 1, c) to the sums of the rows that go on."""
        going = self.cache.going
        for total, x in zip(sums, new, strict=True):
            if going is None:
                total.copy_(x if step == 0 else total + x)
            else:
                total.copy_(going.put(going.take(total) + x, total, tokens=2))

    def _extend_first(self, block: int, step: int, k: Tensor, v: Tensor) -> "Seen":
        """One token borrows its own place for K_r until end_pass() puts K_1 back; several have their K_r appended."""
        cache, store = self.cache, self.slots[block][0]
        if cache.new == 1:
            if step == 0:
                self.first[block].copy_(torch.stack((k, v)))
            return cache.write(store, k, v)
        if step == 0:
            return cache.write(store, k, v)
        keys, values, _ = cache.read(store)
        return append_own(keys, values, cache.seen_by(cache.new, strictly=True), k, v)

    def repeat(self, steps: int) -> None:
        """A pass of so many steps ran once more, at the same addresses, without extend()."""
        self.executed = steps

    def pause(self) -> None:
        if self.first and self.cache.new == 1:
            for (slot,), first in zip(self.slots, self.first, strict=True):
                slot[..., self.cache.start : self.cache.length, :] = first

    def end_pass(self) -> None:
        if not self.executed:
            return
        cache, ran, self.executed = self.cache, self.executed, 0
        here = slice(cache.start, cache.length)
        since, alike = self.uniform
        if cache.ran is not None:
            self.ran[:, here], self.uniform = cache.ran, (max(since, cache.length), alike)
        elif cache.start < since or ran != alike:
            self.ran[:, cache.start :], self.uniform = ran, (cache.start, ran)
        # A token that asks for more steps than these ran reads their deepest.
        if self.prompt is not None:
            if ran < self.cache.depth:
                self.prompt[:, :, ran:, :, :, here] = self.prompt[:, :, ran - 1 : ran, :, :, here]
            return
        self.pause()
        for block, slots in enumerate(self.slots):
            if self.sums:
                slots[0][..., here, :] = self.sums[block] / self.ran[:, None, here, None]
            for slot in slots[ran:]:
                slot[..., here, :] = slots[ran - 1][..., here, :]

    def compress(self) -> None:
        if self.prompt is None:
            return
        T = self.cache.length
        ran = self.ran[:, None, :T, None]  # (B, 1, T, 1): against (R, B, H, T, c)
        step = torch.arange(self.cache.depth, device=ran.device).view(-1, 1, 1, 1, 1)
        precise = torch.promote_types(self.prompt.dtype, torch.float32)
        for slot in range(self.S):
            chosen = step < ran
            if self.strategy == "first":
                chosen = step == 0
            elif self.strategy == "last":
                chosen = step == ran - 1
            elif self.strategy == "mod":
                deepest = torch.where(chosen & (step % self.modulus == slot), step, -1).amax(0)
                chosen = step == torch.where(deepest < 0, ran - 1, deepest)  # none is congruent: the deepest of all
            weights = chosen.to(precise)
            for block, slots in enumerate(self.slots):
                held = self.prompt[:, block, ..., :T, :].to(precise)  # (2, R, B, H, T, c)
                slots[slot][..., :T, :] = (held * weights).sum(1) / weights.sum(0).clamp_min(1)
        self.prompt = None

    def clear(self) -> None:
        self.executed = 0
        if self.prompt is None and self.strategy in ("first", "last", "mean", "mod"):
            self.prompt = self.cache.room(2, len(self.slots), self.cache.depth, tokens=self.cache.prompt)

    def reorder(self, rows: Tensor) -> None:
        def pick(stores: list[Tensor]) -> list[Tensor]:
            return [x.index_select(-4, rows) for x in stores]

        self.slots = [pick(slots) for slots in self.slots]
        self.first, self.sums = pick(self.first), pick(self.sums)
        self.prompt = None if self.prompt is None else pick([self.prompt])[0]
        self.ran = self.ran[rows]

    def grow(self, tokens: int) -> None:
        self.slots = [[longer(x, tokens) for x in slots] for slots in self.slots]
        self.prompt = None if self.prompt is None else longer(self.prompt, tokens)
        self.ran = F.pad(self.ran, (0, tokens), value=self.uniform[1])


def longer(store: Tensor, tokens: int) -> Tensor:
    """Keys or values (..., T, c) with room for more tokens."""
    return F.pad(store, (0, 0, 0, tokens))


def append_own(keys: Tensor, values: Tensor, before: Tensor, k: Tensor, v: Tensor) -> "Seen":
    """Keys that each of m tokens sees by `before` (..., m, T), with its own (B, H, m, c) behind them."""
    m = k.shape[2]
    own = torch.eye(m, dtype=torch.bool, device=k.device).expand(*before.shape[:-1], m)
    return torch.cat((keys, k), 2), torch.cat((values, v), 2), torch.cat((before, own), -1)
