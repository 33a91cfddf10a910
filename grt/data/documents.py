"""Windows that lie within one document each (`data.windows: document`).

A document of n tokens, its end-of-text included, has n - T places where a training window of T tokens and their targets
may begin, each drawn equally often, and (n - 1) // T validation windows. One of fewer than T + 1 tokens has none: its
tokens are out of reach, and `unreachable` counts them. What a document says never enters another one's loss.
"""

from pathlib import Path

import numpy as np

from grt.data.loader import Split
from grt.errors import ConfigError


class DocumentSplit(Split):
    """A split that knows where its documents end: `ends`, int64 (documents,), each the position after end-of-text."""

    def __init__(self, name: str, folder: Path, entry: dict, dtype: str, vocab_size: int, ends: np.ndarray):
        super().__init__(name, folder, entry, dtype, vocab_size)
        self.starts = np.concatenate([[0], ends[:-1]]).astype(np.int64)
        self.lengths = ends - self.starts
        self._windows: dict[tuple[int, int], np.ndarray] = {}

    def require(self, n_tokens: int) -> None:
        longest = int(self.lengths.max(initial=0))
        if longest < n_tokens:
            raise ConfigError(
                f"The longest document of the {self.name} split in {self.folder} has {longest} tokens but a window "
                f"needs {n_tokens} (context + 1): give longer documents, a smaller context or data.windows any."
            )

    def n_starts(self, context: int) -> int:
        return int(self._up_to(context, 1)[-1])

    def start(self, k: int, context: int) -> int:
        return self._nth(k, context, 1)

    def n_tiles(self, context: int) -> int:
        return int(self._up_to(context, context)[-1])

    def tile(self, i: int, context: int) -> int:
        return self._nth(i, context, context)

    def unreachable(self, context: int) -> int:
        return int(self.lengths[self.lengths <= context].sum())

    def _up_to(self, context: int, step: int) -> np.ndarray:
        """How many windows, `step` tokens apart, the documents up to and with each one have; kept for the next call."""
        if (context, step) not in self._windows:
            counts = (np.maximum(self.lengths - context, 0) + step - 1) // step
            self._windows[context, step] = np.cumsum(counts)
        return self._windows[context, step]

    def _nth(self, k: int, context: int, step: int) -> int:
        """Where the k-th of these windows begins."""
        up_to = self._up_to(context, step)
        document = int(np.searchsorted(up_to, k, side="right"))
        before = int(up_to[document - 1]) if document else 0
        return int(self.starts[document]) + step * (k - before)
