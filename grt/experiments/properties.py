"""What a method does, found by running a tiny model of it (width 16, 1+1x3+1) and looking: the yes and no of
tab:method_comparison.

Weights are random and far from their initialisation, where a rule may do nothing yet (RRT's B = 0); all is in double
precision, so that "the same" means the same up to rounding. Every draw is seeded, and the global generator is left as
it was.

Shapes: B batch, T tokens, d width, R steps.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from grt.backbone.context import LoopContext
from grt.config import ModelConfig
from grt.methods import build_model, depth_sampler
from grt.model.depth import Depth
from grt.model.loop import RecurrentDepthModel
from grt.model.rule import last_of

SIZES = {"d_model": 16, "n_heads": 2, "context": 12, "vocab_size": 23}
SPREAD = 0.15  # standard deviation of what is added to every parameter


@contextmanager
def probe(method: str, layout: str = "1+1x3+1", **fields) -> Iterator[tuple[RecurrentDepthModel, Tensor]]:
    """A tiny model of the method in training mode, and ids (B, T) to run it on."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        model = build_model(ModelConfig(method=method, layout=layout, **SIZES, **fields)).double().train()
        for p in model.parameters():
            p += SPREAD * torch.randn_like(p)
        yield model, torch.randint(SIZES["vocab_size"], (2, SIZES["context"]))


def same(a: Tensor, b: Tensor) -> bool:
    return torch.allclose(a, b, rtol=1e-9, atol=1e-12)


def shares_weights(model: RecurrentDepthModel, ids: Tensor) -> bool | None:
    """Every step makes the same of the same core input; None where there is no step."""
    ctx = LoopContext()
    u = next(model.states(ids, ctx, model.full_depth))  # h_0, as good an input as any
    made = []
    for ctx.step in range(model.config.blocks.R):
        made.append(model.rule.transform(u, model.core, ctx))
    return all(same(made[0], o) for o in made) if made else None


def readouts(model: RecurrentDepthModel, ids: Tensor, depth: Depth) -> list[set[int]]:
    """An entry for each state that the training loss reads out: how many steps have changed it; more than one number
    where some tokens stop early."""
    changes, before = torch.zeros(ids.shape, dtype=torch.long), torch.empty(0)
    found: list[set[int]] = []

    def keep(x: Tensor, ctx: LoopContext) -> None:
        nonlocal changes, before
        if len(before):
            changes = changes + (x != before).any(-1)
        before = x

    hook = model.coda.register_forward_pre_hook(lambda module, arguments: found.append(set(changes.flatten().tolist())))
    ctx = LoopContext(taps={"anchor": keep, "state": keep})
    try:
        model.loss(ids, ids, depth, ctx)
    finally:
        hook.remove()
    return found


def trained_depths(model: RecurrentDepthModel, ids: Tensor) -> set[int]:
    """All depths that training reads out of some token, over the depths that it draws."""
    sampler = depth_sampler(model.config)
    drawn = [Depth(steps, sampler.grad_steps) for steps, p in sampler.probabilities.items() if p]
    return {depth for each in drawn for read in readouts(model, ids, each) for depth in read}


def gates_the_update(model: RecurrentDepthModel, ids: Tensor) -> bool:
    """Whether the share of a proposal that the first step writes depends on the token: two proposals, the same for
    all tokens, are put in place of the core's own; what the state differs by is the share of their difference."""
    written, one = [], Depth(min(1, model.config.blocks.R))
    for proposal in torch.randn(2, model.config.d_model, dtype=torch.float64):
        taps = {"proposal": lambda o, ctx, proposal=proposal: proposal.expand_as(o)}
        written.append(last_of(model.eval().states(ids, LoopContext(taps=taps), one)))
    share = written[1] - written[0]  # (2, T, d): at each position two tokens
    return not same(share[0], share[1])


def noise(model: RecurrentDepthModel, ids: Tensor) -> str:
    """What differs in training under another seed of the global generator: per step, init only, or none. Every step
    begins from the first pass's state."""
    passes: list[list[Tensor]] = []
    for seed in (0, 1):
        seen: list[Tensor] = []

        def state(x: Tensor, ctx: LoopContext, seen: list[Tensor] = seen) -> Tensor:
            seen.append(x)
            return passes[0][ctx.step + 1] if passes else x

        torch.manual_seed(seed)
        states = model.states(ids, LoopContext(taps={"state": state}), model.full_depth)
        start = next(states)
        for _ in states:
            pass
        passes.append([start, *seen])
    differs = [not same(*pair) for pair in zip(*passes, strict=True)]
    return "per step" if any(differs[2:]) else "init only" if any(differs) else "none"
