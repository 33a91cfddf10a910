"""Text from a model, one token of each row at a time: `generate` for one prompt, `Stream` for a batch of them."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch

from grt.decode.decoder import Decoder
from grt.decode.early_exit import HaltingDecoder
from grt.decode.sampling import Sampling
from grt.decode.window import Window
from grt.errors import ConfigError
from grt.exits.policies import Exit, asked_exit
from grt.model.loop import RecurrentDepthModel


class Drawn(NamedTuple):
    """logprob: of the model's own distribution, whatever the sampling made of it. depth: steps behind its logits."""

    token: int
    logprob: float
    depth: int


def finite(logits: torch.Tensor) -> torch.Tensor:
    """On the CPU, in float32 at least; ConfigError where a broken model cannot say what comes next."""
    logits = logits.cpu().float()
    if not torch.isfinite(logits).all():
        raise ConfigError("the model's logits are not finite: its weights are broken, use another checkpoint.")
    return logits


@contextmanager
def evaluating(model: RecurrentDepthModel) -> Iterator[None]:
    """The model without noise, and afterwards in the mode that it was in."""
    training = model.training
    if training:
        model.eval()
    try:
        yield
    finally:
        if training:
            model.train()


class Stream:
    """Iterates over steps; each gives one Drawn a row, or None for a row that has ended.

    What a row says depends on its own prompt, seed and the options, never on the rows beside it; they may only end the
    batch sooner: max_new_tokens None means as many as fit behind the longest prompt (with crop: as many as the
    context). seeds: one a row (0 without). stop_ids end a row and are not part of it; `drop` ends one from outside.
    kv, depth, compiled: as for Decoder. crop: no end of the context, for the price of a fresh pass a token (Window).
    exit: each token leaves the loop on its own, in place of depth (HaltingDecoder).
    Settings that cannot work are refused at once, with a ConfigError.
    """

    def __init__(
        self,
        model: RecurrentDepthModel,
        prompts: Sequence[Sequence[int]],
        *,
        max_new_tokens: int | None = None,
        depth: int | None = None,
        sampling: Sampling | None = None,
        seeds: Sequence[int] | None = None,
        stop_ids: Sequence[int] = (),
        kv: str = "full",
        crop: bool = False,
        compiled: bool = False,
        exit: Exit | None = None,
    ) -> None:
        seeds = [0] * len(prompts) if seeds is None else seeds
        assert len(seeds) == len(prompts), "one seed a row"
        for seed in seeds:
            if not 0 <= seed < 2**63:
                raise ConfigError(f"seed is {seed}: it must lie between 0 and 2^63 - 1.")
        if max_new_tokens is not None and max_new_tokens < 0:
            raise ConfigError(f"max_new_tokens is {max_new_tokens}: it must be at least 0.")
        if crop and (compiled or kv != "full"):
            raise ConfigError("crop decodes without a cache, for which kv and compiled are meant: leave these out.")
        if exit is not None and (crop or compiled):
            raise ConfigError("with exit, tokens go as deep as they need, through a cache: leave crop and compile out.")
        self.model, self.sampling, self.stop_ids = model, sampling or Sampling(), frozenset(stop_ids)
        if max_new_tokens is None:
            room = model.config.context - (0 if crop else max(map(len, prompts), default=0))
            max_new_tokens = max(room, 1)  # where there is no room, the decoder says so
        self.max_new_tokens = self.left = max_new_tokens
        if crop:
            self.decoder = Window(model, prompts, depth=depth)
        elif exit is not None:
            self.decoder = HaltingDecoder(model, prompts, max_new_tokens, exit, kv=kv)
        else:
            self.decoder = Decoder(model, prompts, max_new_tokens, kv=kv, depth=depth, compiled=compiled)
        self.fixed_batch = compiled  # another size of batch would be compiled anew
        self.past = [list(prompt) for prompt in prompts]
        self.generators = [torch.Generator().manual_seed(seed) for seed in seeds]
        self.live = set(range(len(prompts)))
        self.rows: list[int] = []  # which row each one in the decoder is; none before the first step

    def drop(self, row: int) -> None:
        """End a row."""
        self.live.discard(row)

    def __iter__(self) -> Iterator[list[Drawn | None]]:
        return self

    def __next__(self) -> list[Drawn | None]:
        if not self.left or not self.live:
            raise StopIteration
        self.left -= 1
        logits = self._logits()
        depths = self.decoder.depths
        drawn: list[Drawn | None] = [None] * len(self.past)
        for i, row in enumerate(self.rows):
            if row not in self.live:
                continue
            picked = Drawn(*self.sampling.pick(logits[i], self.past[row], self.generators[row]), depths[i])
            if picked.token in self.stop_ids:
                self.drop(row)
            else:
                self.past[row].append(picked.token)
                drawn[row] = picked
        if not self.live:
            raise StopIteration
        return drawn

    def _logits(self) -> torch.Tensor:
        """(rows in the decoder, V), on the CPU, in float32 at least: that is where generators give the same everywhere.
        Rows that have ended leave the decoder."""
        with evaluating(self.model):
            if not self.rows:
                self.rows = list(range(len(self.past)))
                return finite(self.decoder.prefill())
            if len(self.live) < len(self.rows) and not self.fixed_batch:
                self.decoder.keep([i for i, row in enumerate(self.rows) if row in self.live])
                self.rows = [row for row in self.rows if row in self.live]
            last = torch.tensor([self.past[row][-1] for row in self.rows], device=self.model.device)
            return finite(self.decoder.step(last))


def generate(
    model: RecurrentDepthModel,
    prompt: Sequence[int],
    *,
    max_new_tokens: int | None = None,
    depth: int | None = None,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    repetition_penalty: float = 1.0,
    seed: int = 0,
    stop: int | None = None,
    kv: str = "full",
    crop: bool = False,
    exit: str | None = None,
    budget: float | None = None,
) -> Iterator[int]:
    """Token ids after `prompt` (at least one id), one by one; they end before the id `stop`.

    Options as for Sampling and Stream; exit as in `kl:0.01` (grt/exits/policies.py), and a budget, their mean depth.
    The text of a seed is the same whenever model, depth and options are.
    """
    steps = Stream(
        model,
        [prompt],
        max_new_tokens=max_new_tokens,
        depth=depth,
        sampling=Sampling(temperature, top_k, top_p, min_p, repetition_penalty),
        seeds=[seed],
        stop_ids=[] if stop is None else [stop],
        kv=kv,
        crop=crop,
        exit=asked_exit(model, exit, None, budget, depth),
    )
    return (drawn.token for (drawn,) in steps if drawn is not None)
