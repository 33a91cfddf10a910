"""Halting: the loop for tokens that leave it on their own (grt/exits/policies.py says when).

A token that leaves after step k has h = h_k, and its keys and values at steps k+1..R are those of step k, in every
mode: read alone, in a batch, or all tokens of a text at once. The cache sees to that, so halting always needs one.

Where each row of a batch brings one token, those that go on are gathered, and the core, the rule and the read-outs
run on them alone. Where rows bring many, every token is computed until none goes on, and what has left stays as it was.

A policy that reads out sees coda and head after every step. There the coda is part of the loop: its keys are kept by
step, and a token reads the others' of its own step (those of their last one, where they have left).

Shapes: B batch, T tokens, N of the B rows, d width, V vocabulary.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from grt.backbone.context import LoopContext
from grt.cache.kv import KVCache
from grt.exits.policies import Exit, Step
from grt.model.depth import Depth
from grt.model.loop import RecurrentDepthModel


@dataclass
class Going:
    """The tokens of a pass that go on, (B, T); with one token a row, `rows` (N,) of them are gathered."""

    mask: Tensor
    rows: Tensor | None = None

    @classmethod
    def on(cls, mask: Tensor) -> "Going | None":
        """None where all of them do."""
        if mask.all():
            return None
        return cls(mask, mask[:, 0].nonzero()[:, 0] if mask.shape[1] == 1 else None)

    def take(self, x: Tensor) -> Tensor:
        """Of x (B, ...) what is computed: (N, ...), or all of it."""
        return x if self.rows is None else x.index_select(0, self.rows)

    def put(self, new: Tensor, old: Tensor, tokens: int = 1) -> Tensor:
        """`new` (N or B, ...) of those that go on, `old` (B, ...) of the others; tokens: which dimension they are."""
        new = new.to(old.dtype)
        if self.rows is not None:
            return old.index_copy(0, self.rows, new)
        shape = [len(self.mask), *(1 for _ in range(1, old.dim()))]
        shape[tokens] = self.mask.shape[1]
        return torch.where(self.mask.view(shape), new, old)


def take(x: Tensor, going: Going | None) -> Tensor:
    return x if going is None else going.take(x)


def put(new: Tensor, old: Tensor | None, going: Going | None) -> Tensor:
    return new if going is None or old is None else going.put(new, old)


def halting_cache(
    model: RecurrentDepthModel, exit: Exit, batch: int, capacity: int, *, strategy: str = "full",
    prompt: int | None = None,
) -> KVCache:  # fmt: skip
    """A cache with what this exit needs."""
    return KVCache(
        model, batch, capacity, strategy=strategy, depth=exit.steps, prompt=prompt, readouts=exit.policy.reads_out
    )


def run_halting(
    model: RecurrentDepthModel, ids: Tensor, ctx: LoopContext, exit: Exit, most: Tensor | None = None,
    scores: list[Tensor] | None = None, last: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """One pass over ids (B, T): logits (B, T, V) after the last step of each token, and how many steps each took,
    (B, T). most (B, T): no deeper than this. scores: takes the policy's scores of each step, (B, T). last: the logits
    of the last position only, where the policy leaves the choice."""
    cache, policy = ctx.cache, exit.policy
    assert cache is not None, "a token that has left is seen by its keys, which a cache holds"
    states = model.states(ids, ctx, Depth(exit.steps))
    h = next(states)
    on = torch.ones(ids.shape, dtype=torch.bool, device=ids.device)
    depths, logits, memory = on.long(), None, {}
    for r in range(1, exit.steps + 1):
        before, h = h, next(states)
        going = cache.going
        depths = torch.where(on, r, depths)
        seen = Step(r, take(h, going), take(before, going), memory={k: take(x, going) for k, x in memory.items()})
        if policy.reads_out:
            seen.logits = model.logits(seen.h, ctx)
            logits = put(seen.logits, logits, going)
        if policy.learned:
            seen.leaves = model.rule.exit_probability(ctx)
        score = policy.score(seen)
        if scores is not None:
            scores.append(score)
        memory = {name: put(x, memory.get(name), going) for name, x in seen.memory.items()}
        leaves = policy.leaving(score)
        on = on & ~put(leaves, torch.ones_like(on), going)
        on = on if most is None else on & (r < most)
        on = on if ctx.real is None else on & ctx.real
        if not on.any():
            break
        cache.going = Going.on(on)
    cache.going, cache.ran = None, depths
    return logits if logits is not None else model.logits(h, ctx, last), depths
