"""Who decodes in the benches of generation, and how its time is taken.

A contestant's `generate` calls `tick` when the first token's value is there and when the last one's is. A decoding step
makes one token of each row; its time is everything behind the first token, by the steps.

Shapes: B rows, P tokens of prompt.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from grt.backbone.context import LoopContext
from grt.bench.peers import transformers_generate
from grt.bench.turns import alternate
from grt.config import ModelConfig, Weights
from grt.console import note, working
from grt.decode.decoder import Decoder
from grt.decode.quantize import keep_weights
from grt.device import cpu_name, dtype_name
from grt.methods import build_model
from grt.model.loop import RecurrentDepthModel, last_of

FEW = 4  # tokens that warm up: the compiler is done, and a CUDA graph is recorded, by then

Tick = Callable[[], None]


@dataclass(frozen=True)
class Task:
    """What each contestant of a group has to do; new tokens include the one that the prompt's pass gives."""

    protocol: str
    batch: int
    prompt: int
    new: int
    kv: str = "full"
    compiled: bool = False

    def prompts(self, vocab_size: int) -> Tensor:  # (B, P)
        return torch.randint(vocab_size, (self.batch, self.prompt), generator=torch.Generator().manual_seed(0))


class Timed(NamedTuple):
    prefill: float | None  # seconds
    per_token: float


class Contestant(Protocol):
    name: str
    few: int  # tokens that warm it up
    compiled: bool

    def generate(self, new: int, tick: Tick) -> Tensor:
        """Tokens (B, new); calls `tick` when the first is there (if only from then on tokens cost the same), and when
        the last one is."""
        ...


class Cached:
    """Our model by Decoder. The greedy token of each row goes back in."""

    def __init__(self, name: str, model: RecurrentDepthModel, task: Task, prompts: Tensor, depth: int | None = None):
        self.name, self.prompts, self.few, self.compiled = name, prompts.tolist(), FEW, task.compiled
        self.decoder = Decoder(model, self.prompts, task.new, kv=task.kv, depth=depth, compiled=task.compiled)

    def generate(self, new: int, tick: Tick) -> Tensor:
        self.decoder.restart(self.prompts)
        tokens = [self.decoder.prefill().max(-1).indices]
        tokens[0].cpu()  # waits for the device
        tick()
        while len(tokens) < new:
            tokens.append(self.decoder.step(tokens[-1]).max(-1).indices)
        everything = torch.stack(tokens, 1).cpu()
        tick()
        return everything


class Recomputed:
    """Our model without a cache: each token from a forward pass over the last `context` ones."""

    few = 1

    def __init__(self, name: str, model: RecurrentDepthModel, task: Task, prompts: Tensor) -> None:
        self.name, self.model, self.compiled = name, model, task.compiled
        self.prompts = prompts.to(model.device)
        self.last = torch.compile(self._last, fullgraph=True) if task.compiled else self._last

    def _last(self, ids: Tensor) -> Tensor:
        ctx = LoopContext()
        return self.model.logits(last_of(self.model.states(ids, ctx, self.model.full_depth)), ctx, last=True)[:, -1]

    @torch.inference_mode()
    def generate(self, new: int, tick: Tick) -> Tensor:
        ids, context = self.prompts, self.model.config.context
        for _ in range(new):
            ids = torch.cat((ids, self.last(ids[:, -context:].contiguous()).argmax(-1, keepdim=True)), 1)
        everything = ids[:, self.prompts.shape[1] :].cpu()
        tick()
        return everything


class Transformers:
    """transformers' GPT-2 and its generate, which is not compiled."""

    few, compiled = 2, False

    def __init__(self, name: str, dense: RecurrentDepthModel, prompts: Tensor) -> None:
        self.name, self.prompts = name, prompts.to(dense.device)
        self.theirs = transformers_generate(dense, dense.config)

    def generate(self, new: int, tick: Tick) -> Tensor:
        return self.theirs(self.prompts, new, tick)


def timed(contestant: Contestant, new: int) -> Timed:
    ticks = [time.perf_counter()]
    contestant.generate(new, lambda: ticks.append(time.perf_counter()))
    start, first, end = ticks[0], ticks[1], ticks[-1]
    if len(ticks) == 2:
        return Timed(None, (end - start) / new)
    return Timed(first - start, (end - first) / (new - 1))


def warm_up(contestant: Contestant, new: int) -> float | None:
    """Seconds of the first tokens, in which a compiled contestant compiles."""
    few = min(contestant.few, new)
    with working(f"warming up {contestant.name}"):
        seconds = timed(contestant, few).per_token * max(few - 1, 1)
    return seconds if contestant.compiled else None


def take_turns(contestants: Sequence[Contestant], new: int, turns: int) -> dict[str, list[Timed]]:
    """Times of each turn, by contestant, whose medians are told at once."""
    one_turn = {contestant.name: partial(timed, contestant, new) for contestant in contestants}
    times = alternate(one_turn, turns, seconds=lambda t: t.per_token)
    for name, of_turns in times.items():
        note(f"{name}: {1e3 * statistics.median(t.per_token for t in of_turns):.3f} ms per step of decoding")
    return times


def median_row(name: str, batch: int, times: list[Timed]) -> dict[str, Any]:
    per_token = [t.per_token for t in times]
    prefills = [t.prefill for t in times if t.prefill is not None]
    return {
        "name": name, "batch": batch, "prefill_ms": 1e3 * statistics.median(prefills) if prefills else None,
        "ms_per_token": 1e3 * statistics.median(per_token), "tokens_per_s": batch / statistics.median(per_token),
        "spread": [1e3 * min(per_token), 1e3 * max(per_token)],
    }  # fmt: skip


def add_ratio(report: dict[str, Any], name: str, above: list[Timed], below: list[Timed]) -> None:
    ratios = [a.per_token / b.per_token for a, b in zip(above, below, strict=True)]
    report["ratios"][name] = statistics.median(ratios)
    report["ratio_spreads"][name] = [min(ratios), max(ratios)]


def on(
    device: torch.device, dtype: torch.dtype, config: ModelConfig, weights: Weights | None = None
) -> RecurrentDepthModel:
    """A model of random weights, kept as keep_weights says."""
    torch.manual_seed(0)
    return keep_weights(build_model(config).to(device).eval(), weights, dtype)


def empty_report(bench: str, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    return {
        "bench": bench, "device": cpu_name() if device.type == "cpu" else torch.cuda.get_device_name(device),
        "threads": torch.get_num_threads(), "dtype": dtype_name(dtype), "rows": [], "ratios": {}, "ratio_spreads": {},
    }  # fmt: skip
