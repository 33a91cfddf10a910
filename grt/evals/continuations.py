"""How likely texts are after their contexts, whatever their lengths: what zero-shot tasks ask for.

A pair longer than the model's context T loses the first tokens of its context, as lm-evaluation-harness prescribes. A
text that alone is longer comes in pieces of T tokens, each after the one before it: lm-eval's rolling windows.

Shapes: B pairs, T tokens, N scored tokens of all pairs, V vocabulary.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from grt.backbone.context import LoopContext, left_padded
from grt.device import autocast
from grt.errors import ConfigError
from grt.evals.early_exit import forced_halting
from grt.evals.sharing import forced_logits
from grt.exits.loop import halting_cache, run_halting
from grt.exits.policies import Exit
from grt.model.depth import Depth
from grt.model.loop import RecurrentDepthModel

BATCH_TOKENS = 4096  # of a batch whose size nobody chose


class Pair(NamedTuple):
    """A context and what is scored after it, as ids; neither is empty."""

    context: list[int]
    text: list[int]


class Score(NamedTuple):
    """The natural logarithm of the text's probability; whether each of its tokens has the largest logit; and the steps
    of the core, in sum, that the tokens which predict them took."""

    log_prob: float
    greedy: bool
    steps: int


class Scorer(Protocol):
    """A way of running the model. At which depths, which keys tokens see, when they leave the loop: all its own."""

    def __call__(self, pairs: Sequence[Pair]) -> dict[int, list[Score]]:
        """Depth -> the scores of the pairs, which fit the model's context side by side."""
        ...


def pieces(pair: Pair, T: int) -> list[Pair]:
    """The pair as a model of context T reads it."""
    assert pair.context and pair.text, "a text without tokens would be certain"
    tokens, begin = pair.context + pair.text, len(pair.context)
    cut = []
    for start in range(begin, len(tokens), T):
        end = min(start + T, len(tokens))
        cut.append(Pair(tokens[max(end - T - 1, 0) : start], tokens[start:end]))
    return cut


def batches(pairs: Sequence[Pair], size: int | None, T: int) -> Iterator[list[int]]:
    """Indices of the pairs, `size` at a time (None: as make BATCH_TOKENS), longest first: what the memory cannot hold
    shows at once. The longest context and the longest text of a batch fit T together."""
    order = sorted(range(len(pairs)), key=lambda i: (sum(map(len, pairs[i])), len(pairs[i].text)), reverse=True)
    batch, longest = [], (0, 0)
    for i in order:
        context, text = (max(a, len(b)) for a, b in zip(longest, pairs[i], strict=True))
        width = context + text - 1
        full = len(batch) == size if size else (len(batch) + 1) * width > BATCH_TOKENS
        if batch and (full or width > T):
            yield batch
            batch, (context, text) = [], map(len, pairs[i])
        batch.append(i)
        longest = context, text
    if batch:
        yield batch


def score(scorer: Scorer, pairs: Sequence[Pair]) -> dict[int, list[Score]]:
    """What the scorer says, half of the pairs at a time where the device's memory is too small for all of them."""
    try:
        return scorer(pairs)
    except torch.OutOfMemoryError:
        if len(pairs) == 1:
            raise ConfigError("device has too little memory for a single request: use a larger one, or cpu.") from None
    half = len(pairs) // 2  # here, where the failed pass has left the memory
    first, second = score(scorer, pairs[:half]), score(scorer, pairs[half:])
    return {depth: first[depth] + second[depth] for depth in first}


class AtOnce:
    """All tokens in one pass, all depths from one loop: keys and values of every step (kv full)."""

    def __init__(self, model: RecurrentDepthModel, depths: Sequence[int], dtype: torch.dtype) -> None:
        self.model, self.depths, self.dtype = model, depths, dtype

    @torch.inference_mode()
    def __call__(self, pairs: Sequence[Pair]) -> dict[int, list[Score]]:
        model, scores = self.model, {}
        ids, scored = _rows(pairs, model.device)
        ctx = LoopContext()
        with autocast(model.device, self.dtype):
            for k, h in enumerate(model.states(ids, ctx, Depth(max(self.depths)))):
                if k in self.depths:
                    scores[k] = _scores(model.head(model.coda(h, ctx)[scored]), pairs, k)
        return scores


class Halting:
    """All tokens in one pass, each of which leaves the loop on its own; under each of `exits`, whose steps are the
    depths that the scores are given for."""

    def __init__(self, model: RecurrentDepthModel, exits: Sequence[Exit], dtype: torch.dtype) -> None:
        self.model, self.exits, self.dtype = model, exits, dtype

    @torch.inference_mode()
    def __call__(self, pairs: Sequence[Pair]) -> dict[int, list[Score]]:
        model, scores = self.model, {}
        ids, scored = _rows(pairs, model.device)
        for exit in self.exits:
            ctx = LoopContext(cache=halting_cache(model, exit, *ids.shape))
            with autocast(model.device, self.dtype):
                logits, depths = run_halting(model, ids, ctx, exit)
            scores[exit.steps] = _scores(logits[scored], pairs, depths[scored])
        return scores


class HaltingTokenByToken:
    """As Halting, with the context as a prompt and then the text under a strategy of sharing keys and values."""

    def __init__(self, model: RecurrentDepthModel, exits: Sequence[Exit], dtype: torch.dtype, strategy: str) -> None:
        self.model, self.exits, self.dtype, self.strategy = model, exits, dtype, strategy

    @torch.inference_mode()
    def __call__(self, pairs: Sequence[Pair]) -> dict[int, list[Score]]:
        model, scores = self.model, {}
        prompt, real = left_padded([pair.context for pair in pairs], model.device)
        text, scored = _right_padded([pair.text for pair in pairs], model.device)
        for exit in self.exits:
            with autocast(model.device, self.dtype):
                logits, depths = forced_halting(model, prompt, text, self.strategy, exit, real)
            scores[exit.steps] = _scores(logits[scored], pairs, depths[scored])
        return scores


class TokenByToken:
    """The context as a prompt, then the text token by token under a strategy of sharing keys and values."""

    def __init__(self, model: RecurrentDepthModel, depths: Sequence[int], dtype: torch.dtype, strategy: str) -> None:
        self.model, self.depths, self.dtype, self.strategy = model, depths, dtype, strategy

    @torch.inference_mode()
    def __call__(self, pairs: Sequence[Pair]) -> dict[int, list[Score]]:
        model, scores = self.model, {}
        prompt, real = left_padded([pair.context for pair in pairs], model.device)
        text, scored = _right_padded([pair.text for pair in pairs], model.device)
        for depth in self.depths:
            with autocast(model.device, self.dtype):
                logits = forced_logits(model, prompt, text, self.strategy, steps=depth, real=real)
            scores[depth] = _scores(logits[scored], pairs, depth)
        return scores


def _rows(pairs: Sequence[Pair], device: torch.device) -> tuple[Tensor, Tensor]:
    """Ids (B, T) of contexts with their texts, which the last token ends unread; and which of them predict a text."""
    ids, scored = _right_padded([pair.context + pair.text[:-1] for pair in pairs], device)
    for row, pair in enumerate(pairs):
        scored[row, : len(pair.context) - 1] = False
    return ids, scored


def _right_padded(rows: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Ids (B, T) of rows that begin together, and (B, T): False where a row has padding, which no token sees."""
    longest = max(map(len, rows))
    ids = torch.tensor([[*row, *[0] * (longest - len(row))] for row in rows], device=device)
    lengths = torch.tensor([len(row) for row in rows], device=device)
    return ids, torch.arange(longest, device=device) < lengths[:, None]


def _scores(logits: Tensor, pairs: Sequence[Pair], steps: Tensor | int) -> list[Score]:
    """From the logits (N, V) of all texts, one after the other, and the steps (N,) that they took."""
    targets = torch.tensor([token for pair in pairs for token in pair.text], device=logits.device)
    log_probs = -F.cross_entropy(logits.float(), targets, reduction="none").double()
    hits = logits.argmax(-1) == targets
    steps = torch.as_tensor(steps, device=logits.device).expand(len(targets))
    parts = (x.cpu().split([len(pair.text) for pair in pairs]) for x in (log_probs, hits, steps))
    return [Score(p.sum().item(), bool(hit.all()), int(n.sum())) for p, hit, n in zip(*parts, strict=True)]
