"""KVCache: keys and values of past tokens, and how the core's R steps share them (subsec:kvcache).

K_r(j) is what token j computed in step r of the core. Token i at step r reads C_r(j) of the tokens j before it, and its
own K_r(i):

    prompt phase, until the first commit()    C_r(j) = K_r(j)
    decode phase    full     K_r(j)                       first     K_1(j)
                    last     K of the last step j ran     mean      the mean over the steps j ran
                    mod:K    K_s(j), the largest s that j ran with s = r modulo K
    first:all       K_1(j) for the own position too, in both phases

Prelude and coda have one step. A token that ran fewer steps than another asks for is read at its deepest one.

Shapes: B batch, H heads, T tokens, c width of a head, R steps.
"""

import re

import torch
from torch import Tensor

from grt.config import ConfigError, ModelConfig

Where = tuple[str, int, int]  # section, block, step
STRATEGIES = ("full", "first", "last", "mean", "mod:K", "first:all")


def parse_strategy(text: str) -> tuple[str, int]:
    """Name and K of a strategy, K = 0 but for `mod:K`; ConfigError names the ones there are."""
    if found := re.fullmatch(r"mod:([1-9]\d{0,5})", text, re.ASCII):
        return "mod", int(found[1])
    if text in STRATEGIES and text != "mod:K":
        return text, 0
    raise ConfigError(f"kv is {text!r}: choose one of {', '.join(STRATEGIES)}, with a number of at least 1 for K.")


class KVCache:
    """Preallocated room for `capacity` tokens of each of `batch` rows.

    A pass over new tokens is begin(), extend() by every attention, and, in the decode phase, commit(). strategy: see
    above. depth: the most steps of the core. prompt: tokens that come before the first commit (default: capacity).
    """

    def __init__(
        self,
        config: ModelConfig,
        batch: int,
        capacity: int,
        *,
        strategy: str = "full",
        depth: int | None = None,
        prompt: int | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        self.strategy, self.modulus = parse_strategy(strategy)
        layout = config.blocks
        self.depth = layout.R if depth is None else depth
        self.batch, self.capacity = batch, capacity
        self.length = self.new = self.executed = 0
        self.decoding = False
        self.real: Tensor | None = None  # (B, capacity): False where a row has padding
        self.ran = torch.zeros(batch, capacity, dtype=torch.long, device=device)  # steps that each token ran
        self.visible: Tensor | None = None  # of the pass: (m, T) or (B, 1, m, T)
        self.index: Tensor | None = None  # (1,) once frozen: where the token in progress goes
        c = config.d_model // config.n_heads

        def room(*sizes: int, tokens: int = capacity, kind: torch.dtype = dtype) -> Tensor:
            return torch.zeros(*sizes, batch, config.n_heads, tokens, c, dtype=kind, device=device)

        self.outer = {"prelude": room(2, layout.p), "coda": room(2, layout.c)}  # keys and values of each block
        n, slots = layout.n, self.slots
        self.core = room(2, n, slots)
        shares = self.strategy in ("first", "last", "mean", "mod")
        self.prompt = room(2, n, self.depth, tokens=prompt or capacity) if shares else None
        self.first = room(2, n, tokens=1) if self.strategy == "first" else None  # K_1 of the token in progress
        self.sums = (
            room(2, n, tokens=1, kind=torch.promote_types(dtype, torch.float32)) if self.strategy == "mean" else None
        )

    @property
    def slots(self) -> int:
        """Slots of a core block in the decode phase."""
        return {"full": self.depth, "mod": min(self.modulus, self.depth)}.get(self.strategy, 1)

    def slot(self, step: int) -> int:
        return {"full": step, "mod": step % max(self.modulus, 1)}.get(self.strategy, 0)

    @property
    def sequential(self) -> bool:
        """Tokens of the decode phase have to come one at a time."""
        return self.decoding and self.strategy in ("last", "mean", "mod")

    # A pass

    def begin(self, new: int, real: Tensor | None = None) -> Tensor:
        """Make room for `new` tokens of each row; real (B, new): False where a row has padding, which comes first.
        Returns their positions, (new,) or (B, new)."""
        if self.index is not None:
            return self.place
        self._fill_missing_steps()
        if self.length + new > self.capacity:
            raise ConfigError(
                f"the cache holds {self.capacity} tokens and {self.length + new} are needed: make it larger."
            )
        if self.prompt is not None and not self.decoding and self.length + new > self.prompt.shape[-2]:
            raise ConfigError(
                f"the cache was made for a prompt of {self.prompt.shape[-2]} tokens, this one has {self.length + new}: "
                "say so when making it."
            )
        assert new == 1 or not self.sequential, "this strategy decodes one token at a time"
        start, self.length, self.new, self.executed = self.length, self.length + new, new, 0
        if real is not None and self.real is None and not real.all():
            self.real = torch.ones(self.batch, self.capacity, dtype=torch.bool, device=real.device)
        if self.real is not None:
            self.real[:, start : self.length] = True if real is None else real
        self.visible = self._causal(start)
        if self.real is None:
            return torch.arange(start, self.length, device=self.core.device)
        return (self.real.cumsum(1) - 1).clamp_min(0)[:, start : self.length]

    def _causal(self, start: int, strictly: bool = False) -> Tensor | None:
        """Which keys the new tokens see; None where plain causal attention, or all of them, is the answer."""
        stop, device = self.length, self.core.device
        if self.real is None and (self.new == 1 or start == 0) and not strictly:
            return None
        own = torch.arange(start, stop, device=device)[:, None]
        keys = torch.arange(stop, device=device)
        seen = keys < own if strictly else keys <= own
        if self.real is None:
            return seen
        return (seen & self.real[:, None, None, :stop]) | (keys == own) & (
            not strictly
        )  # padding sees itself: no empty row

    def extend(self, where: Where, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Store what the new tokens computed (B, H, m, c) at (section, block, step); returns the keys and values that
        they attend to, and which of them each sees (None: those up to its own)."""
        section, block, step = where
        if section != "core":
            return self._write(self.outer[section][:, block], k, v)
        if step >= self.depth:
            raise ConfigError(f"depth {step + 1} is beyond the {self.depth} steps of the cache: make it deeper.")
        self.executed = step + 1
        if self.strategy == "first:all":
            return self._write(self.core[:, block, 0], k, v) if step == 0 else self._read(self.core[:, block, 0])
        if self.prompt is not None and not self.decoding:
            return self._write(self.prompt[:, block, step], k, v)
        if self.first is not None:
            return self._extend_first(block, step, k, v)
        if self.sums is not None:
            new = torch.stack((k, v))
            self.sums[:, block] = new if step == 0 else self.sums[:, block] + new
        return self._write(self.core[:, block, self.slot(step)], k, v)

    def _write(self, store: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        if self.index is not None:
            store[0].index_copy_(2, self.index, k)
            store[1].index_copy_(2, self.index, v)
        else:
            here = slice(self.length - self.new, self.length)
            store[0, :, :, here], store[1, :, :, here] = k, v
        return self._read(store)

    def _read(self, store: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        if self.index is not None:
            return store[0], store[1], self.visible
        return store[0, :, :, : self.length], store[1, :, :, : self.length], self.visible

    def _extend_first(self, block: int, step: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """One token borrows its own place for K_r until commit() puts K_1 back; several have their K_r appended."""
        assert self.first is not None
        if self.new == 1:
            if step == 0:
                self.first[0, block], self.first[1, block] = k, v
            return self._write(self.core[:, block, 0], k, v)
        if step == 0:
            return self._write(self.core[:, block, 0], k, v)
        keys, values, _ = self._read(self.core[:, block, 0])
        before = self._causal(self.length - self.new, strictly=True)
        assert before is not None
        own = torch.eye(self.new, dtype=torch.bool, device=k.device).expand(*before.shape[:-1], self.new)
        return torch.cat((keys, k), 2), torch.cat((values, v), 2), torch.cat((before, own), -1)

    # Decoding at fixed addresses

    def freeze(self) -> None:
        """After the prompt: from now on one token at a time, each announced by `advance`, at places that tensors name
        and no Python number, so that the pass over it can be compiled, or captured as a CUDA graph, once."""
        assert self.decoding, "commit the prompt first"
        device = self.core.device
        self.index = torch.tensor([self.length - 1], device=device)
        self.visible = torch.zeros(self.batch, 1, 1, self.capacity, dtype=torch.bool, device=device)
        self.visible[..., : self.length] = True if self.real is None else self.real[:, None, None, : self.length]
        self.place = self.visible[:, 0].sum(-1) - 1  # (B, 1): positions

    def advance(self) -> None:
        """Make room for the next token of a frozen cache; then comes its pass, then commit()."""
        assert self.index is not None and self.visible is not None
        if self.length == self.capacity:
            raise ConfigError(f"the cache holds {self.capacity} tokens and one more is needed: make it larger.")
        self.length, self.new = self.length + 1, 1
        self.index += 1
        self.place += 1
        self.visible[..., self.length - 1] = True

    # After a pass

    def commit(self) -> None:
        """End a pass: the first time, compress the prompt and begin to decode; then, the tokens that were decoded."""
        if not self.decoding:
            self._fill_missing_steps()
            self._compress_prompt()
            self.decoding, self.prompt = True, None
        elif self.new:
            here = slice(self.length - 1, self.length)
            if self.first is not None and self.new == 1:
                self.core[:, :, 0, :, :, here] = self.first
            if self.sums is not None and self.executed:
                self.core[:, :, 0, :, :, here] = self.sums / self.executed
            self._fill_missing_steps()

    def rollback(self, tokens: int) -> None:
        """Forget the last `tokens` tokens of every row, as if they had never come."""
        if not 0 <= tokens <= self.length:
            raise ConfigError(f"{tokens} tokens cannot be taken back from {self.length}: take back fewer.")
        self._fill_missing_steps()
        self.length, self.new = self.length - tokens, 0

    def reorder(self, rows: Tensor) -> None:
        """Row i becomes what row rows[i] was (beam search, a batch whose finished rows leave)."""
        self._fill_missing_steps()
        self.batch, self.new = len(rows), 0
        for section, store in self.outer.items():
            self.outer[section] = store.index_select(2, rows)
        self.core = self.core.index_select(3, rows)
        if self.prompt is not None:
            self.prompt = self.prompt.index_select(3, rows)
        for name in ("first", "sums"):
            if (store := getattr(self, name)) is not None:
                setattr(self, name, store.index_select(2, rows))
        self.ran = self.ran[rows]
        if self.real is not None:
            self.real = self.real[rows]

    def _fill_missing_steps(self) -> None:
        """Tokens that ran fewer steps than there are slots: a later token that asks for more reads their deepest."""
        if not self.executed:
            return
        here = slice(self.length - self.new, self.length)
        self.ran[:, here] = self.executed
        store = self.core if self.prompt is None else self.prompt
        if self.executed < store.shape[2]:
            store[:, :, self.executed :, :, :, here] = store[:, :, self.executed - 1 : self.executed, :, :, here]
        self.executed = 0

    def _compress_prompt(self) -> None:
        """Fill the slots of the decode phase from all steps of the prompt."""
        if self.prompt is None:
            return
        T = self.length
        ran = self.ran[:, None, :T, None]  # (B, 1, T, 1): against (..., R, B, H, T, c)
        step = torch.arange(self.depth, device=ran.device).view(-1, 1, 1, 1, 1)
        for slot in range(self.slots):
            chosen = step < ran
            if self.strategy == "first":
                chosen = step == 0
            elif self.strategy == "last":
                chosen = step == ran - 1
            elif self.strategy == "mod":
                same = chosen & (step % self.modulus == slot)
                deepest = torch.where(same, step, -1).amax(0)
                chosen = step == torch.where(deepest < 0, ran - 1, deepest)  # none is congruent: the deepest of all
            weights = chosen.to(torch.promote_types(self.core.dtype, torch.float32))
            held = self.prompt[..., :T, :].to(weights.dtype)
            self.core[:, :, slot, :, :, :T] = (held * weights).sum(2) / weights.sum(0).clamp_min(1)

    @property
    def nbytes(self) -> int:
        """Bytes of the keys and values held now; in the prompt phase with the room for all of its steps."""
        held = [*self.outer.values(), self.core, self.prompt, self.first, self.sums]
        return sum(store.untyped_storage().nbytes() for store in held if store is not None)
