"""LoopContext: what one pass through the model carries along beside the state."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

Tap = Callable[[Tensor, "LoopContext"], Tensor | None]


@dataclass
class LoopContext:
    """Scratch of one pass: where the loop is, who listens, and what a rule keeps for itself.

    taps: name -> function(x, ctx). What the function returns takes the place of x (None: x stays), so recording and
    intervening are the same thing. Names: anchor, input, proposal, gate, state, attention, state_noise, gate_noise.
    """

    taps: Mapping[str, Tap] = field(default_factory=dict)
    step: int = -1  # recurrence in progress, 0..R-1; -1 in the prelude, and the last one still in the coda
    section: str = ""  # prelude, core or coda
    block: int = 0  # index within the section
    carry: dict[str, Any] = field(default_factory=dict)  # a rule's own scratch
    aux: list[Tensor] = field(default_factory=list)  # auxiliary losses, already weighted

    def tap(self, name: str, x: Tensor) -> Tensor:
        """x, or what the function registered under `name` makes of it."""
        function = self.taps.get(name)
        if function is None:
            return x
        changed = function(x, self)
        return x if changed is None else changed
