"""Tokenizers: text <-> ids. Text is only ever text: no spelling of a special token in it becomes that token.

End-of-text is appended by id (see `encode`), never parsed, so a document that quotes `<|endoftext|>` survives.
`bytes` is here, `gpt2` in `gpt2`, and any tokenizer.json, as `hf:PATH` or `hf:NAME`, in `tokenizer_json`.
"""

import hashlib
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from grt.data.byte_level import byte_letters, tokenizer_json
from grt.errors import ConfigError, did_you_mean

END_OF_TEXT = "<|endoftext|>"


class Tokenizer(Protocol):
    """What every tokenizer offers; `sha256` identifies the mapping, whatever file or package it came from."""

    name: str
    vocab_size: int  # ids are 0..vocab_size-1, end-of-text included
    eot: int
    eot_text: str  # how others spell it; here it is never parsed
    sha256: str

    @property
    def context(self) -> int:
        """How many characters around a piece of text decide its ids; 0 where it is cut only where none do."""
        ...

    @property
    def unused(self) -> Sequence[int]:
        """Ids below vocab_size that stand for nothing: no text gives them, and nothing may draw them."""
        ...

    def encode(self, text: str, before: str = "", after: str = "") -> np.ndarray:
        """Ids of the text, (n,), in the smallest unsigned dtype that holds the vocabulary; no end-of-text is added.

        before, after: what stands around a piece, as much of it as `context` says.
        """
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Text of the ids; invalid UTF-8 becomes U+FFFD and end-of-text the empty string."""
        ...

    def json(self) -> str:
        """The same mapping as a tokenizer.json, without tokens added around a text."""
        ...

    def cut(self, text: str) -> int:
        """The last place where the text may be cut so that its parts, encoded apart with `context` characters of one
        another, give the ids of the whole; or 0. The same must hold whatever text follows.
        """
        ...


class ByteTokenizer:
    """The 256 bytes of UTF-8, and end-of-text = 256."""

    name = "bytes"
    vocab_size = 257
    eot = 256
    eot_text = END_OF_TEXT
    sha256 = hashlib.sha256(b"id = byte of the UTF-8 text; end-of-text = 256").hexdigest()
    context, unused = 0, ()

    def encode(self, text: str, before: str = "", after: str = "") -> np.ndarray:
        """Ids of the text, (bytes of its UTF-8,), uint16: 257 ids are one too many for a byte."""
        return np.frombuffer(text.encode(), np.uint8).astype(np.uint16)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of the ids; invalid UTF-8 becomes U+FFFD, end-of-text "". Raises ConfigError for an id above 256."""
        return bytes(i for i in ids if i != self.eot).decode(errors="replace")

    def json(self) -> str:
        vocabulary = {letter: byte for byte, letter in enumerate(byte_letters())}
        return tokenizer_json(vocabulary | {self.eot_text: self.eot}, [], self.eot_text, words=False)

    def cut(self, text: str) -> int:
        return len(text)


def cut_before_space(text: str) -> int:
    """The last space or line end that follows something else: there GPT-2's pre-tokenizer always splits.

    None of its alternatives goes on from a non-space to a space, and the two that are about spaces look at what comes
    after them only. str.isspace() holds for all that its `\\s` matches.
    """
    for space in "\n ":
        at = text.rfind(space)
        while at > 0 and text[at - 1].isspace():
            at = text.rfind(space, 0, at)
        if at > 0:
            return at
    return 0


def smallest_dtype(vocab_size: int) -> str:
    return "uint16" if vocab_size <= 1 << 16 else "uint32"


def _gpt2() -> Tokenizer:
    from grt.data.gpt2 import gpt2_tokenizer

    return gpt2_tokenizer()


TOKENIZERS: dict[str, Callable[[], Tokenizer]] = {"bytes": ByteTokenizer, "gpt2": _gpt2}


def get_tokenizer(name: str) -> Tokenizer:
    """The tokenizer of that name, or of the tokenizer.json that `hf:...` means. Raises ConfigError if there is none."""
    if name.startswith("hf:"):
        from grt.data.tokenizer_json import tokenizer_from

        return tokenizer_from(name)
    if name not in TOKENIZERS:
        known = f"choose from {', '.join(TOKENIZERS)}, hf:PATH and hf:NAME."
        raise ConfigError(f"unknown tokenizer {name!r}: {did_you_mean(name, TOKENIZERS, known)}")
    return TOKENIZERS[name]()
