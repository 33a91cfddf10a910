"""GRTCache: grt's KVCache in the form that `generate` expects: a slot of keys and values for each step and block.

The prompt phase, in which the core's steps do not share yet (grt/cache/sharing.py), ends with `commit`, which
`generate` calls after the prompt; or by itself, as soon as a pass brings one token more.
"""

import torch
from torch import Tensor
from transformers import Cache

from grt.cache.kv import KVCache
from grt.errors import ConfigError
from grt.exits.loop import halting_cache
from grt.exits.policies import Exit, Spent
from grt.hf.config import GRTConfig
from grt.model.loop import RecurrentDepthModel

SMALLEST = 64  # tokens that a growing cache starts with; it doubles


class GRTCache(Cache):
    """For the sharing that `config` has now, and steps up to num_steps (default: the config's). max_cache_len: all the
    tokens there will ever be room for (static); None: it grows up to the model's context. exit: when tokens leave the
    loop, in place of num_steps (grt/hf/early_exit.py). Raises ConfigError (a ValueError) where it is full."""

    def __init__(
        self, config: GRTConfig, max_cache_len: int | None = None, num_steps: int | None = None,
        exit: Exit | None = None,
    ) -> None:  # fmt: skip
        super().__init__(layers=[])
        steps = config.num_steps if num_steps is None else num_steps
        self.num_steps = steps if exit is None else exit.steps
        self.exit = exit
        self.kv, self.context = config.kv, config.recurrent.context
        self.n_slots = config.blocks.n_executions(self.num_steps)
        self.fixed_room = max_cache_len
        self.in_prompt = False  # more of the prompt may come, even one token
        self.prompt_end = 0  # how many tokens it then has
        self.spent: Spent | None = None  # by the tokens generated after it
        self.store: KVCache | None = None  # made by the first pass, which knows how many rows there are

    def open_prompt(self, ids: Tensor, tokens: int) -> None:
        """A prompt of so many tokens comes, in however many pieces, of as many rows as ids (B, ...) has."""
        self.in_prompt, self.prompt_end = True, tokens
        self.spent = None if self.exit is None else Spent(self.exit, len(ids), ids.device)

    def begin(self, loop: RecurrentDepthModel, ids: Tensor, real: Tensor | None) -> KVCache:
        """Make room for ids (B, T); real (B, past + T): False where there is padding, also among the tokens that are
        there, whose rows may have ended since. Returns where the keys and values go."""
        B, T = ids.shape
        past = self.get_seq_length()
        store = self._with_room(loop, B, past + T)
        if past and not store.decoding and T == 1 and not self.in_prompt:
            store.commit()
        if past and real is not None and (store.real is not None or not real[:, :past].all()):
            if store.real is None:
                store.real = torch.ones(B, store.capacity, dtype=torch.bool, device=ids.device)
            store.real[:, :past] = real[:, :past]
        return store

    def _with_room(self, loop: RecurrentDepthModel, batch: int, needed: int) -> KVCache:
        if needed > self.context:
            raise ConfigError(f"{needed} tokens are more than the model's context of {self.context}: ask for fewer.")
        if self.store is None:
            room = self.fixed_room or min(self.context, max(needed, SMALLEST))
            if self.exit is None:
                self.store = KVCache(loop, batch, room, strategy=self.kv, depth=self.num_steps)
            else:
                self.store = halting_cache(loop, self.exit, batch, room, strategy=self.kv)
        if batch != self.store.batch:
            raise ConfigError(f"the cache holds {self.store.batch} rows, and {batch} came: give each batch its own.")
        if needed > self.store.capacity:
            if self.fixed_room is not None:
                raise ConfigError(f"the cache has room for {self.fixed_room} tokens, not {needed}: make it larger.")
            self.store.grow(min(self.context, max(needed, 2 * self.store.capacity)))
        return self.store

    @property
    def one_at_a_time(self) -> bool:
        """Tokens are decoded one by one from here on, since each has to be complete before the next begins."""
        return self.store is not None and self.store.decoding and self.store.core.sequential

    def commit(self) -> None:
        """The prompt is complete: from here on the core's steps share."""
        self.in_prompt = False
        if self.store is not None:
            self.store.commit()

    @property
    def depths(self) -> Tensor:
        """(B, tokens so far): the steps that each took; with an exit."""
        assert self.exit is not None and self.store is not None, "without an exit all take as many"
        self.store.end_pass()
        return self.store.core.ran[:, : self.store.length]  # type: ignore[attr-defined]

    # What `generate` asks of a cache

    def __len__(self) -> int:
        return self.n_slots

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0 if self.store is None else self.store.length

    def get_max_length(self, layer_idx: int | None = None) -> int:
        return -1 if self.fixed_room is None else self.fixed_room

    def reorder_cache(self, beam_idx: Tensor) -> None:
        if self.store is not None:
            self.store.reorder(beam_idx.to(self.store.device))
        if self.spent is not None:
            self.spent.keep(beam_idx.to(self.spent.steps.device))

    def batch_select_indices(self, indices: Tensor) -> None:
        self.reorder_cache(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.store is not None:
            self.reorder_cache(torch.arange(self.store.batch).repeat_interleave(repeats))

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last -tokens_to_remove tokens of every row."""
        if tokens_to_remove > 0:
            raise ConfigError(f"crop({tokens_to_remove}) is no number of tokens to remove: give it with a minus sign.")
        if self.store is not None:
            self.store.rollback(-tokens_to_remove)

    def reset(self) -> None:
        """Empty, with the same room, for as many rows."""
        if self.store is not None:
            self.store.clear()

    @property
    def is_initialized(self) -> bool:
        return self.store is not None

    @property
    def is_compileable(self) -> bool:
        return False

    @property
    def is_croppable(self) -> bool:
        return True

    @property
    def is_linear(self) -> list[bool]:
        return [False] * len(self)

    @property
    def is_sliding(self) -> list[bool]:
        return [False] * len(self)
