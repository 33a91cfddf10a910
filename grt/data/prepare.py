"""Corpus -> prepared folder: which document goes to which split, and where the result is kept.

Documents pass through one at a time, twice: the first pass hashes and counts (the hash names the cache entry, the
counts decide how to split), the second writes (see `shards`). Memory holds one document, however large the corpus.
"""

import hashlib
import json
import os
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import track

from grt.config import ConfigError
from grt.data.corpus import Corpus, CorpusHash, Document, check_expected, open_corpus
from grt.data.shards import FORMAT, SPLITS, Prepared, load_if_intact, load_prepared, read_meta, write_prepared
from grt.data.tokenizer import get_tokenizer

__all__ = ["Prepared", "cache_folder", "load_prepared", "prepare"]

SHARD_TOKENS = 100_000_000
MIN_TAIL, MAX_TAIL = 0.01, 0.5  # bounds of the validation share when documents themselves are cut


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
    quiet: bool = False,
    shard_tokens: int = SHARD_TOKENS,
) -> Prepared:
    """Token shards of a corpus (see `open_corpus`), from the cache or `out` if they are there and intact, else made.

    Documents go to validation by their hash, so that adding one moves no other; if that leaves a split without a
    document, the end of each document is the validation text (`split_rule` in meta.json says which). 1.0 puts all
    into validation. stderr is told what was made; with `progress` also what was found in the cache, with `quiet`
    nothing. Raises ConfigError for unreadable text, a fraction outside (0, 1], or an `out` in other use.
    """
    if not 0 < val_fraction <= 1:
        raise ConfigError(f"val_fraction is {val_fraction}: give a share above 0 and up to 1, such as 0.02.")
    corpus, tok = open_corpus(source), get_tokenizer(tokenizer)
    survey = _survey(corpus, val_fraction)
    check_expected(corpus, survey.sha256)
    identity = [FORMAT, survey.sha256, tok.sha256, float(val_fraction)]
    key = hashlib.sha256(json.dumps(identity).encode()).hexdigest()
    if out is None:
        name = re.sub(r"[^\w.-]+", "_", f"{corpus.name}-{tok.name}-{key[:16]}")
        folder = cache_folder() / "data" / name
    else:
        folder = Path(out)
        _refuse_other_use(folder, key)
    prepared = load_if_intact(folder)
    if prepared is None:
        rule = _split_rule(survey, val_fraction, quiet)
        described = dict(source=corpus.name, key=key, corpus_sha256=survey.sha256, split_rule=rule)
        parts = _parts(corpus, survey, rule, progress)
        prepared = write_prepared(folder, parts, tok, shard_tokens, **described)
        progress = True
    counts = (
        f"{name} {split['documents']} documents, {split['tokens']} tokens"
        for name, split in prepared.meta["splits"].items()
    )
    if progress and not quiet:
        _say(f"{corpus.name}: {'; '.join(counts)}; corpus sha256 {survey.sha256}; in {folder}")
    return prepared


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


def _split_rule(survey: _Survey, val_fraction: float, quiet: bool) -> dict:
    if val_fraction == 1 or 0 < survey.val_documents < survey.documents:
        return {"by": "document hash", "val_fraction": val_fraction}
    tail = min(max(val_fraction, MIN_TAIL), MAX_TAIL)
    if not quiet:
        _say(f"Too few documents to split by hash: the last {tail:.0%} of each is validation text.")
    return {"by": "tail of each document", "val_fraction": val_fraction, "tail": tail}


def _parts(corpus: Corpus, survey: _Survey, rule: dict, progress: bool) -> Iterator[tuple[str, str]]:
    """(split, text) in the order of the documents. Raises ConfigError if the corpus is no longer what was surveyed."""
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
        raise ConfigError(f"The files of {corpus.name} changed while they were read: prepare them again.")


def _cut(document: Document, tail: float) -> Iterator[tuple[str, str]]:
    text = document.text
    cut = len(text) - max(1, round(tail * len(text)))
    # At the start of a line if one begins at most half a tail earlier, so that short texts keep their share roughly.
    cut = text.rfind("\n", max(0, cut - (len(text) - cut) // 2), cut) + 1 or cut
    if cut > 0:
        yield "train", text[:cut]
    yield "val", text[cut:]


def _refuse_other_use(folder: Path, key: str) -> None:
    """Raises ConfigError unless `out` is free, or holds a preparation of the same key and nothing else."""
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return
    names = {path.name for path in folder.iterdir()} if folder.is_dir() else {""}
    try:
        ours = all(re.fullmatch(r"meta\.json|(train|val)-\d{5}\.bin", name) for name in names)
        same = ours and read_meta(folder / "meta.json")["key"] == key
    except ValueError:
        same = False  # without its meta.json nobody can tell what would be overwritten
    if not same:
        raise ConfigError(f"{folder} holds something else than this data: name a new folder or remove it first.")


def _say(line: str) -> None:
    print(line, file=sys.stderr)
