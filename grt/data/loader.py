"""Token shards -> training and evaluation windows. Nothing here has a state: a batch follows from its arguments.

S rows a slot, T = context tokens a row. Windows may span documents, which end-of-text tells apart; those of a
`DocumentSplit` (see `documents`) lie within one.
"""

import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from grt.console import working
from grt.errors import ConfigError

LARGEST_BIGRAMS = 1024  # ids
BLOCK = 1 << 20  # tokens looked at together when a whole split is read


class Split:
    """The tokens of one split, memory-mapped: one sequence, over however many shards.

    `entry` is the split's part of meta.json: documents, tokens, bytes (UTF-8 bytes of the text), sha256, shards.
    """

    def __init__(self, name: str, folder: Path, entry: dict, dtype: str, vocab_size: int):
        self.name, self.folder, self.vocab_size = name, folder, vocab_size
        self.n_tokens, self.n_bytes, self.n_documents = entry["tokens"], entry["bytes"], entry["documents"]
        self.sha256 = entry["sha256"]
        little_endian = np.dtype(dtype).newbyteorder("<")
        self._shards = [np.memmap(folder / shard["file"], little_endian, mode="r") for shard in entry["shards"]]
        self._ends = np.cumsum([len(shard) for shard in self._shards])
        self.has_bigrams = vocab_size <= LARGEST_BIGRAMS

    def read(self, start: int, length: int) -> np.ndarray:
        """Tokens start..start+length-1, int64 (length,), across shard boundaries."""
        assert start >= 0 and start + length <= self.n_tokens, (start, length, self.n_tokens)
        out = np.empty(length, np.int64)
        done = 0
        while done < length:
            k = int(np.searchsorted(self._ends, start + done, side="right"))
            offset = start + done - (int(self._ends[k]) - len(self._shards[k]))
            piece = self._shards[k][offset : offset + length - done]
            out[done : done + len(piece)] = piece
            done += len(piece)
        return out

    def window(self, start: int, context: int) -> tuple[np.ndarray, np.ndarray]:
        """The window that begins there: ids and their targets, each int64 (T,)."""
        tokens = self.read(start, context + 1)
        return tokens[:-1], tokens[1:]

    def require(self, n_tokens: int) -> None:
        """Raises ConfigError unless the split holds that many tokens."""
        if self.n_tokens < n_tokens:
            raise ConfigError(
                f"The {self.name} split in {self.folder} has {self.n_tokens} tokens but a window needs {n_tokens} "
                "(context + 1): give more text or a smaller context."
            )

    def n_starts(self, context: int) -> int:
        """In how many places a window of T tokens and their targets may begin: the last target ends the split."""
        return self.n_tokens - context

    def start(self, k: int, context: int) -> int:
        """The k-th of these places."""
        return k

    def n_tiles(self, context: int) -> int:
        """How many non-overlapping windows of T tokens (and their targets) there are."""
        return (self.n_tokens - 1) // context

    def tile(self, i: int, context: int) -> int:
        """Where the i-th of these begins."""
        return i * context

    def unreachable(self, context: int) -> int:
        """How many tokens no window holds."""
        return 0


def batch(
    split: Split, *, seed: int, step: int, slot: int, rows: range, context: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The training windows of these rows of an accumulation slot: (ids, targets), each int64 (len(rows), T).

    A row's offset is a pure function of (seed, step, slot, row), so ranks that divide a slot's rows among them draw
    exactly what one rank would. Raises ConfigError when the split is shorter than T + 1 tokens.
    """
    split.require(context + 1)
    windows = []
    for row in rows:
        # randrange excludes its bound: the last place is n_starts - 1, and its targets end with the last token.
        k = random.Random(f"window/{seed}/{step}/{slot}/{row}").randrange(split.n_starts(context))
        windows.append(split.window(split.start(k, context), context))
    return _ids_and_targets(windows)


def n_windows(split: Split, context: int, limit: int | None = None) -> int:
    """How many non-overlapping windows of T tokens (and their targets) the split holds, or `limit` if that is fewer.

    Raises ConfigError when it holds none.
    """
    split.require(context + 1)
    n = split.n_tiles(context)
    return n if limit is None else min(n, limit)


def windows(
    split: Split, context: int, limit: int | None = None, batch_size: int = 1
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Non-overlapping windows from the start of the split, in order: (ids, targets), int64 (up to batch_size, T).

    Targets are one further on. In a split without regard to documents window i is tokens iT..iT+T-1, so every token
    but the first is a target at most once.
    """
    n = n_windows(split, context, limit)
    with working("window", n) as task:
        for first in range(0, n, batch_size):
            starts = [split.tile(i, context) for i in range(first, min(first + batch_size, n))]
            yield _ids_and_targets([split.window(start, context) for start in starts])
            task.advance(len(starts))


def check_ids(ids: np.ndarray, vocab_size: int, where: Path | str) -> None:
    """Raises ConfigError for ids beyond the vocabulary, which an embedding would read out of bounds."""
    if ids.size and (largest := int(ids.max())) >= vocab_size:
        raise ConfigError(f"{where} holds id {largest}, beyond its vocabulary of {vocab_size}: prepare the data again.")


def bigram_entropy(split: Split) -> float:
    """H(x_t | x_{t-1}) in nats per token, from the split's own bigram counts: what a perfect bigram model would reach.

    Raises ConfigError for vocabularies above LARGEST_BIGRAMS, whose tables would be mostly zeros, and for fewer than
    two tokens.
    """
    v = split.vocab_size
    if v > LARGEST_BIGRAMS:
        raise ConfigError(f"Bigram entropy is for vocabularies up to {LARGEST_BIGRAMS}, not {v}: use bytes.")
    split.require(2)
    counts = np.zeros(v * v, np.int64)
    for start in range(0, split.n_tokens - 1, BLOCK):
        ids = split.read(start, min(BLOCK + 1, split.n_tokens - start))  # one more: pairs across blocks count too
        counts += np.bincount(ids[:-1] * v + ids[1:], minlength=v * v)
    pairs = counts.reshape(v, v).astype(np.float64)
    previous, following = np.nonzero(pairs)
    n = pairs[previous, following]
    return float((n * np.log(pairs.sum(1)[previous] / n)).sum() / n.sum())


def _ids_and_targets(windows: list[tuple[np.ndarray, np.ndarray]]) -> tuple[torch.Tensor, torch.Tensor]:
    ids, targets = zip(*windows, strict=True)
    return torch.from_numpy(np.stack(ids)), torch.from_numpy(np.stack(targets))
