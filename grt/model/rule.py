"""UpdateRule: how the core reads the state, transforms it and writes it back. The base class is plain weight tying;
a method is a subclass that overrides the hooks in which it differs.

Shapes: B batch, T tokens, d width, R steps.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from torch import Tensor, nn

from grt.backbone.block import Block, Stack, block_flops
from grt.backbone.context import LoopContext
from grt.cache.kv import CoreStore, KVCache
from grt.cache.sharing import SharedSteps
from grt.config import ModelConfig
from grt.errors import ConfigError

CrossEntropy = Callable[[Tensor], Tensor]  # a state (B, T, d) -> nats of each token (B, T)
Residual = Callable[[int, int, str], Tensor]  # step, core block, linear -> what tying took from its weight


class Loss(NamedTuple):
    """total is what is minimised; lm is the cross-entropy part, in nats per token."""

    total: Tensor
    lm: Tensor


def last_of(states: Iterator[Tensor]) -> Tensor:
    """Run the loop to its end, holding one state at a time."""
    h = next(states)
    for h in states:  # noqa: B007
        pass
    return h


class UpdateRule(nn.Module):
    """The hooks, as plain weight tying: read is the state itself, write takes the core's output."""

    extrapolates = True  # may run deeper than R
    block: type[Block] = Block  # what prelude, core and coda are made of
    reads_out_often = False  # the loss reads out more than one state
    halts = True  # a token may leave after any step (grt/exits/policies.py)
    adds_low_rank = False  # to the blocks' linears (LoopContext.low_rank)
    learned_exit = False  # it has probabilities for that
    routing: str | None = None  # who goes on outside of training, where a router decides: threshold or topk
    weights_depend_on: tuple[str, ...] = ()  # fields of the config: under other values the weights mean something else
    second_stage: tuple[str, ...] = ()  # parameters (first parts of their names) that a second stage trains alone

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.layout, self.d = config.blocks, config.d_model

    def init_parameters(self, model: nn.Module) -> None:
        """Set what GPT-2's initialisation, which `model` has had, does not cover."""

    def adopt(self, residual: Residual) -> dict[str, Any]:
        """Take up what tying the layers of a dense model left over (grt/model/convert.py); returns notes for env.json.
        Here it is lost."""
        return {}

    def embed(self, x: Tensor) -> Tensor:
        """What enters the prelude, from the embedding (B, T, d)."""
        return x

    def start(self, h_pre: Tensor, ctx: LoopContext) -> Tensor:
        return h_pre

    def read(self, h: Tensor, h_pre: Tensor, ctx: LoopContext) -> Tensor:
        return h

    def transform(self, u: Tensor, core: Stack, ctx: LoopContext) -> Tensor:
        return core(u, ctx)

    def write(self, h: Tensor, o: Tensor, h_pre: Tensor, ctx: LoopContext) -> Tensor:
        return o

    def step(self, h: Tensor, h_pre: Tensor, core: Stack, ctx: LoopContext) -> Tensor:
        u = ctx.tap("input", self.read(h, h_pre, ctx))
        o = ctx.tap("proposal", self.transform(u, core, ctx))
        return ctx.tap("state", self.write(h, o, h_pre, ctx))

    def loss(self, states: Iterator[Tensor], ce: CrossEntropy, ctx: LoopContext) -> Loss:
        """Loss of one pass over h_0, h_1, ..."""
        lm = ce(last_of(states)).mean()
        return Loss(lm + sum(ctx.aux), lm)

    def second_loss(self, states: Iterator[Tensor], ce: CrossEntropy, ctx: LoopContext) -> Loss:
        """Loss of the second stage of training, for methods that have one."""
        raise ConfigError("train.stage is 2, but this method is trained in one stage: leave --train.stage out.")

    def evaluation(self, losses: Mapping[int, Tensor], ctx: LoopContext) -> dict[str, Tensor]:
        """Further numbers of one evaluated batch, each (B, T) and averaged over tokens; losses: depth -> (B, T)."""
        return {}

    def exit_probability(self, ctx: LoopContext) -> Tensor:
        """(B, T), given that a token is still there: that it leaves after the step just run; with learned_exit."""
        raise NotImplementedError

    # What it costs: grt/model/cost.py adds prelude, coda and head.

    def flops(self, steps: int, tokens: int) -> int:
        """Matrix-product FLOPs of `steps` steps, core and rule, on one sequence of `tokens`."""
        return steps * self.layout.n * tokens * block_flops(self.d, tokens)

    def readout_flops(self, steps: int, one: int) -> int:
        """FLOPs per token of reading out for the training loss, where coda and head cost `one` each time."""
        return one

    def store(self, cache: KVCache, n: int, strategy: str) -> CoreStore:
        """The core's part of a new KVCache."""
        return SharedSteps(cache, n, strategy)

    def kv_slots(self) -> dict[str, float]:
        """Sharing strategy -> slots of keys and values that the decode phase keeps for one token (subsec:kvcache)."""
        shared = dict.fromkeys(("first", "last", "mean", "first:all"), self.layout.n_unique)
        return {"full": self.layout.n_executions(), **shared}
