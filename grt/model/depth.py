"""Depth: how many core passes, and how many of them learn; with the samplers that draw it for training."""

import math
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Depth:
    """steps: passes through the core. grad_steps: how many of the last ones carry gradient (None: all)."""

    steps: int
    grad_steps: int | None = None


@dataclass(frozen=True)
class DepthSampler:
    """Draws the depth of one accumulation slot: a pure function of (seed, step, slot), the same on every rank.

    probabilities: depth -> how often it is drawn, for the cost tables. grad_steps: truncated back-propagation.
    """

    draw: Callable[[random.Random], int]
    probabilities: Mapping[int, float]
    grad_steps: int | None = None

    def __call__(self, seed: int, step: int, slot: int) -> Depth:
        # Seeding with text goes through sha512: neighbouring steps get unrelated streams on every platform.
        return Depth(self.draw(random.Random(f"depth/{seed}/{step}/{slot}")), self.grad_steps)

    @property
    def mean(self) -> float:
        """Expected steps."""
        return math.fsum(r * p for r, p in self.probabilities.items())


def fixed(R: int, grad_steps: int | None = None) -> DepthSampler:
    """Always R steps."""
    return DepthSampler(lambda rng: R, {R: 1.0}, grad_steps)


def uniform(R: int) -> DepthSampler:
    """r ~ U{1..R} (subsec:depth_sampling)."""
    return DepthSampler(lambda rng: rng.randint(1, R), dict.fromkeys(range(1, R + 1), 1 / R))
