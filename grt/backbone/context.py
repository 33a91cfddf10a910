"""LoopContext: what one pass through the model carries along beside the state."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from grt.cache.kv import KVCache

Tap = Callable[[Tensor, "LoopContext"], Tensor | None]
Around = Callable[[nn.Module, Tensor, "LoopContext"], Tensor]
LowRank = Mapping[str, tuple[Tensor, Tensor]]  # of a block's linears: name -> A (rank, d_in), B (d_out, rank)


@dataclass
class LoopContext:
    """Scratch of one pass: where the loop is, who listens, and what a rule keeps for itself.

    taps: name -> function(x, ctx). What the function returns takes the place of x (None: x stays), so recording and
    intervening are the same thing. Names: anchor, input, proposal, gate, state, attention, state_noise, gate_noise; and
    of methods other than GRT those that their files name.
    low_rank: what is added to the linears of the block in progress, B A x.
    around: called with a block, its input and this context in place of the block, to compute it again for the gradient.
    recompute: the loss computes its read-outs (coda, head) again in the backward pass instead of keeping them; taps
    in the coda are then called a second time, with the step as it was.
    Where tokens leave the loop one by one (grt/exits/loop.py), taps see those that go on.
    """

    taps: Mapping[str, Tap] = field(default_factory=dict)
    step: int = -1  # recurrence in progress, 0..R-1; -1 in the prelude, and the last one still in the coda
    section: str = ""  # prelude, core or coda
    block: int = 0  # index within the section
    carry: dict[str, Any] = field(default_factory=dict)  # a rule's own scratch
    of_tokens: dict[str, Tensor] = field(default_factory=dict)  # the part of it that is each token's, (B, T, ...)
    aux: list[Tensor] = field(default_factory=list)  # auxiliary losses, already weighted
    norm: nn.Module | None = None  # the model's final norm, for a rule that also norms inside the loop
    low_rank: LowRank | None = None
    around: Around | None = None
    recompute: bool = False
    cache: "KVCache | None" = None  # of earlier tokens
    positions: Tensor | None = None  # (T,) or (B, T): where in their rows the tokens stand; None: from 0 on
    real: Tensor | None = None  # (B, T): False where a row has padding, which comes first; None: nowhere
    seed: int = 0  # with a position, the key of what a rule draws outside of training

    def tap(self, name: str, x: Tensor) -> Tensor:
        """x, or what the function registered under `name` makes of it."""
        function = self.taps.get(name)
        if function is None:
            return x
        changed = function(x, self)
        return x if changed is None else changed


def left_padded(rows: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor | None]:
    """Ids (B, T) of rows that end together, and (B, T): False where a row has padding (None: nowhere)."""
    longest = max(map(len, rows))
    pads = [longest - len(row) for row in rows]
    ids = torch.tensor([[0] * pad + list(row) for pad, row in zip(pads, rows, strict=True)], device=device)
    real = torch.arange(longest, device=device) >= torch.tensor(pads, device=device)[:, None]
    return ids, real if any(pads) else None
