"""Sampling: how the next token is drawn from a model's logits.

Shapes: V vocabulary.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from grt.errors import ConfigError

FEW = 1024  # tokens that mostly hold top_p: to sort these takes a tenth of the time of sorting GPT-2's vocabulary


@dataclass(frozen=True)
class Sampling:
    """What is done to the logits, in this order; the defaults draw from the model's own distribution.

    repetition_penalty: the logits of ids that are in the text already are divided by it where they are positive and
    multiplied where they are negative (CTRL, arXiv 1909.05858). temperature: 0 takes the likeliest token and asks no
    further. top_k: only the k likeliest (0: all; those as likely as the last stay too). top_p: of these the likeliest
    that hold this much probability (arXiv 1904.09751). min_p: of these the ones that have at least this share of the
    likeliest's probability (arXiv 2407.01082). never: ids that are not drawn, such as those that stand for no token.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    never: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < math.inf:
            raise ConfigError(f"temperature is {self.temperature}: it must be at least 0 (0 is greedy) and finite.")
        if self.top_k < 0:
            raise ConfigError(f"top_k is {self.top_k}: it must be at least 0 (0 keeps every token).")
        if not 0 < self.top_p <= 1:
            raise ConfigError(f"top_p is {self.top_p}: it must be above 0 and at most 1.")
        if not 0 <= self.min_p <= 1:
            raise ConfigError(f"min_p is {self.min_p}: it must lie between 0 and 1.")
        if not 0.01 <= self.repetition_penalty <= 100:
            raise ConfigError(
                f"repetition_penalty is {self.repetition_penalty}: it must lie between 0.01 and 100 (1 is none)."
            )

    def probabilities(self, logits: Tensor, past: Sequence[int]) -> Tensor:
        """(V,), in float64, which any temperature above 0 leaves finite; past: the ids of prompt and text."""
        return self.narrowed(self.punished(logits, past))

    def punished(self, logits: Tensor, past: Sequence[int]) -> Tensor:
        """The repetition penalty, and no chance for `never`: (V,) to (V,) in float64."""
        logits = logits.double()
        if self.never:
            logits = logits.index_fill(-1, torch.tensor(self.never, device=logits.device), -torch.inf)
        if self.repetition_penalty == 1:
            return logits
        seen = torch.tensor(sorted(set(past)), device=logits.device)
        again = logits[seen]
        punished = torch.where(again > 0, again / self.repetition_penalty, again * self.repetition_penalty)
        return logits.index_put((seen,), punished)

    def narrowed(self, logits: Tensor) -> Tensor:
        """What temperature and the choice of tokens make of punished logits: probabilities, both (..., V)."""
        if self.temperature == 0:
            return torch.zeros_like(logits).scatter_(-1, logits.argmax(-1, keepdim=True), 1.0)
        logits = (logits - logits.amax(-1, keepdim=True)) / self.temperature
        if 0 < self.top_k < logits.shape[-1]:
            logits = logits.masked_fill(logits < logits.topk(self.top_k).values[..., -1:], -torch.inf)
        p = logits.softmax(-1)
        if self.top_p < 1:
            likeliest, order = p.topk(min(FEW, p.shape[-1]))
            if likeliest.sum(-1).min() <= self.top_p:
                likeliest, order = p.sort(descending=True)
            beyond = likeliest.cumsum(-1) - likeliest >= self.top_p  # the one that reaches top_p stays
            p = torch.zeros_like(p).scatter(-1, order, likeliest.masked_fill(beyond, 0))
        if self.min_p > 0:
            p = p.masked_fill(p < self.min_p * p.amax(-1, keepdim=True), 0)
        return p / p.sum(-1, keepdim=True)

    def draw(self, p: Tensor, generator: torch.Generator) -> int:
        """An id from probabilities (V,)."""
        return int(p.argmax() if self.temperature == 0 else torch.multinomial(p, 1, generator=generator))

    def pick(self, logits: Tensor, past: Sequence[int], generator: torch.Generator) -> tuple[int, float]:
        """An id, and its log-probability under the model itself: the log-softmax of the logits (V,) as they came."""
        token = self.draw(self.probabilities(logits, past), generator)
        return token, logits.double().log_softmax(-1)[token].item()
