"""Sources -> prepared folder, in the cache or where the user says; made once, then found again.

What is read is in `corpus` and `formats`, which document goes to which split in `texts`, how ids are made in `encode`,
where they are kept in `shards`.
"""

import contextlib
import hashlib
import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from grt.console import working
from grt.data.corpus import RESERVED, Corpus, open_corpora, split_sources
from grt.data.encode import WorkerDied
from grt.data.meta import FORMAT
from grt.data.shards import Prepared, load_if_intact, load_prepared, read_meta, write_prepared
from grt.data.tasks import PREFIX, open_task
from grt.data.texts import Texts
from grt.data.token_files import find_token_files
from grt.data.tokenizer import Tokenizer, get_tokenizer
from grt.errors import ConfigError
from grt.files import cache_folder
from grt.presets import PRESETS, preset

__all__ = ["Prepared", "load_prepared", "prepare"]

SHARD_TOKENS = 100_000_000
OURS = re.compile(r"meta\.json|journal\.jsonl|tokenizer\.json|(train|val)-\d{5}\.bin|(train|val)\.idx")


def open_source(source: str, *, tokenizer: str, val_fraction: float, field: str, **options: Any) -> Prepared:
    """The prepared folder of that name, or text prepared now and cached; either way in this tokenizer's ids."""
    if source.startswith(PREFIX):
        return open_task(source, tokenizer)
    if source not in RESERVED and (Path(source) / "meta.json").exists():
        data = load_prepared(Path(source))
        data.require_tokenizer(tokenizer)
        return data
    return prepare(source, tokenizer=tokenizer, val_fraction=val_fraction, field=field, **options)


def prepare(
    source: str | Path | Sequence[str | Path],
    *,
    tokenizer: str = "bytes",
    val_fraction: float = 0.02,
    field: str = "text",
    out: Path | None = None,
    workers: int = 1,
    progress: bool = False,
    quiet: bool = False,
    shard_tokens: int = SHARD_TOKENS,
) -> Prepared:
    """Token shards of some sources (see `open_corpus`), from the cache or `out` if they are intact there, else made.

    `split_rule` in meta.json says how documents were split (see `texts`); val_fraction 1.0 puts all into validation.
    workers: processes that encode; 0 for one a core. The result doesn't depend on it; with more than one the calling
    script needs the usual `if __name__ == "__main__":`. stderr is told what was made; with `progress` also what was
    found in the cache, with `quiet` nothing. Raises ConfigError for unreadable text, a fraction outside (0, 1], or an
    `out` in other use. A preparation that was killed is gone on with.
    """
    if not 0 < val_fraction <= 1:
        raise ConfigError(f"val_fraction is {val_fraction}: give a share above 0 and up to 1, such as 0.02.")
    if workers < 0:
        raise ConfigError(f"workers is {workers}: give 1 or more, or 0 for one a core.")
    tok, sources = get_tokenizer(tokenizer), split_sources(source)
    with _two_passes() as more:
        content = find_token_files(sources, tok, val_fraction)
        if content is None:
            corpora = open_corpora(sources, field)
            _say_left_out([] if quiet else corpora)
            content = Texts(corpora, val_fraction, more)
        key = _key(content.sha256, tok, val_fraction)
        folder = _folder(out, f"{content.name}-{tok.name}", key)
        prepared = load_if_intact(folder)
        if made := prepared is None:
            if "tail" in content.rule and not quiet:
                _say(f"Too few documents to split by hash: the last {content.rule['tail']:.0%} of each is "
                     "validation text.")  # fmt: skip
            described = dict(source=content.name, key=key, corpus_sha256=content.sha256, split_rule=content.rule)
            n = _workers(workers, tok)
            with _sentence_for_dead_workers(n):
                prepared = write_prepared(
                    folder, lambda partial: content.fill(partial, tok, n), tok, shard_tokens, **described
                )
    if (made or progress) and not quiet:
        _say(_summary(prepared))
        for line in _too_short(prepared):
            _say(line)
    return prepared


def cached(corpus_sha256: str, tokenizer: str, val_fraction: float) -> Path | None:
    """The prepared folder of that text in the cache, whatever its sources were called; None where there is none."""
    return _in_cache(_key(corpus_sha256, get_tokenizer(tokenizer), val_fraction))


def _key(corpus_sha256: str, tokenizer: Tokenizer, val_fraction: float) -> str:
    identity = [FORMAT, corpus_sha256, tokenizer.sha256, float(val_fraction)]
    return hashlib.sha256(json.dumps(identity).encode()).hexdigest()


def _in_cache(key: str) -> Path | None:
    return next((path.parent for path in sorted(_cache().glob(f"*-{key[:16]}/meta.json"))), None)


def _cache() -> Path:
    return cache_folder() / "data"


def _folder(out: Path | None, name: str, key: str) -> Path:
    if out is not None:
        _refuse_other_use(Path(out), key)
        return Path(out)
    short = re.sub(r"[^\w.-]+", "_", name)[-100:]
    return _in_cache(key) or _cache() / f"{short}-{key[:16]}"


def _refuse_other_use(folder: Path, key: str) -> None:
    """Raises ConfigError unless `out` is free, or holds a preparation of the same key and nothing else."""
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return
    names = {path.name for path in folder.iterdir()} if folder.is_dir() else {""}
    try:
        same = all(map(OURS.fullmatch, names)) and read_meta(folder / "meta.json")["key"] == key
    except ValueError:
        same = False  # without its meta.json nobody can tell what would be overwritten
    if not same:
        raise ConfigError(f"{folder} holds something else than this data: name a new folder or remove it first.")


def _workers(workers: int, tokenizer: Tokenizer) -> int:
    """Copying bytes to another process takes longer than turning them into ids."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return workers or (1 if tokenizer.name == "bytes" else cores)


@contextlib.contextmanager
def _sentence_for_dead_workers(workers: int) -> Iterator[None]:
    try:
        yield
    except WorkerDied:
        raise ConfigError(
            f"One of {workers} workers was killed, probably for want of memory: run the same again with fewer "
            "--workers; it goes on from where it stopped."
        ) from None


@contextlib.contextmanager
def _two_passes() -> Iterator[Callable[[str, int], None]]:
    """A function that moves the work on, by so many bytes; the second pass is as long as the first was."""
    with working("reading", unit="bytes", kept="the same command goes on with what is prepared so far") as task:

        def more(what: str, n_bytes: int) -> None:
            if what != task.what:
                task.restart(what, total=task.done)
            task.advance(n_bytes)

        yield more


def _summary(prepared: Prepared) -> str:
    meta = prepared.meta
    counts = [f"{k} {split['documents']} documents, {split['tokens']} tokens" for k, split in meta["splits"].items()]
    return f"{meta['source']}: {'; '.join(counts)}; corpus sha256 {meta['corpus_sha256']}; in {prepared.folder}"


def _too_short(prepared: Prepared) -> Iterator[str]:
    """A note for each split that no preset could read a window of. A split without documents is meant to be empty."""
    shortest = min(preset(name).model.context for name in PRESETS)
    for name, split in prepared.meta["splits"].items():
        if split["documents"] and split["tokens"] <= shortest:
            yield (
                f"note: {name} has {split['tokens']} tokens, too few for a window of any preset: the shortest takes "
                f"{shortest} and one more; give more text, or train with a smaller --model.context."
            )


def _say_left_out(corpora: list[Corpus]) -> None:
    for corpus in corpora:
        if corpus.left_out:
            _say(corpus.left_out)


def _say(line: str) -> None:
    print(line, file=sys.stderr)
