"""Depth tasks: generated sequences that few layers cannot compute (arXiv 2502.17416 uses such). A seed makes a split.

`task:p-hop:P`: letters x over a, b, c, d; hop(i) = the largest j <= i with x[j-1] = x[i]; the target at i is the letter
that P hops from i lead to, or `?` where one of them is undefined. Not the next letter: ids and targets differ.
`task:addition:N`: `12+34+56=201`, 2 to N two-digit operands and the digits of their sum, the lowest first; one problem
after the other, as text that is predicted in the ordinary way.

Ids are those of the bytes tokenizer.
"""

import hashlib
import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from grt.data.loader import Split
from grt.data.shards import Prepared, Windows
from grt.data.tokenizer import ByteTokenizer, Tokenizer
from grt.errors import ConfigError

PREFIX = "task:"
LETTERS, UNDEFINED = b"abcd", ord("?")
COUNTED_FROM = 20  # position of a p-hop sequence: before it, most labels are undefined
VALIDATION = 4096  # sequences
SEQUENCE = 64  # tokens, where nothing else says how many


class Span(NamedTuple):
    """Targets start..stop-1, which are right together or not at all; `group` is what they are counted under."""

    group: str
    start: int
    stop: int


class TaskSplit(Split):
    """Sequence k of a split is a function of its name and k; `make(rng, T)` gives ids and targets, each (T,). T is at
    least `shortest`."""

    def __init__(
        self, task: str, name: str, make: Callable, spans: Callable[[np.ndarray], Iterator[Span]], shortest: int
    ):
        self.name, self.folder, self.vocab_size = name, Path(task), ByteTokenizer.vocab_size
        self.n_documents = VALIDATION if name == "val" else 1 << 40
        self.n_tokens = self.n_bytes = self.n_documents * SEQUENCE
        self.sha256 = hashlib.sha256(f"{task}/{name}".encode()).hexdigest()
        self._make, self.spans, self.shortest = make, spans, shortest
        self.has_bigrams = False  # of a task, they say nothing

    def window(self, start: int, context: int) -> tuple[np.ndarray, np.ndarray]:
        return self._make(random.Random(f"{self.folder}/{self.name}/{start}"), context)

    def require(self, n_tokens: int) -> None:
        """ConfigError unless a window of so many tokens, the last target included, holds a whole problem."""
        if n_tokens - 1 < self.shortest:
            raise ConfigError(
                f"model.context is {n_tokens - 1}, too short for one problem of {self.folder}: take a model of a "
                f"context of {self.shortest} or more."
            )

    def n_starts(self, context: int) -> int:
        return self.n_documents

    def n_tiles(self, context: int) -> int:
        return self.n_documents

    def tile(self, i: int, context: int) -> int:
        return i


class TaskData(Prepared):
    """What stands in the place of a prepared folder."""

    splits: dict[str, TaskSplit]

    def __init__(self, source: str, make: Callable, spans: Callable[[np.ndarray], Iterator[Span]], shortest: int):
        splits = {name: TaskSplit(source, name, make, spans, shortest) for name in ("train", "val")}
        entries = {name: {"sha256": split.sha256, "tokens": split.n_tokens} for name, split in splits.items()}
        meta = {"corpus_sha256": hashlib.sha256(source.encode()).hexdigest(), "splits": entries}
        super().__init__(Path(source), meta)
        object.__setattr__(self, "splits", splits)

    def split(self, name: str, windows: Windows = "any") -> Split:
        return self.splits[name]

    def whole(self, windows: Windows = "any") -> Split:
        return self.splits["val"]

    @property
    def tokenizer(self) -> Tokenizer:
        return ByteTokenizer()


def open_task(source: str, tokenizer: str) -> TaskData:
    """The data of `task:p-hop:P` or `task:addition:N`. ConfigError for anything else, and for another tokenizer."""
    match = re.fullmatch(r"task:(p-hop|addition):([1-9]\d?)", source, re.ASCII)
    number = int(match[2]) if match else 0
    if match is None or number < (1 if match[1] == "p-hop" else 2):
        raise ConfigError(f"data.path is {source!r}: write task:p-hop:P (P hops) or task:addition:N (2 to N operands).")
    if tokenizer != "bytes":
        raise ConfigError(f"{source} is made of bytes, the run reads {tokenizer}: set --data.tokenizer bytes.")
    if match[1] == "p-hop":
        return TaskData(source, lambda rng, length: p_hop(rng, length, number), p_hop_spans, COUNTED_FROM + 1)
    longest = 3 * number + len(str(99 * number))  # operands with what follows each, the digits of the sum
    return TaskData(source, lambda rng, length: addition(rng, length, number), addition_spans, longest)


def p_hop(rng: random.Random, length: int, hops: int) -> tuple[np.ndarray, np.ndarray]:
    x = rng.choices(LETTERS, k=length)
    last, hop = {}, []
    for i, letter in enumerate(x):
        hop.append(last.get(letter, -2) + 1)  # -1: undefined
        last[letter] = i
    at = list(range(length))
    for _ in range(hops):
        at = [hop[i] if i >= 0 else -1 for i in at]
    return np.array(x, np.int64), np.array([x[i] if i >= 0 else UNDEFINED for i in at], np.int64)


def p_hop_spans(ids: np.ndarray) -> Iterator[Span]:
    return (Span("all", i, i + 1) for i in range(COUNTED_FROM, len(ids)))


def addition(rng: random.Random, length: int, most: int) -> tuple[np.ndarray, np.ndarray]:
    text = ""
    while len(text) <= length:
        operands = [rng.randint(10, 99) for _ in range(rng.randint(2, most))]
        text += f"{'+'.join(map(str, operands))}={str(sum(operands))[::-1]}\n"
    tokens = np.frombuffer(text[: length + 1].encode(), np.uint8).astype(np.int64)
    return tokens[:-1], tokens[1:]


def addition_spans(ids: np.ndarray) -> Iterator[Span]:
    """The digits of each sum and the line end after them; a sum that the window cuts off is not counted."""
    # The line end of an answer may be the target of the last id. A sum that is cut off before has lost its first digit,
    # which is not 0: it is another number.
    text = bytes(ids.tolist()).decode() + "\n"
    for problem in re.finditer(r"([\d+]+)=(\d+)\n", text):
        operands = [int(n) for n in problem[1].split("+")]
        if int(problem[2][::-1]) == sum(operands):
            yield Span(f"{len(operands)} operands", problem.start(2) - 1, problem.end() - 1)
