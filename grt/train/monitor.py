"""Is the recurrence alive? Statistics of one pass, collected through taps, and warnings where they look wrong."""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional as F

from grt.backbone.context import LoopContext, Tap
from grt.device import autocast
from grt.model.loop import RecurrentDepthModel
from grt.model.rule import last_of


class Recorder:
    """Taps that keep what the monitors need; the pass itself is unchanged."""

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self.values: dict[str, list[float]] = {}
        self.previous = torch.empty(0)  # the state before the step
        self.scores = torch.empty(0)  # what the router just said
        self.stay = torch.ones(())  # Ouro's S_t: the share of each token that has not left yet
        names = ("gate", "state", "state_noise", "router", "selected", "choice", "exit")
        self.taps = {name: getattr(self, name) for name in names}

    def note(self, name: str, value: Tensor) -> None:
        self.values.setdefault(name, []).append(value.item())

    def gate(self, g: Tensor, ctx: LoopContext) -> None:
        g = g.float()
        self.note("gate_mean", g.mean())
        self.note("gate_sd", g.std())
        self.note("gate_saturation", ((g < 0.01) | (g > 0.99)).float().mean())

    def state_noise(self, eps: Tensor, ctx: LoopContext) -> None:
        self.note("noise_to_signal", eps.float().norm() / self.previous.norm())

    def state(self, h: Tensor, ctx: LoopContext) -> None:
        h = h.float()
        self.note("state_change", ((h - self.previous).norm(dim=-1) / h.norm(dim=-1).clamp_min(1e-12)).mean())
        self.note("token_correlation", token_correlation(h))

    def router(self, scores: Tensor, ctx: LoopContext) -> None:
        self.scores = scores.float()

    def selected(self, chosen: Tensor, ctx: LoopContext) -> None:
        real = self.scores.isfinite()
        self.note("router_accuracy", ((self.scores >= 0) == chosen)[real].float().mean())
        self.note("router_entropy", binary_entropy(self.scores[real].sigmoid()).mean())

    def choice(self, probabilities: Tensor, ctx: LoopContext) -> None:
        p = probabilities.float()
        p = p / p.sum(-1, keepdim=True)
        self.note("router_entropy", -(p * p.clamp_min(1e-12).log()).sum(-1).mean())

    def exit(self, leaves: Tensor, ctx: LoopContext) -> None:
        if ctx.step == self.steps - 1:
            leaves = torch.ones_like(leaves)  # whoever is left leaves at the end
        self.note("exit_share", (leaves.float() * self.stay).mean())
        self.stay = self.stay * (1 - leaves.float())


def token_correlation(h: Tensor) -> Tensor:
    """Mean cosine between the states of two different tokens of a sequence; h (B, T, d)."""
    T = h.shape[1]
    whole = F.normalize(h, dim=-1).sum(1).square().sum(-1)  # T + the sum over all pairs
    return ((whole - T) / max(T * (T - 1), 1)).mean()


def binary_entropy(p: Tensor) -> Tensor:
    return F.binary_cross_entropy(p, p, reduction="none")


@torch.no_grad()
def monitor(model: RecurrentDepthModel, ids: Tensor, dtype: torch.dtype) -> dict[str, list[float]]:
    """Per step, for ids (B, T): ||h_r - h_{r-1}|| / ||h_r||, the mean cosine between two tokens' states, and by method

    - the gate's mean, sd and saturation (share outside .01-.99), and the norm of the state noise over the state's;
    - a router's accuracy (does its sign say who goes on?) and entropy (nats), and the share of tokens alive after the
      step when the threshold decides;
    - the share of tokens that the exit distribution lets leave at the step.

    Draws from a generator of its own. The model stays in the mode it is in. A training run's is in training mode, so
    that noise is on and a router's capacities decide: it describes the pass whose gradients are taken. Who is alive
    comes from a second pass, as in evaluation.
    """
    recorder = Recorder(model.full_depth.steps)
    was_training = model.training
    with torch.random.fork_rng(devices=[ids.device] if ids.device.type == "cuda" else []), autocast(ids.device, dtype):
        torch.manual_seed(0)
        for h in run(model, ids, recorder.taps):
            recorder.previous = h.float()
        if "router_entropy" in recorder.values:
            model.eval()
            last_of(run(model, ids, {"alive": lambda alive, ctx: recorder.note("alive_share", alive.float().mean())}))
            model.train(was_training)
    return recorder.values


def run(model: RecurrentDepthModel, ids: Tensor, taps: dict[str, Tap]) -> Iterator[Tensor]:
    return model.states(ids, LoopContext(taps=taps), model.full_depth)


ONE_DIRECTION = 0.99  # mean cosine between tokens above which their states no longer tell them apart


def warnings_for(
    loss_by_depth: dict[int, float], values: dict[str, list[float]], routing: str | None = None
) -> list[str]:
    """Sentences for people where a known failure shows (arXiv 2502.05171, section 4.3, has the first two)."""
    R, told = max(loss_by_depth), []
    if routing == "topk":
        told.append("validation routes by topk, which looks at later tokens: its losses leak them, they are no result")
    if R > 1 and loss_by_depth[R] >= loss_by_depth[1]:
        told.append(
            f"depth is ignored so far: loss {loss_by_depth[R]:.4f} at depth {R} is not below {loss_by_depth[1]:.4f} "
            "at depth 1"
        )
    for step, correlation in enumerate(values.get("token_correlation", ()), 1):
        if correlation > ONE_DIRECTION:
            told.append(f"the states of all tokens point in one direction after step {step} (cosine {correlation:.3f})")
            break
    for step, share in enumerate(values.get("alive_share", ()), 1):
        if share == 0:
            told.append(f"no token reaches step {step}: its router stops all that are left")
            break
    return told
