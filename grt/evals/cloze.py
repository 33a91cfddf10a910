"""Cloze accuracy: which of four continuations is the true one? Made once from the documents of a split by a seed.

An item is 128 bytes of a document and four spans of 32 bytes: the one that follows, and three from other documents.
The model's answer is the span with the highest mean log-probability; chance is one in four.
"""

import hashlib
import json
import math
import random
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from grt.console import each
from grt.data.documents import DocumentSplit
from grt.data.tokenizer import Tokenizer
from grt.device import autocast
from grt.errors import ConfigError
from grt.evals.sharing import forced_log_probs
from grt.model.loop import RecurrentDepthModel

CONTEXT, SPAN, CHOICES = 128, 32, 4


class Item(NamedTuple):
    """context and choices are bytes; answer is the true choice's index."""

    context: bytes
    choices: tuple[bytes, ...]
    answer: int


def make_items(split: DocumentSplit, tokenizer: Tokenizer, n: int = 2000, seed: int = 0) -> list[Item]:
    """`n` items; documents come as often as they are long. ConfigError where fewer than four documents are long
    enough."""
    texts = [
        tokenizer.decode(split.read(start, length - 1).tolist()).encode()  # without end-of-text
        for start, length in zip(split.starts.tolist(), split.lengths.tolist(), strict=True)
    ]
    texts = [text for text in texts if len(text) >= CONTEXT + SPAN]
    if len(texts) < CHOICES:
        raise ConfigError(
            f"{split.folder} has {len(texts)} validation documents of {CONTEXT + SPAN} bytes: cloze needs {CHOICES}."
        )
    rng, items = random.Random(f"cloze/{seed}"), []
    weights = [len(text) - CONTEXT - SPAN + 1 for text in texts]
    for _ in range(n):
        [mine] = rng.choices(range(len(texts)), weights)
        at = CONTEXT + rng.randrange(weights[mine])
        others = rng.sample([i for i in range(len(texts)) if i != mine], CHOICES - 1)
        spans = [texts[mine][at : at + SPAN]]
        for i in others:
            start = rng.randrange(len(texts[i]) - SPAN + 1)
            spans.append(texts[i][start : start + SPAN])
        order = rng.sample(range(CHOICES), CHOICES)
        items.append(Item(texts[mine][at - CONTEXT : at], tuple(spans[i] for i in order), order.index(0)))
    return items


def dump_items(items: Sequence[Item], path: Path | None = None) -> str:
    """sha256 of the items as JSON lines (bytes as Latin-1), which `path` is given."""
    rows = [
        {"context": item.context.decode("latin-1"), "choices": [c.decode("latin-1") for c in item.choices],
         "answer": item.answer}
        for item in items
    ]  # fmt: skip
    text = "".join(json.dumps(row) + "\n" for row in rows)
    if path is not None:
        path.write_text(text, encoding="utf-8")
    return hashlib.sha256(text.encode()).hexdigest()


def cloze_accuracy(
    model: RecurrentDepthModel, items: Sequence[Item], tokenizer: Tokenizer, strategy: str = "full", *,
    batch_size: int = 32, dtype: torch.dtype = torch.float32, steps: int | None = None,
) -> tuple[float, float]:  # fmt: skip
    """Accuracy and its standard error, each choice fed token by token under a strategy of sharing keys and values."""
    right = 0
    batches = [items[first : first + batch_size] for first in range(0, len(items), batch_size)]
    for number, batch in enumerate(each(batches, "cloze")):
        prompts = [_ids(tokenizer, item.context) or [tokenizer.eot] for item in batch]
        texts = [_ids(tokenizer, choice) for item in batch for choice in item.choices]
        if [] in texts:
            item, choice = divmod(texts.index([]), CHOICES)
            span, item = batch[item].choices[choice], number * batch_size + item
            raise ConfigError(
                f"cloze has item {item} with the choice {span!r}, for which {tokenizer.name} has no token: "
                "leave --cloze out, or give --data another text."
            )
        scores = torch.empty(len(texts), dtype=torch.float64)
        # One length at a time: with a tokenizer of bytes, all of them.
        for P, M in sorted({(len(prompts[i // CHOICES]), len(text)) for i, text in enumerate(texts)}):
            rows = [i for i, text in enumerate(texts) if (len(prompts[i // CHOICES]), len(text)) == (P, M)]
            prompt = torch.tensor([prompts[i // CHOICES] for i in rows], device=model.device)
            text = torch.tensor([texts[i] for i in rows], device=model.device)
            repeat = CHOICES if len(rows) == len(texts) else 1
            with autocast(model.device, dtype):
                nats = forced_log_probs(model, prompt[::repeat], text, strategy, repeat, steps)
            scores[rows] = nats.double().mean(1).cpu()
        answers = scores.view(-1, CHOICES).argmax(1).tolist()
        right += sum(answer == item.answer for answer, item in zip(answers, batch, strict=True))
    accuracy = right / len(items)
    return accuracy, math.sqrt(accuracy * (1 - accuracy) / len(items))


def _ids(tokenizer: Tokenizer, text: bytes) -> list[int]:
    """The bytes themselves where they are the tokens; else what is left of a character that was cut is dropped."""
    return list(text) if tokenizer.name == "bytes" else [int(i) for i in tokenizer.encode(text.decode(errors="ignore"))]
