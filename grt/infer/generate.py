"""Text from a model: one token at a time, each from a fresh forward pass over the last `context` tokens."""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from grt.config import ConfigError
from grt.model.depth import Depth
from grt.model.recurrent import RecurrentDepthModel


def pick(logits: Tensor, temperature: float, top_k: int, top_p: float, generator: torch.Generator) -> Tensor:
    """Sample one id from logits (V,): greedy at temperature 0; top_k 0 and top_p 1 keep every token."""
    if temperature == 0:
        return logits.argmax()
    logits = (logits - logits.max()) / temperature  # however small the temperature, nothing overflows
    if 0 < top_k < logits.numel():
        logits = logits.masked_fill(logits < logits.topk(top_k).values[-1], -torch.inf)
    probabilities, order = logits.softmax(-1).sort(descending=True)
    if top_p < 1:  # the smallest set of tokens whose probability reaches top_p: always at least one
        probabilities = probabilities * (probabilities.cumsum(-1) - probabilities < top_p)
    return order[torch.multinomial(probabilities, 1, generator=generator)[0]]


@torch.inference_mode()
def generate(
    model: RecurrentDepthModel,
    prompt: list[int],
    *,
    max_new_tokens: int,
    depth: int | None = None,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int = 0,
    stop: int | None = None,
) -> Iterator[int]:
    """Yield up to `max_new_tokens` token ids after `prompt` (at least one id); ends before the id `stop`.

    Greedy at temperature 0. The text of a seed is the same whenever model, depth and options are.
    """
    if not prompt:
        raise ConfigError("the prompt is empty: give at least one token (end-of-text starts a fresh document).")
    if not 0 <= temperature < math.inf:
        raise ConfigError(f"temperature is {temperature}: it must be at least 0 (0 is greedy) and finite.")
    for name, value in (("top_k", top_k), ("max_new_tokens", max_new_tokens)):
        if value < 0:
            raise ConfigError(f"{name} is {value}: it must be at least 0.")
    if not 0 < top_p <= 1:
        raise ConfigError(f"top_p is {top_p}: it must be above 0 and at most 1.")
    if not 0 <= seed < 2**63:
        raise ConfigError(f"seed is {seed}: it must lie between 0 and 2^63 - 1.")
    steps = model.full_depth if depth is None else Depth(depth)
    model.check_depth(steps.steps, least=1)
    generator = torch.Generator().manual_seed(seed)
    ids, context = list(prompt), model.config.context
    was_training = model.training
    model.eval()
    try:
        for _ in range(max_new_tokens):
            window = torch.tensor([ids[-context:]], device=model.device)
            logits = model(window, steps)[0, -1].float().cpu()
            token = int(pick(logits, temperature, top_k, top_p, generator))
            if token == stop:
                return
            ids.append(token)
            yield token
    finally:
        model.train(was_training)
