"""Is the recurrence alive? Statistics of one pass, collected through taps, and warnings where they look wrong."""

import torch
from torch import Tensor

from grt.model.context import LoopContext
from grt.model.precision import autocast
from grt.model.recurrent import RecurrentDepthModel


class Recorder:
    """Taps that keep what the monitors need; the pass itself is unchanged."""

    def __init__(self) -> None:
        self.values: dict[str, list[float]] = {}
        self.previous = torch.empty(0)  # the state before the step; the anchor's tap comes first
        self.taps = {"anchor": self.anchor, "gate": self.gate, "state": self.state}
        self.taps["state_noise"] = self.noise

    def note(self, name: str, value: Tensor) -> None:
        self.values.setdefault(name, []).append(value.item())

    def anchor(self, h: Tensor, ctx: LoopContext) -> None:
        self.previous = h.float()

    def gate(self, g: Tensor, ctx: LoopContext) -> None:
        g = g.float()
        self.note("gate_mean", g.mean())
        self.note("gate_sd", g.std())
        self.note("gate_saturation", ((g < 0.01) | (g > 0.99)).float().mean())

    def noise(self, eps: Tensor, ctx: LoopContext) -> None:
        self.note("noise_to_signal", eps.float().norm() / self.previous.norm())

    def state(self, h: Tensor, ctx: LoopContext) -> None:
        h = h.float()
        self.note("state_change", ((h - self.previous).norm(dim=-1) / h.norm(dim=-1).clamp_min(1e-12)).mean())
        self.previous = h


@torch.no_grad()
def monitor(model: RecurrentDepthModel, ids: Tensor, dtype: torch.dtype) -> dict[str, list[float]]:
    """Per step: gate mean, sd and saturation (share outside .01-.99), ||h_r - h_{r-1}|| / ||h_r||, and the ratio of
    the state noise's norm to that of the state it is added to. ids (B, T). Draws from a generator of its own.

    The model stays in the mode it is in. A training run's is in training mode, so that all of this is with state and
    gate noise on: it describes the pass whose gradients are taken, and without noise there is no ratio.
    """
    recorder = Recorder()
    with torch.random.fork_rng(devices=[ids.device] if ids.device.type == "cuda" else []):
        torch.manual_seed(0)
        with autocast(ids.device, dtype):
            for _ in model.states(ids, LoopContext(taps=recorder.taps), model.full_depth):
                pass
    return recorder.values


def warnings_for(loss_by_depth: dict[int, float]) -> list[str]:
    """Sentences for people where a known failure shows."""
    R = max(loss_by_depth)
    if R > 1 and loss_by_depth[R] >= loss_by_depth[1]:
        return [
            f"depth is ignored so far: loss {loss_by_depth[R]:.4f} at depth {R} is not below {loss_by_depth[1]:.4f} "
            "at depth 1"
        ]
    return []
