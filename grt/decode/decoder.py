"""Decoder: a batch of prompts through the model at once, then one token of each row after the other.

The one-token pass runs over buffers of fixed addresses (KVCache.freeze), so that it can be compiled as a whole, or on a
GPU be captured as a graph, at one fixed depth. With kept weights (grt/decode/quantize.py), one row is put onto a tape.

Shapes: B batch, T tokens, V vocabulary.
"""

import shlex
import shutil
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.utils.cpp_extension import get_cxx_compiler

from grt.backbone.context import LoopContext, left_padded
from grt.cache.kv import KVCache
from grt.cache.sharing import SharedSteps
from grt.cpu.captured import Tape, Unrecordable
from grt.cpu.one_row import OPTIONS, OneRow
from grt.decode.quantize import Kept
from grt.errors import ConfigError
from grt.model.depth import Depth
from grt.model.loop import RecurrentDepthModel, last_of

P = ParamSpec("P")
T = TypeVar("T")


def check_prompts(model: RecurrentDepthModel, prompts: Sequence[Sequence[int]]) -> None:
    """ConfigError where there is nothing to go on from, or an id that the model has not learned."""
    if not prompts or not min(map(len, prompts)):
        raise ConfigError("a prompt is empty: give at least one token (end-of-text starts a fresh document).")
    least, most, V = min(map(min, prompts)), max(map(max, prompts)), model.config.vocab_size
    if least < 0 or most >= V:
        raise ConfigError(f"id {least if least < 0 else most} of a prompt is not below {V}: use the model's tokenizer.")


class Decoder:
    """Prompts (lists of ids, of any lengths but not empty) and room for `max_new` tokens after each.

    kv: how the core's steps share keys and values. depth: passes through the core (default R). compiled: the one-token
    pass by torch.compile, which takes long once and pays over many tokens; not where there is a tape of it. Raises
    ConfigError where prompt and new tokens are more than the model's context.
    """

    def __init__(
        self,
        model: RecurrentDepthModel,
        prompts: Sequence[Sequence[int]],
        max_new: int,
        *,
        kv: str = "full",
        depth: int | None = None,
        compiled: bool = False,
    ) -> None:
        check_prompts(model, prompts)
        longest, context = max(map(len, prompts)), model.config.context
        if longest + min(max_new, 1) > context:
            raise ConfigError(
                f"a prompt of {longest} tokens leaves no room for new ones in model.context {context}: shorten it, or "
                "let the window slide (crop)."
            )
        if longest + max_new > context:
            raise ConfigError(
                f"a prompt of {longest} tokens and {max_new} new ones are more than model.context {context}: ask for "
                f"at most {context - longest} new tokens, shorten the prompt, or let the window slide (crop)."
            )
        self.model = model
        self.steps = model.full_depth if depth is None else Depth(depth)
        model.check_depth(self.steps.steps, least=1)
        self.prompts, self.longest = prompts, longest
        self.cache = self._cache(len(prompts), longest + max_new, longest, kv)
        self.fixed_shapes = self.cache.core.fixed_shapes
        self._step = self.compiled(self._one_token) if compiled else self._one_token
        self.tape: Tape | None = None
        self.unrecordable = False

    def _cache(self, batch: int, capacity: int, prompt: int, kv: str) -> KVCache:
        return KVCache(self.model, batch, capacity, strategy=kv, depth=self.steps.steps, prompt=prompt)

    def restart(self, prompts: Sequence[Sequence[int]]) -> None:
        """Other prompts, as many and no longer than the first ones were; what was compiled or is on a tape stays."""
        assert len(prompts) == len(self.prompts) and max(map(len, prompts)) <= self.longest
        self.prompts = prompts
        self.cache.clear()

    @torch.inference_mode()
    def prefill(self, chunk: int | None = None) -> Tensor:
        """Logits (B, V) after the prompts, read `chunk` tokens at a time (default: all at once)."""
        ids, real = left_padded(self.prompts, self.model.device)
        size, logits = chunk or ids.shape[1], torch.empty(0)
        for start in range(0, ids.shape[1], size):
            piece = slice(start, start + size)
            ctx = LoopContext(cache=self.cache, real=None if real is None else real[:, piece])
            logits = self._last(ids[:, piece], ctx)
        self.cache.commit()
        if self.fixed_shapes:
            self.cache.freeze()
        return logits

    @torch.inference_mode()
    def step(self, tokens: Tensor) -> Tensor:
        """Logits (B, V) after one more token of each row; tokens (B,)."""
        if self.fixed_shapes:
            self.cache.advance()
        logits = self._next(tokens[:, None])
        self.cache.commit()
        return logits

    def _next(self, ids: Tensor) -> Tensor:
        if self.tape is not None:
            assert isinstance(self.cache.core, SharedSteps)  # other cores have no fixed shapes
            self.cache.core.repeat(self.steps.steps)
            return self.tape(ids)
        head: Any = self.model.embed.tokens.weight
        if self.fixed_shapes and self.cache.batch == 1 and type(head) is Kept and head.fast and not self.unrecordable:
            try:
                self.tape = Tape(self._one_token, ids)
                return self.tape.result.clone()
            except Unrecordable:  # what ran of the pass is overwritten now
                self.unrecordable = True
        return self._step(ids)

    @property
    def depths(self) -> list[int]:
        """Steps that the last token of each row took."""
        return [self.steps.steps] * self.cache.batch

    @torch.inference_mode()
    def keep(self, rows: Sequence[int]) -> None:
        """Go on with these rows only, in this order."""
        self.tape = None
        self.cache.reorder(torch.tensor(rows, device=self.model.device))
        self.prompts = [self.prompts[row] for row in rows]

    def compiled(self, function: Callable[P, T]) -> Callable[P, T]:
        """A pass over the frozen cache by torch.compile."""
        if not self.fixed_shapes:
            raise ConfigError(
                f"{self.model.config.method} gathers as many rows as its router chooses: decode it without compiling."
            )
        if self.cache.device.type == "cuda":
            return torch.compile(function, fullgraph=True, mode="reduce-overhead")  # a CUDA graph
        require_compiler()
        if self.cache.batch > 1:
            return torch.compile(function, fullgraph=True)

        def one_row(*args: P.args, **kwargs: P.kwargs) -> T:
            with OneRow():
                return function(*args, **kwargs)

        return torch.compile(one_row, fullgraph=True, options=OPTIONS)

    def _one_token(self, ids: Tensor) -> Tensor:
        return self._last(ids, LoopContext(cache=self.cache))

    def _last(self, ids: Tensor, ctx: LoopContext) -> Tensor:
        """Logits (B, V) of the last of ids (B, T)."""
        return self.model.logits(last_of(self.model.states(ids, ctx, self.steps)), ctx, last=True)[:, -1]


def require_compiler() -> None:
    """ConfigError where torch.compile would find no C++ compiler, which it needs on a CPU."""
    compiler = get_cxx_compiler()
    if shutil.which(shlex.split(compiler)[0]) is None:
        raise ConfigError(
            f"compiling needs a C++ compiler, and there is no {compiler!r}: install one, or do not compile."
        )
