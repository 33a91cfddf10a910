"""Decoder: a batch of prompts through the model at once, then one token of each row after the other.

The one-token pass runs over buffers of fixed addresses (KVCache.freeze), so that it can be compiled as a whole, or on a
GPU be captured as a graph, at one fixed depth.

Shapes: B batch, T tokens, V vocabulary.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from grt.config import ConfigError
from grt.infer.onerow import OPTIONS, OneRow
from grt.model.cache import KVCache
from grt.model.context import LoopContext
from grt.model.depth import Depth
from grt.model.recurrent import RecurrentDepthModel, last_of


class Decoder:
    """Prompts (lists of ids, of any lengths but not empty) and room for `max_new` tokens after each.

    kv: how the core's steps share keys and values. depth: passes through the core (default R). compiled: the one-token
    pass by torch.compile, which takes long once and pays over many tokens. Raises ConfigError where prompt and new
    tokens are more than the model's context.
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
        longest, context = max(map(len, prompts)), model.config.context
        if not min(map(len, prompts)):
            raise ConfigError("a prompt is empty: give at least one token (end-of-text starts a fresh document).")
        if longest + max_new > context:
            raise ConfigError(
                f"a prompt of {longest} tokens and {max_new} new ones are more than model.context {context}: ask for "
                f"at most {max(context - longest, 0)} new tokens, or shorten the prompt."
            )
        self.model = model
        self.steps = model.full_depth if depth is None else Depth(depth)
        model.check_depth(self.steps.steps, least=1)
        self.prompts, self.longest = prompts, longest
        self.cache = KVCache(
            model, len(prompts), longest + max_new, strategy=kv, depth=self.steps.steps, prompt=longest
        )
        self._step = self._compiled() if compiled else self._one_token

    def restart(self, prompts: Sequence[Sequence[int]]) -> None:
        """Other prompts, as many and no longer than the first ones were; what was compiled stays."""
        assert len(prompts) == len(self.prompts) and max(map(len, prompts)) <= self.longest
        self.prompts = prompts
        self.cache.clear()

    @torch.inference_mode()
    def prefill(self, chunk: int | None = None) -> Tensor:
        """Logits (B, V) after the prompts, read `chunk` tokens at a time (default: all at once)."""
        device, longest = self.model.device, max(map(len, self.prompts))
        pads = [longest - len(prompt) for prompt in self.prompts]
        ids = torch.tensor([[0] * pad + list(p) for pad, p in zip(pads, self.prompts, strict=True)], device=device)
        real = torch.arange(longest, device=device) >= torch.tensor(pads, device=device)[:, None]
        logits = torch.empty(0)
        for piece, there in zip(ids.split(chunk or longest, 1), real.split(chunk or longest, 1), strict=True):
            ctx = LoopContext(cache=self.cache, real=there if any(pads) else None)
            logits = self.model.logits(last_of(self.model.states(piece, ctx, self.steps)), ctx, last=True)
        self.cache.commit()
        if self.cache.core.fixed_shapes:
            self.cache.freeze()
        return logits[:, -1]

    @torch.inference_mode()
    def step(self, tokens: Tensor) -> Tensor:
        """Logits (B, V) after one more token of each row; tokens (B,)."""
        if self.cache.core.fixed_shapes:
            self.cache.advance()
        logits = self._step(tokens[:, None])
        self.cache.commit()
        return logits

    def _compiled(self) -> Callable[[Tensor], Tensor]:
        if not self.cache.core.fixed_shapes:
            raise ConfigError(
                f"{self.model.config.method} gathers as many rows as its router chooses: decode it without compiling."
            )
        if self.cache.device.type == "cuda":
            return torch.compile(self._one_token, fullgraph=True, mode="reduce-overhead")  # a CUDA graph
        if self.cache.batch > 1:
            return torch.compile(self._one_token, fullgraph=True)

        def one_row(ids: Tensor) -> Tensor:
            with OneRow():
                return self._one_token(ids)

        return torch.compile(one_row, fullgraph=True, options=OPTIONS)

    def _one_token(self, ids: Tensor) -> Tensor:
        ctx = LoopContext(cache=self.cache)
        return self.model.logits(last_of(self.model.states(ids, ctx, self.steps)), ctx)[:, -1]
