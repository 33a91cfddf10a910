"""Corpus -> a folder of token shards with hashes: written once, verified whenever it is opened.

A prepared folder holds meta.json and, for each split, shards of raw little-endian ids (train-00000.bin, ...), every
document followed by end-of-text. Documents pass through one at a time, twice: the first pass hashes and counts (the
hash names the cache entry, and the counts decide how to split), the second writes. A folder appears under its final
name only when it is whole and on disk, so a kill leaves at most a `.partial` folder that nothing reads.
"""

import hashlib
import json
import os
import re
import secrets
import shutil
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.progress import track

from grt.data.corpus import Corpus, CorpusHash, Document, check_expected, open_corpus
from grt.data.loader import BLOCK, Split, check_ids
from grt.data.tokenizer import Tokenizer, get_tokenizer

FORMAT = 1
SPLITS = ("train", "val")
SHARD_TOKENS = 100_000_000
MIN_TAIL, MAX_TAIL = 0.01, 0.5  # bounds of the validation share when documents themselves are cut


@dataclass(frozen=True)
class Prepared:
    """A folder of token shards and its meta.json."""

    folder: Path
    meta: dict

    def split(self, name: str) -> Split:
        """The split `train` or `val`. Raises ValueError for another name."""
        if name not in self.meta["splits"]:
            raise ValueError(f"No split {name!r} in {self.folder}: choose from {', '.join(self.meta['splits'])}.")
        entry, vocab_size = self.meta["splits"][name], self.meta["tokenizer"]["vocab_size"]
        return Split(name, self.folder, entry, self.meta["dtype"], vocab_size)

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer that wrote the ids. Raises ValueError when the one of that name has changed since."""
        tokenizer = get_tokenizer(self.meta["tokenizer"]["name"])
        if tokenizer.sha256 != self.meta["tokenizer"]["sha256"]:
            raise ValueError(f"{self.folder} was written by another {tokenizer.name} tokenizer: prepare it again.")
        return tokenizer


def cache_folder() -> Path:
    """Where grt keeps what it can make again: $GRT_CACHE, else $XDG_CACHE_HOME/grt, else ~/.cache/grt."""
    if folder := os.environ.get("GRT_CACHE"):
        return Path(folder)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "grt"


def prepare(
    source: str | Path,
    *,
    tokenizer: str = "bytes",
    val_fraction: float = 0.02,
    out: Path | None = None,
    progress: bool = False,
    shard_tokens: int = SHARD_TOKENS,
) -> Prepared:
    """Token shards of a corpus (see `open_corpus`), from the cache or `out` if they are there and intact, else made.

    Documents go to validation by their hash, so that adding one moves no other; if that leaves a split without a
    document, the end of each document is the validation text (`split_rule` in meta.json says which). 1.0 puts all
    into validation. Raises ValueError for unreadable text, a fraction outside (0, 1], or an `out` in other use.
    """
    if not 0 < val_fraction <= 1:
        raise ValueError(f"val_fraction is {val_fraction}: give a share above 0 and up to 1, such as 0.02.")
    corpus, tok = open_corpus(source), get_tokenizer(tokenizer)
    survey = _survey(corpus, val_fraction)
    check_expected(corpus, survey.sha256)
    key = _key(survey.sha256, tok.sha256, val_fraction)
    folder = _cached(corpus.name, tok.name, key) if out is None else Path(out)
    if out is not None:
        _refuse_other_use(folder, key)
    prepared = _intact(folder) if (folder / "meta.json").exists() else None
    if prepared is None:
        rule = _split_rule(survey, val_fraction)
        partial = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}.partial")
        partial.mkdir(parents=True)
        try:
            splits = _write_splits(partial, _parts(corpus, survey, rule, progress), tok, shard_tokens)
            meta = {
                "format": FORMAT,
                "source": corpus.name,
                "tokenizer": {name: getattr(tok, name) for name in ("name", "vocab_size", "eot", "sha256")},
                "dtype": _dtype(tok),
                "key": key,
                "corpus_sha256": survey.sha256,
                "splits": splits,
                "split_rule": rule,
            }
            _write(partial / "meta.json", json.dumps(meta, indent=1).encode() + b"\n")
            _sync(partial)
            prepared = _install(partial, folder)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    _report(prepared)
    return prepared


def load_prepared(folder: Path, verify: bool = True) -> Prepared:
    """Opens a prepared folder; `verify` reads every shard once, to compare its sha256 and look for impossible ids.

    Raises ValueError, in a sentence that names the file, for whatever is missing, truncated or altered.
    """
    folder = Path(folder)
    meta = _read_meta(folder / "meta.json")
    for entry in meta["splits"].values():
        for shard in entry["shards"]:
            _check_shard(folder / shard["file"], shard, meta["dtype"], meta["tokenizer"]["vocab_size"], verify)
    return Prepared(folder, meta)


# Splitting


@dataclass
class _Survey:
    """What the first pass learns: the corpus's hash, and how the documents fall by theirs."""

    sha256: str = ""
    documents: int = 0
    val_documents: int = 0


def _survey(corpus: Corpus, val_fraction: float) -> _Survey:
    survey, whole = _Survey(), CorpusHash()
    for document in corpus.documents():
        data = document.text.encode()
        whole.add(data)
        survey.documents += 1
        survey.val_documents += _is_val(data, val_fraction)
    survey.sha256 = whole.hexdigest()
    return survey


def _is_val(text_bytes: bytes, val_fraction: float) -> bool:
    return int.from_bytes(hashlib.sha256(text_bytes).digest()[:8], "big") < val_fraction * 2**64


def _split_rule(survey: _Survey, val_fraction: float) -> dict:
    if val_fraction == 1 or 0 < survey.val_documents < survey.documents:
        return {"by": "document hash", "val_fraction": val_fraction}
    tail = min(max(val_fraction, MIN_TAIL), MAX_TAIL)
    _say(f"Too few documents to split by hash: the last {tail:.0%} of each is validation text.")
    return {"by": "tail of each document", "val_fraction": val_fraction, "tail": tail}


def _parts(corpus: Corpus, survey: _Survey, rule: dict, progress: bool) -> Iterator[tuple[str, str]]:
    """(split, text) in the order of the documents. Raises ValueError if the corpus is no longer what was surveyed."""
    whole = CorpusHash()
    documents = corpus.documents()
    if progress and sys.stderr.isatty():
        documents = track(documents, corpus.name, survey.documents, console=Console(stderr=True), transient=True)
    for document in documents:
        data = document.text.encode()
        whole.add(data)
        if "tail" in rule:
            yield from _cut(document, rule["tail"])
        else:
            yield SPLITS[_is_val(data, rule["val_fraction"])], document.text
    if whole.hexdigest() != survey.sha256:
        raise ValueError(f"The files of {corpus.name} changed while they were read: prepare them again.")


def _cut(document: Document, tail: float) -> Iterator[tuple[str, str]]:
    text = document.text
    cut = len(text) - max(1, round(tail * len(text)))
    # At the start of a line if one begins at most half a tail earlier, so that short texts keep their share roughly.
    cut = text.rfind("\n", cut - (len(text) - cut) // 2, cut) + 1 or cut
    if cut > 0:
        yield "train", text[:cut]
    yield "val", text[cut:]


# Writing


class _Writer:
    """Appends ids to the shards of one split; the hashes are taken on the way."""

    def __init__(self, folder: Path, name: str, dtype: str, shard_tokens: int):
        self.folder, self.name, self.shard_tokens = folder, name, shard_tokens
        self.dtype = np.dtype(dtype).newbyteorder("<")
        self.documents = self.bytes = 0
        self.sha256, self.shards = hashlib.sha256(), []
        self.file = None  # of the last shard, until that is full

    def add(self, ids: np.ndarray, n_bytes: int) -> None:
        self.documents += 1
        self.bytes += n_bytes
        while len(ids):
            if self.file is None:
                self.shards.append({"file": f"{self.name}-{len(self.shards):05}.bin", "tokens": 0})
                self.file, self.shard_sha256 = open(self.folder / self.shards[-1]["file"], "wb"), hashlib.sha256()
            shard = self.shards[-1]
            piece, ids = np.split(ids, [self.shard_tokens - shard["tokens"]])
            data = piece.astype(self.dtype).tobytes()
            self.file.write(data)
            self.sha256.update(data)
            self.shard_sha256.update(data)
            shard["tokens"] += len(piece)
            shard["sha256"] = self.shard_sha256.hexdigest()
            if shard["tokens"] == self.shard_tokens:
                self.finish_shard()

    def finish_shard(self) -> None:
        if self.file is not None:
            self.file.flush()
            os.fsync(self.file.fileno())
            self.file.close()
            self.file = None

    def entry(self) -> dict:
        """The split's part of meta.json."""
        self.finish_shard()
        tokens, sha256 = sum(shard["tokens"] for shard in self.shards), self.sha256.hexdigest()
        return dict(documents=self.documents, tokens=tokens, bytes=self.bytes, sha256=sha256, shards=self.shards)


def _write_splits(folder: Path, parts: Iterator[tuple[str, str]], tok: Tokenizer, shard_tokens: int) -> dict:
    writers = {name: _Writer(folder, name, _dtype(tok), shard_tokens) for name in SPLITS}
    for name, text in parts:
        ids = tok.encode(text)
        writers[name].add(np.append(ids, ids.dtype.type(tok.eot)), len(text.encode()))
    return {name: writer.entry() for name, writer in writers.items()}


def _install(partial: Path, folder: Path) -> Prepared:
    """Gives a whole folder its final name. If another process was first, its folder is used, provided it is intact."""
    while True:
        try:
            os.rename(partial, folder)
            _sync(folder.parent)
            return load_prepared(folder, verify=False)
        except OSError:
            if not folder.is_dir():
                raise
            if prepared := _intact(folder):
                return prepared
            damaged = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}.damaged")
            os.rename(folder, damaged)
            shutil.rmtree(damaged, ignore_errors=True)


def _write(path: Path, data: bytes) -> None:
    with open(path, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _sync(folder: Path) -> None:
    """Makes the names in a folder durable. Only POSIX can open a folder to do so."""
    if os.name == "posix":
        descriptor = os.open(folder, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


# Names and checks


def _dtype(tok: Tokenizer) -> str:
    return "uint16" if tok.vocab_size <= 1 << 16 else "uint32"


def _key(corpus_sha256: str, tokenizer_sha256: str, val_fraction: float) -> str:
    identity = [FORMAT, corpus_sha256, tokenizer_sha256, float(val_fraction)]
    return hashlib.sha256(json.dumps(identity).encode()).hexdigest()


def _cached(corpus_name: str, tokenizer_name: str, key: str) -> Path:
    return cache_folder() / "data" / re.sub(r"[^\w.-]+", "_", f"{corpus_name}-{tokenizer_name}-{key[:16]}")


def _read_meta(path: Path) -> dict:
    if not path.exists():
        raise ValueError(f"{path} is missing, so {path.parent} is no prepared folder: make one with grt prepare.")
    try:
        meta = json.loads(path.read_bytes())
    except ValueError:
        raise ValueError(f"{path} is not JSON: prepare the data again.") from None
    if not isinstance(meta, dict) or meta.get("format") != FORMAT:
        raise ValueError(f"{path} is not in format {FORMAT}, which this version reads: prepare the data again.")
    return meta


def _refuse_other_use(folder: Path, key: str) -> None:
    """Raises ValueError unless `out` is free, or holds a preparation of the same key and nothing else."""
    if not folder.exists() or folder.is_dir() and not any(folder.iterdir()):
        return
    names = {path.name for path in folder.iterdir()} if folder.is_dir() else {""}
    try:
        ours = all(re.fullmatch(r"meta\.json|(train|val)-\d{5}\.bin", name) for name in names)
        same = ours and _read_meta(folder / "meta.json")["key"] == key
    except ValueError:
        same = False  # without its meta.json nobody can tell what would be overwritten
    if not same:
        raise ValueError(f"{folder} holds something else than this data: name a new folder or remove it first.")


def _intact(folder: Path) -> Prepared | None:
    """The prepared folder if it is whole, else None and a warning."""
    try:
        return load_prepared(folder)
    except ValueError as damage:
        warnings.warn(f"Preparing {folder} again, because it is damaged: {damage}", stacklevel=3)
        return None


def _check_shard(path: Path, shard: dict, dtype: str, vocab_size: int, verify: bool) -> None:
    expected = shard["tokens"] * np.dtype(dtype).itemsize
    if not path.exists():
        raise ValueError(f"{path} is missing: prepare the data again.")
    if path.stat().st_size != expected:
        raise ValueError(f"{path} has {path.stat().st_size} bytes instead of {expected}: prepare the data again.")
    if verify:
        sha256, ids = hashlib.sha256(), np.memmap(path, np.dtype(dtype).newbyteorder("<"), mode="r")
        for start in range(0, len(ids), BLOCK):
            sha256.update(ids[start : start + BLOCK].tobytes())
            check_ids(ids[start : start + BLOCK], vocab_size, path)
        if sha256.hexdigest() != shard["sha256"]:
            raise ValueError(f"{path} differs from the sha256 in meta.json: prepare the data again.")


def _report(prepared: Prepared) -> None:
    meta = prepared.meta
    counts = (
        f"{name} {entry['documents']} documents, {entry['tokens']} tokens" for name, entry in meta["splits"].items()
    )
    _say(f"{meta['source']}: {'; '.join(counts)}; corpus sha256 {meta['corpus_sha256']}; in {prepared.folder}")


def _say(line: str) -> None:
    print(line, file=sys.stderr)
