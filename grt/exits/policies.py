"""When a token has been through the core often enough: exit policies, for any method without a router of its own.

After step r = 1, 2, ... a policy gives each token a score from what it shows, and nothing else; p_r is the softmax of
its logits after step r (p_0 uniform):

    fixed:K     r                                  leaves at K
    state:X     ||h_r - h_{r-1}|| / ||h_r||        below X                       (arXiv 2502.05171, latent difference)
    kl:X        KL(p_{r-1} || p_r), nats           below X                       (arXiv 2502.05171, section 6)
    entropy:X   H(p_r), nats                       below X                       (BranchyNet, arXiv 1709.01686)
    top1:N      steps in a row, this one included, whose likeliest token is the same; leaves at N
    q:Q         lambda_1 + ... up to r of a learned exit distribution; leaves at Q   (Ouro, arXiv 2510.25741)

kl's first score is largest for tokens that are certain, so that it is of use from step 2 on. Nobody leaves before step
1 or stays after the last one. A budget B is a policy of a sequence: it caps each generated token at what keeps the mean
depth of those so far within B. What becomes of a token that has left: halting.py.

Shapes: B batch, T tokens, d width, V vocabulary.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from grt.errors import ConfigError, did_you_mean

if TYPE_CHECKING:
    from grt.model.loop import RecurrentDepthModel


@dataclass
class Step:
    """What tokens show after step r. memory: what the policy wants to see again after the next one, (B, T, ...)."""

    r: int
    h: Tensor  # (B, T, d)
    before: Tensor  # (B, T, d), h_{r-1}
    logits: Tensor | None = None  # (B, T, V), for a policy that reads out
    leaves: Tensor | None = None  # (B, T), lambda_r of a learned exit
    memory: dict[str, Tensor] = field(default_factory=dict)

    @property
    def log_probs(self) -> Tensor:
        assert self.logits is not None, "this policy reads out"
        return self.logits.float().log_softmax(-1)


@dataclass(frozen=True)
class ExitPolicy:
    """A score, and the threshold at which a token leaves. ConfigError for a threshold that cannot be one."""

    threshold: float
    name: ClassVar[str]
    falls: ClassVar[bool] = True  # leaves where the score is below the threshold; else, where it has reached it
    reads_out: ClassVar[bool] = False  # looks at logits: coda and head at every step
    learned: ClassVar[bool] = False  # looks at the method's own exit probabilities
    counts: ClassVar[bool] = False  # the threshold is a number of steps

    def __post_init__(self) -> None:
        whole = not self.counts or float(self.threshold).is_integer()
        if not int(self.counts) <= self.threshold < math.inf or not whole:
            what = "a whole number of steps, at least 1" if self.counts else "a finite number of at least 0"
            raise ConfigError(f"the threshold of exit {self.name} is {self.threshold:g}: give {what}.")

    def score(self, step: Step) -> Tensor:
        """(B, T), in float32."""
        raise NotImplementedError

    def leaving(self, score: Tensor) -> Tensor:
        """(B, T) bool."""
        return score < self.threshold if self.falls else score >= self.threshold

    def __str__(self) -> str:
        return f"{self.name}:{self.threshold:.6g}"


class FixedDepth(ExitPolicy):
    name, falls, counts = "fixed", False, True

    def score(self, step: Step) -> Tensor:
        return torch.full(step.h.shape[:2], float(step.r), device=step.h.device)


class StateChange(ExitPolicy):
    name = "state"

    def score(self, step: Step) -> Tensor:
        h, before = step.h.float(), step.before.float()
        return (h - before).norm(dim=-1) / h.norm(dim=-1)


class OutputChange(ExitPolicy):
    name, reads_out = "kl", True

    def score(self, step: Step) -> Tensor:
        now = step.log_probs
        before = step.memory.get("log_probs", torch.full_like(now, -math.log(now.shape[-1])))
        step.memory["log_probs"] = now
        return (before.exp() * (before - now)).sum(-1).clamp_min(0)  # rounding must not make it leave at 0


class Entropy(ExitPolicy):
    name, reads_out = "entropy", True

    def score(self, step: Step) -> Tensor:
        log_probs = step.log_probs
        return -(log_probs.exp() * log_probs).sum(-1)


class StableTop1(ExitPolicy):
    name, falls, reads_out, counts = "top1", False, True, True

    def score(self, step: Step) -> Tensor:
        assert step.logits is not None
        now = step.logits.argmax(-1)
        same = now == step.memory.get("top1", torch.full_like(now, -1))
        in_a_row = 1 + same * step.memory.get("in_a_row", torch.zeros_like(now))
        step.memory.update(top1=now, in_a_row=in_a_row)
        return in_a_row.float()


class LearnedExit(ExitPolicy):
    """p_r = lambda_r S_{r-1}, S_r = (1 - lambda_1) ... (1 - lambda_r); 1 asks for every step, however sums round."""

    name, falls, learned = "q", False, True

    def __post_init__(self) -> None:
        if not 0 <= self.threshold <= 1:
            raise ConfigError(f"the threshold of exit q is {self.threshold:g}: it must lie between 0 and 1.")

    def score(self, step: Step) -> Tensor:
        assert step.leaves is not None
        lambda_r = step.leaves.float()
        S = step.memory.get("S", torch.ones_like(lambda_r))
        reached = step.memory.get("reached", torch.zeros_like(lambda_r)) + lambda_r * S
        step.memory.update(S=S * (1 - lambda_r), reached=reached)
        return reached

    def leaving(self, score: Tensor) -> Tensor:
        return super().leaving(score) & (self.threshold < 1)


POLICIES: dict[str, type[ExitPolicy]] = {
    policy.name: policy for policy in (FixedDepth, StateChange, OutputChange, Entropy, StableTop1, LearnedExit)
}


def find_policy(name: str) -> type[ExitPolicy]:
    """ConfigError names the nearest where there is none."""
    if name not in POLICIES:
        known = f"there are {', '.join(POLICIES)}."
        raise ConfigError(f"exit is {name!r}: {did_you_mean(name, POLICIES, known)}")
    return POLICIES[name]


def parse_exit(text: str) -> tuple[type[ExitPolicy], float | None]:
    """`kl:0.01` or `kl`: a policy, and its threshold if the text has one."""
    name, colon, number = text.partition(":")
    policy = find_policy(name)
    if not colon:
        return policy, None
    try:
        return policy, float(number)
    except ValueError:
        raise ConfigError(f"exit is {text!r}: give a number after the colon.") from None


def with_threshold(policy: type[ExitPolicy], threshold: float | None) -> ExitPolicy:
    if threshold is None:
        raise ConfigError(f"exit {policy.name} has no threshold: give one as {policy.name}:NUMBER.")
    return policy(threshold)


def check_method(model: "RecurrentDepthModel", policy: type[ExitPolicy]) -> None:
    """ConfigError where the model has nothing to leave, or not in this way."""
    method = model.config.method_name
    if model.config.blocks.is_dense:
        raise ConfigError("exit lets tokens leave the core, and a dense model has none: leave exit out.")
    if not model.rule.halts:
        raise ConfigError(f"{method} has a router, which decides how deep each token goes: leave exit out.")
    if policy.learned and not model.rule.learned_exit:
        others = ", ".join(name for name, other in POLICIES.items() if not other.learned)
        raise ConfigError(f"exit {policy.name} needs the exit probabilities of ouro, {method} has none: use {others}.")


@dataclass(frozen=True)
class Exit:
    """How deep tokens go: as `policy` says, at most `steps` deep; with a budget, so that the generated ones of each
    sequence never have a larger mean depth than it. ConfigError for what cannot work with this model."""

    policy: ExitPolicy
    steps: int
    budget: float | None = None

    @classmethod
    def of(
        cls, model: "RecurrentDepthModel", policy: ExitPolicy | None, steps: int | None = None,
        budget: float | None = None,
    ) -> "Exit":  # fmt: skip
        """policy None: only the budget. steps: default R."""
        steps = model.config.blocks.R if steps is None else steps
        model.check_depth(steps, least=1)
        policy = policy or FixedDepth(max(steps, 1))
        check_method(model, type(policy))
        if policy.counts and policy.threshold > steps:
            raise ConfigError(f"exit {policy} asks for more than the {steps} steps there are: give at most {steps}.")
        if budget is not None and not 1 <= budget <= steps:
            raise ConfigError(f"budget is {budget:g}: it must lie between 1 and the {steps} steps of a token.")
        return cls(policy, steps, budget)


def asked_exit(
    model: "RecurrentDepthModel", text: str | None, threshold: float | None = None, budget: float | None = None,
    steps: int | None = None, kept: Callable[[str], float] | None = None,
) -> Exit | None:  # fmt: skip
    """What exit (`kl:0.01`, or `kl` and a threshold apart) and budget ask for; None where they ask for nothing. steps:
    the most that a token takes, default R. kept: where the threshold of a policy is that has none here."""
    if text is None and threshold is not None:
        raise ConfigError(f"threshold is {threshold:g}, of no policy: give exit as well.")
    if text is None:
        return None if budget is None else Exit.of(model, None, steps, budget)
    policy, own = parse_exit(text)
    check_method(model, policy)
    if own is not None and threshold is not None:
        raise ConfigError(f"exit {text} has a threshold already: leave threshold out.")
    given = own if threshold is None else threshold
    if given is None and kept is not None:
        given = kept(policy.name)
    return Exit.of(model, with_threshold(policy, given), steps, budget)


class Spent:
    """The depths of each sequence's generated tokens, for their budget."""

    def __init__(self, exit: Exit, batch: int, device: torch.device) -> None:
        self.exit = exit
        self.tokens = 0
        self.steps = torch.zeros(batch, dtype=torch.long, device=device)  # (B,), of all of them together

    def most(self) -> Tensor:
        """(B,): how deep the next token of each may go."""
        if self.exit.budget is None:
            return torch.full_like(self.steps, self.exit.steps)
        left = self.exit.budget * (self.tokens + 1) - self.steps.double()
        return (left + 1e-9).floor().long().clamp(1, self.exit.steps)  # 2.9 three times is 8.7, not 8.6999

    def spend(self, depths: Tensor) -> None:
        self.tokens, self.steps = self.tokens + 1, self.steps + depths

    def keep(self, rows: Tensor) -> None:
        self.steps = self.steps[rows]
