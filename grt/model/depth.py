"""Depth: how many core passes, and how many of them learn; with the samplers that draw it for training."""

import math
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass

# The most passes that may be asked for, as a multiple of R: room for any extrapolation that makes sense, and a slip of
# the keyboard is refused instead of running for days.
DEEPEST = 64


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


def lognormal_poisson(mean: float, sigma: float, cap: int, grad_steps: int) -> DepthSampler:
    """r ~ Poisson(e^tau) + 1, tau ~ N(log mean - sigma^2 / 2, sigma): mean + 1 steps on average, and a heavy tail
    (arXiv 2502.05171, section 3). A draw beyond `cap` becomes `cap`."""
    if mean == 0:
        return fixed(1, grad_steps)
    mu = math.log(mean) - sigma**2 / 2

    def draw(rng: random.Random) -> int:
        left, r = math.exp(rng.gauss(mu, sigma)), 1
        while r < cap and (left := left - rng.expovariate(1)) > 0:  # arrivals at unit rate within e^tau are Poisson
            r += 1
        return r

    return DepthSampler(draw, _lognormal_poisson_probabilities(mu, sigma, cap), grad_steps)


def _lognormal_poisson_probabilities(mu: float, sigma: float, cap: int) -> dict[int, float]:
    """The integral over tau by the trapezoidal rule, whose error vanishes exponentially once its steps are finer than
    the integrand: a unit of z, and 1 / (sigma sqrt(r)), the width in z of a Poisson density at r."""
    deepest = min(cap, math.exp(mu + 8 * sigma))
    n = 64 + math.ceil(32 * sigma * math.sqrt(deepest))
    nodes = [16 * i / n - 8 for i in range(n + 1)]
    total = math.fsum(math.exp(-z * z / 2) for z in nodes)
    # (log weight - e^tau, tau): what does not depend on r
    terms = [(-z * z / 2 - math.log(total) - math.exp(mu + sigma * z), mu + sigma * z) for z in nodes]
    probabilities, left = {}, 1.0
    for r in range(1, cap):
        log_factorial = math.lgamma(r)  # of r - 1
        probabilities[r] = math.fsum(math.exp(a + (r - 1) * tau - log_factorial) for a, tau in terms)
        left -= probabilities[r]
        if left < 1e-12:  # a cap far out
            break
    probabilities[cap] = max(left, 0.0)
    return probabilities
