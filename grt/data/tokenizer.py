"""Tokenizers: text <-> ids. Text is only ever text: no spelling of a special token in it becomes that token.

End-of-text is appended by id (see `prepare`), never parsed, so a document that quotes `<|endoftext|>` survives.
"""

import difflib
import hashlib
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from grt.config import ConfigError


class Tokenizer(Protocol):
    """What every tokenizer offers; `sha256` identifies the mapping, whatever file or package it came from."""

    name: str
    vocab_size: int  # ids are 0..vocab_size-1, end-of-text included
    eot: int
    sha256: str

    def encode(self, text: str) -> np.ndarray:
        """Ids of the text, (n,), in the smallest unsigned dtype that holds the vocabulary; no end-of-text is added."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Text of the ids; invalid UTF-8 becomes U+FFFD and end-of-text the empty string."""
        ...


class ByteTokenizer:
    """The 256 bytes of UTF-8, and end-of-text = 256."""

    name = "bytes"
    vocab_size = 257
    eot = 256
    sha256 = hashlib.sha256(b"id = byte of the UTF-8 text; end-of-text = 256").hexdigest()

    def encode(self, text: str) -> np.ndarray:
        """Ids of the text, (bytes of its UTF-8,), uint16: 257 ids are one too many for a byte."""
        return np.frombuffer(text.encode(), np.uint8).astype(np.uint16)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of the ids; invalid UTF-8 becomes U+FFFD, end-of-text "". Raises ConfigError for an id above 256."""
        return bytes(i for i in ids if i != self.eot).decode(errors="replace")


TOKENIZERS: dict[str, Callable[[], Tokenizer]] = {"bytes": ByteTokenizer}


def get_tokenizer(name: str) -> Tokenizer:
    """The tokenizer of that name. Raises ConfigError for an unknown one."""
    if name not in TOKENIZERS:
        nearest = difflib.get_close_matches(name, TOKENIZERS, n=1, cutoff=0)[0]
        raise ConfigError(f"Unknown tokenizer {name!r}: choose from {', '.join(TOKENIZERS)} (nearest: {nearest}).")
    return TOKENIZERS[name]()
