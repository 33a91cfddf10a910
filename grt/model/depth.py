"""Depth: how many core passes, and how many of them learn; with the samplers that draw it for training."""

import random
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Depth:
    """steps: passes through the core. grad_steps: how many of the last ones carry gradient (None: all)."""

    steps: int
    grad_steps: int | None = None


@dataclass(frozen=True)
class DepthSampler:
    """Draws the depth of one accumulation slot: a pure function of (seed, step, slot), the same on every rank.

    mean: expected steps, for the cost tables.
    """

    draw: Callable[[random.Random], Depth]
    mean: float

    def __call__(self, seed: int, step: int, slot: int) -> Depth:
        # Seeding with text goes through sha512: neighbouring steps get unrelated streams on every platform.
        return self.draw(random.Random(f"depth/{seed}/{step}/{slot}"))


def fixed(R: int) -> DepthSampler:
    """Always R steps."""
    return DepthSampler(lambda rng: Depth(R), mean=R)


def uniform(R: int) -> DepthSampler:
    """r ~ U{1..R} (subsec:depth_sampling)."""
    return DepthSampler(lambda rng: Depth(rng.randint(1, R)), mean=(R + 1) / 2)
