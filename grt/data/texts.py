"""Which document goes to which split. Documents pass through one at a time, twice: first to be hashed and counted (the
hash names the result, the counts decide how to split), then to be written. Memory holds a part of a document and, of
all others, a byte each.
"""

import hashlib
import itertools
from collections.abc import Callable, Iterable, Iterator

from grt.data.corpus import Corpus, CorpusHash, check_expected
from grt.data.encode import Piece, encoded, jobs, pieces
from grt.data.formats import Document
from grt.data.meta import SPLITS
from grt.data.partial import Partial
from grt.data.tokenizer import Tokenizer
from grt.errors import ConfigError

MIN_TAIL, MAX_TAIL = 0.01, 0.5  # bounds of the validation share when documents themselves are cut

Progress = Callable[[str, int], None]  # what is done, and how many bytes more


class Texts:
    """The documents of some corpora after the first pass. Documents go to validation by their hash, so that adding one
    moves no other; if that leaves a split without a document, the end of each document is the validation text."""

    def __init__(self, corpora: list[Corpus], val_fraction: float, progress: Progress):
        self.name = "+".join(corpus.name for corpus in corpora)[:60]
        self.corpora, self.progress = corpora, progress
        self.is_val, self.n_bytes = bytearray(), 0
        whole = CorpusHash()
        for document in self._documents():
            own = hashlib.sha256()
            for data in _hashed(document, whole):
                own.update(data)
                progress("reading", len(data))
            self.n_bytes += document.n_bytes
            self.is_val.append(int.from_bytes(own.digest()[:8], "big") < val_fraction * 2**64)
        if not self.is_val:
            raise ConfigError(f"{self.name} holds no text: all documents are empty.")
        self.sha256 = whole.hexdigest()
        if len(corpora) == 1:
            check_expected(corpora[0], self.sha256)
        self.rule: dict = {"by": "document hash", "val_fraction": val_fraction}
        if val_fraction != 1 and not 0 < sum(self.is_val) < len(self.is_val):
            tail = min(max(val_fraction, MIN_TAIL), MAX_TAIL)
            self.rule = {"by": "tail of each document", "val_fraction": val_fraction, "tail": tail}

    def fill(self, partial: Partial, tokenizer: Tokenizer, workers: int) -> None:
        """The second pass: encodes into the partial folder what is not there yet. Raises ConfigError if the text is no
        longer what the first pass read."""
        todo = itertools.islice(jobs(self._pieces(tokenizer)), partial.done, None)
        for number, done in enumerate(encoded(todo, tokenizer, workers)):
            if number == 0 and partial.done:
                self.progress("encoding", sum(writer.bytes for writer in partial.writers))
            for writer in partial.writers:
                if part := done.get(writer.name):
                    writer.add(part.ids[0], part.ends, part.n_bytes)
            partial.record()
            self.progress("encoding", sum(part.n_bytes for part in done.values()))

    def _documents(self) -> Iterator[Document]:
        return itertools.chain.from_iterable(corpus.documents() for corpus in self.corpora)

    def _pieces(self, tokenizer: Tokenizer) -> Iterator[tuple[str, Piece]]:
        whole, n = CorpusHash(), 0
        for n, document in enumerate(self._documents(), 1):
            if n > len(self.is_val):
                break
            hashed = (data.decode() for data in _hashed(document, whole))
            if "tail" in self.rule:
                texts = cut(document, hashed, self.rule["tail"])
            else:
                texts = iter([(SPLITS[self.is_val[n - 1]], hashed)])
            for split, parts in texts:
                for piece in pieces(parts, tokenizer):
                    yield split, piece
        if n != len(self.is_val) or whole.hexdigest() != self.sha256:
            raise ConfigError(f"The files of {self.name} changed while they were read: prepare them again.")


def _hashed(document: Document, whole: CorpusHash) -> Iterator[bytes]:
    """The document's parts, as bytes that are whole characters, added to the corpus's hash as they pass."""
    whole.begin(document.n_bytes)
    for part in document.parts():
        data = part.encode()
        whole.add(data)
        yield data


def cut(document: Document, parts: Iterator[str], tail: float) -> Iterator[tuple[str, Iterable[str]]]:
    """The parts of the document in two: its head for training and its tail, if there is a head, for validation."""
    n = sum(map(len, document.parts()))
    at = n - max(1, round(tail * n))
    # At the start of a line if one begins at most half a tail earlier, so that short texts keep their share roughly.
    at = _last_line(document.parts(), max(0, at - (n - at) // 2), at) or at
    rest: list[str] = []
    if at > 0:
        yield "train", _head(parts, at, rest)
    yield "val", itertools.chain(rest, parts)


def _last_line(parts: Iterable[str], low: int, high: int) -> int:
    """Where the last line begins whose line end lies in low..high-1; 0 if none does."""
    found = before = 0
    for part in parts:
        if before >= high:
            break
        if (at := part.rfind("\n", max(0, low - before), max(0, high - before))) >= 0:
            found = before + at + 1
        before += len(part)
    return found


def _head(parts: Iterator[str], n: int, rest: list[str]) -> Iterator[str]:
    """The first n characters; what follows them in their last part goes to `rest`."""
    for part in parts:
        yield part[:n]
        if len(part) >= n:
            rest.append(part[n:])
            return
        n -= len(part)
