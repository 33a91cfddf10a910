"""KVCache: keys and values of past tokens (subsec:kvcache). Prelude and coda keep one pair a token and block; what the
core keeps of its R steps, and who reads which of them, is grt/cache/sharing.py.

Shapes: B batch, H heads, m new tokens of a pass, T tokens so far, c width of a head.
"""

from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from grt.cache.sharing import SharedSteps, longer
from grt.errors import ConfigError
from grt.model.depth import DEEPEST
from grt.schema import at_least

if TYPE_CHECKING:
    from grt.exits.loop import Going
    from grt.model.loop import RecurrentDepthModel

Where = tuple[str, int, int]  # section, block, step
Seen = tuple[Tensor, Tensor, Tensor | None]  # keys, values, and which of them each new token sees (None: up to its own)


class CoreStore(Protocol):
    """The core's part of a cache; grt/cache/sharing.py has the usual one."""

    fixed_shapes: bool  # a one-token pass may be compiled

    @property
    def sequential(self) -> bool:
        """Tokens are decoded one at a time: each has to be committed before the next begins."""
        ...

    def tensors(self) -> list[Tensor]:
        """All that it holds."""
        ...

    def extend(self, block: int, step: int, k: Tensor, v: Tensor) -> Seen:
        """Store K_r and V_r of the new tokens, each (B, H, m, c); what they attend to."""
        ...

    def pause(self) -> None:
        """The new tokens stop here for now: leave what others' first steps are to read of them."""

    def end_pass(self) -> None:
        """The new tokens are complete: leave what later ones are to read of them."""

    def compress(self) -> None:
        """The prompt is complete: from here on steps share."""

    def reorder(self, rows: Tensor) -> None: ...

    def grow(self, tokens: int) -> None:
        """Room for this many more."""
        ...

    def clear(self) -> None: ...


class KVCache:
    """Preallocated room for `capacity` tokens of each of `batch` rows.

    A pass over new tokens is begin(), which the model calls, extend() by every attention, and, after the last pass of
    the prompt and after each later one, commit(). strategy: how the core's steps share (grt/cache/sharing.py).
    depth: the most steps of the core (default R). prompt: the most tokens before the first commit (default: capacity).
    readouts: the coda runs after every step, and keeps keys and values of each.
    Raises ConfigError where one of these sizes makes no sense for the model.
    """

    def __init__(
        self,
        model: "RecurrentDepthModel",
        batch: int,
        capacity: int,
        *,
        strategy: str = "full",
        depth: int | None = None,
        prompt: int | None = None,
        readouts: bool = False,
    ) -> None:
        config, weight = model.config, model.embed.tokens.weight
        layout = config.blocks
        self.batch, self.capacity = batch, capacity
        self.prompt = capacity if prompt is None else prompt
        self.depth = layout.R if depth is None else depth
        self._check_sizes(config.context, layout.R)
        self.dtype, self.device = weight.dtype, weight.device
        self.head = config.n_heads, config.d_model // config.n_heads
        self.length = self.new = 0
        self.decoding = False
        self.real: Tensor | None = None  # (B, capacity): False where a row has padding
        self.visible: Tensor | None = None  # of the pass: (m, T) or (B, 1, m, T)
        self.going: Going | None = None  # of the pass: who is still in the loop (grt/exits/loop.py); None: all
        self.ran: Tensor | None = None  # of the pass, (B, m): the steps that each token took; None: all that there were
        self.frozen = False
        self.index = torch.zeros(1, dtype=torch.long, device=self.device)  # frozen: where the token in progress goes
        self.place = torch.zeros(batch, 1, dtype=torch.long, device=self.device)  # frozen: its positions
        self.shown = torch.zeros(batch, 1, 1, capacity, dtype=torch.bool, device=self.device)  # frozen: what it sees
        self.one = self.index, self.shown  # these two while several tokens are in progress, which have their own
        # A tensor for each block: compiled code that writes into one must not have to copy the others.
        outer = (("prelude", layout.p), ("coda", 0 if readouts else layout.c))
        self.outer = {section: [self.room(2) for _ in range(n)] for section, n in outer}
        self.core: CoreStore = model.rule.store(self, layout.n, strategy)
        self.readouts = SharedSteps(self, layout.c, "full") if readouts else None
        self.by_step = [self.core] if self.readouts is None else [self.core, self.readouts]

    def _check_sizes(self, context: int, R: int) -> None:
        at_least("batch", self.batch, 1)
        at_least("capacity", self.capacity, 1)
        at_least("prompt", self.prompt, 1)
        at_least("depth", self.depth, min(R, 1))  # a dense model has no steps
        if self.capacity > context:
            raise ConfigError(
                f"a cache of {self.capacity} tokens is more than model.context {context}: make it smaller."
            )
        if self.prompt > self.capacity:
            raise ConfigError(f"prompt is {self.prompt}: it must be at most the capacity, {self.capacity}.")
        if self.depth > DEEPEST * max(R, 1):
            raise ConfigError(f"depth is {self.depth}: it must be at most {DEEPEST} times the model's {R} steps.")

    def room(self, *sizes: int, tokens: int | None = None, dtype: torch.dtype | None = None) -> Tensor:
        """Zeros (*sizes, B, H, tokens, c)."""
        H, c = self.head
        tokens = self.capacity if tokens is None else tokens
        return torch.zeros(*sizes, self.batch, H, tokens, c, dtype=dtype or self.dtype, device=self.device)

    @property
    def nbytes(self) -> int:
        """Bytes of the keys and values held now; in the prompt phase with the room for all of its steps."""
        held = [*self.outer["prelude"], *self.outer["coda"], *(x for store in self.by_step for x in store.tensors())]
        return sum(x.untyped_storage().nbytes() for x in held)

    # A pass

    @property
    def start(self) -> int:
        """Index of the first new token."""
        return self.length - self.new

    def check_steps(self, steps: int) -> None:
        """ConfigError for a pass of more steps than there is room for."""
        if steps > self.depth:
            raise ConfigError(f"depth {steps} is beyond the {self.depth} steps of the cache: make it deeper.")

    def begin(self, new: int, real: Tensor | None = None) -> Tensor:
        """Make room for `new` tokens of each row; real (B, new): False where a row has padding, which comes first.
        Returns their positions, (new,) or (B, 1..new)."""
        if self.frozen:
            if new != self.place.shape[1]:
                raise ConfigError(f"a frozen cache takes one token at a time, and {new} came: feed them one by one.")
            return self.place
        if torch.is_grad_enabled():
            raise ConfigError("a cache keeps no gradients: decode under torch.inference_mode() or torch.no_grad().")
        self.end_pass()
        self.going = self.ran = None
        needed, most = self.length + new, self.capacity if self.decoding else self.prompt
        if needed > most:
            what = "tokens" if self.decoding else "tokens of prompt"
            raise ConfigError(f"the cache has room for {most} {what}, and {needed} are needed: make it larger.")
        assert new == 1 or not (self.decoding and self.core.sequential), "this strategy decodes one token at a time"
        self.length, self.new = needed, new
        if real is not None and self.real is None and not real.all():
            self.real = torch.ones(self.batch, self.capacity, dtype=torch.bool, device=self.device)
        if self.real is not None:
            self.real[:, self.start : needed] = True if real is None else real
        self.visible = None if self.real is None and (new == 1 or self.start == 0) else self.seen_by(new)
        if self.real is None:
            return torch.arange(self.start, needed, device=self.device)
        return (self.real.cumsum(1) - 1).clamp_min(0)[:, self.start : needed]

    def seen_by(self, new: int, strictly: bool = False) -> Tensor:
        """Which keys the last `new` tokens see, (new, T) or with padding (B, 1, new, T): those up to their own, or
        strictly before."""
        if self.frozen:
            own, T = self.index, self.capacity
        else:
            own, T = torch.arange(self.length - new, self.length, device=self.device), self.length
        own, keys = own[:, None], torch.arange(T, device=self.device)
        if self.real is None:
            return keys < own if strictly else keys <= own
        before = (keys < own) & self.real[:, None, None, :T]
        return before if strictly else before | (keys == own)  # padding sees itself: no row is empty

    def extend(self, where: Where, k: Tensor, v: Tensor) -> Seen:
        """Store what the new tokens computed (B, H, m, c) at (section, block, step)."""
        section, block, step = where
        by_step = self.core if section == "core" else self.readouts if section == "coda" else None
        if by_step is None:
            return self.write(self.outer[section][block], k, v)
        self.check_steps(step + 1)
        return by_step.extend(block, step, k, v)

    def write(self, store: Tensor, k: Tensor, v: Tensor, before: Tensor | None = None) -> Seen:
        """Into store (2, B, H, capacity, c), at the places of the new tokens. Those that have left the loop keep what
        is there, or take what is in `before`, another such store."""
        if self.frozen:
            store.index_copy_(3, self.index, torch.stack((k, v)))
            return self.read(store)
        here = slice(self.start, self.length)
        for into, new, old in zip(store, (k, v), store if before is None else before, strict=True):
            into[:, :, here] = new if self.going is None else self.going.put(new, old[:, :, here], tokens=2)
        return self.read(store)

    def read(self, store: Tensor) -> Seen:
        if self.frozen:
            return store[0], store[1], self.shown
        keys, values, visible = store[0, :, :, : self.length], store[1, :, :, : self.length], self.visible
        if self.going is None:
            return keys, values, visible
        if visible is not None and visible.dim() == 4:  # one of two dimensions is the same for every row
            visible = self.going.take(visible)
        return self.going.take(keys), self.going.take(values), visible

    def end_pass(self) -> None:
        for store in self.by_step:
            store.end_pass()

    def commit(self) -> None:
        """End a pass: the first time, the prompt's, from where on steps share; then, the tokens that were decoded."""
        self.end_pass()
        if not self.decoding:
            self.core.compress()
        self.decoding = True

    # Between passes

    def rollback(self, tokens: int) -> None:
        """Forget the last `tokens` tokens of every row, as if they had never come."""
        if not 0 <= tokens <= self.length:
            raise ConfigError(f"{tokens} tokens cannot be taken back from {self.length}: take back fewer.")
        self.end_pass()
        self.length, self.new = self.length - tokens, 0
        if self.frozen:
            self.freeze()

    def reorder(self, rows: Tensor) -> None:
        """Row i becomes what row rows[i] was (beam search; a batch whose finished rows leave)."""
        self.end_pass()
        self.batch, self.new = len(rows), 0
        self.outer = {name: [x.index_select(1, rows) for x in stores] for name, stores in self.outer.items()}
        for store in self.by_step:
            store.reorder(rows)
        if self.real is not None:
            self.real = self.real[rows]
        self.place, self.shown = self.place[rows], self.shown[rows]
        self.one = self.index, self.shown

    def grow(self, capacity: int) -> None:
        """Room for more tokens, up to model.context; what is held moves to larger tensors. Not when frozen."""
        more = capacity - self.capacity
        self.capacity, self.prompt = capacity, self.prompt + more
        self.outer = {name: [longer(x, more) for x in stores] for name, stores in self.outer.items()}
        for store in self.by_step:
            store.grow(more)
        self.shown = F.pad(self.shown, (0, more))
        self.one = self.index, self.shown
        if self.real is not None:
            self.real = F.pad(self.real, (0, more), value=True)

    def clear(self) -> None:
        """Empty, for the next prompt, with everything where it was."""
        self.length = self.new = 0
        self.decoding = self.frozen = False
        self.real = self.visible = None
        for store in self.by_step:
            store.clear()

    def freeze(self) -> None:
        """After the prompt: from now on one token at a time, each announced by `advance`, at places that tensors name
        and no Python number, so that the pass over it can be compiled, or captured as a CUDA graph, once."""
        assert self.decoding, "commit the prompt first"
        self.frozen = True
        self.index, self.shown = self.one
        self.index.fill_(self.length - 1)
        self.shown.fill_(False)
        self.shown[..., : self.length] = True if self.real is None else self.real[:, None, None, : self.length]
        self.place.copy_(self.shown[:, 0].sum(-1) - 1)

    def advance(self) -> None:
        """Make room for the next token of a frozen cache; then come its pass and commit()."""
        assert self.frozen, "freeze the cache first"
        if self.length == self.capacity:
            raise ConfigError(f"the cache has room for {self.capacity} tokens, and one more is needed: make it larger.")
        self.length, self.new = self.length + 1, 1
        self.index += 1
        self.place += 1
        self.shown[..., self.length - 1] = True
        if self.real is not None:
            self.real[:, self.length - 1] = True

    def rejoin(self, tokens: int) -> None:
        """The last `tokens` tokens of a frozen cache, which came one by one and stopped, go on side by side; then come
        their pass, commit() and, even if it takes nothing back, rollback()."""
        assert self.frozen and self.real is None, "freeze a cache without padding first"
        self.new = tokens
        self.index = torch.arange(self.start, self.length, device=self.device)
        self.shown = self.seen_by(tokens).expand(self.batch, 1, -1, -1)
