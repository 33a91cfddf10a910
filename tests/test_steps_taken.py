"""A cache knows how many steps each token took, whatever became of the passes."""

import random

import torch

from grt.cache.kv import KVCache


@torch.no_grad()
def test_how_many_steps_each_token_took(tiny) -> None:
    """Written only where it is not yet what `ran` says: through passes of any depth, tokens that left on their own,
    tokens taken back, more room, other rows and new prompts."""
    rng = random.Random(0)
    for _ in range(200):
        cache = KVCache(tiny("grt"), batch=2, capacity=6)
        expected: list[list[int]] = [[], []]
        for _ in range(40):
            length, act = (
                len(expected[0]),
                rng.choice(["pass", "pass", "leave", "rollback", "grow", "reorder", "clear"]),
            )
            if act in ("pass", "leave") and length < cache.capacity:
                new, steps = rng.randint(1, cache.capacity - length), rng.randint(1, 3)
                cache.begin(new)
                cache.core.repeat(steps)
                took = [[rng.randint(1, steps) if act == "leave" else steps for _ in range(new)] for _ in range(2)]
                cache.ran = torch.tensor(took) if act == "leave" else None
                cache.end_pass()
                expected = [old + more for old, more in zip(expected, took, strict=True)]
            elif act == "rollback":
                tokens = rng.randint(0, length)
                cache.rollback(tokens)
                expected = [row[: length - tokens] for row in expected]
            elif act == "grow" and cache.capacity < 12:
                cache.grow(cache.capacity + 2)
            elif act == "reorder":
                cache.reorder(torch.tensor([1, 0]))
                expected.reverse()
            elif act == "clear" and rng.random() < 0.3:
                cache.clear()
                expected = [[], []]
            assert cache.core.ran[:, : cache.length].tolist() == expected
