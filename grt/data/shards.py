"""The prepared folder: raw token shards, their hashes in meta.json, written once and verified when opened.

Shards are little-endian ids (train-00000.bin, val-00000.bin, ...), every document followed by end-of-text: np.memmap
reads them, and so does nanoGPT. A folder gets its final name only when it is whole and on disk, so a kill leaves at
most a hidden `.partial` folder, which the same preparation goes on with (see `partial`).
"""

import contextlib
import hashlib
import json
import os
import secrets
import shutil
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from grt.data.documents import DocumentSplit
from grt.data.loader import BLOCK, Split, check_ids
from grt.data.meta import FORMAT, SPLITS, read_meta
from grt.data.partial import JOURNAL, Partial, partial_folder
from grt.data.tokenizer import TOKENIZERS, Tokenizer, get_tokenizer, smallest_dtype
from grt.data.tokenizer_json import FILE, JsonTokenizer, tokenizer_from
from grt.data.writer import Writer, sync
from grt.errors import ConfigError
from grt.files import sync_folder

Windows = Literal["any", "document"]


@dataclass(frozen=True)
class Prepared:
    """A folder of token shards and its meta.json."""

    folder: Path
    meta: dict

    def split(self, name: str, windows: Windows = "any") -> Split:
        """The split `train` or `val`. Raises ConfigError for another name.

        windows: `any` may span documents, `document` lie within one (see `documents`).
        """
        if name not in self.meta["splits"]:
            raise ConfigError(f"No split {name!r} in {self.folder}: choose from {', '.join(self.meta['splits'])}.")
        return self._open(name, [self.meta["splits"][name]], windows)

    def whole(self, windows: Windows = "any") -> Split:
        """All tokens: those of `train`, then those of `val`. Its sha256 is that of the sha256 of both."""
        return self._open("whole", [entry for entry in self.meta["splits"].values() if entry["tokens"]], windows)

    def _open(self, name: str, entries: list[dict], windows: Windows) -> Split:
        if len(entries) == 1:
            entry = entries[0]
        else:
            entry: dict = {key: sum(part[key] for part in entries) for key in ("documents", "tokens", "bytes")}
            entry["shards"] = [shard for part in entries for shard in part["shards"]]
            entry["sha256"] = hashlib.sha256("".join(part["sha256"] for part in entries).encode()).hexdigest()
        dtype, vocab_size = self.meta["dtype"], self.meta["tokenizer"]["vocab_size"]
        if windows == "any":
            return Split(name, self.folder, entry, dtype, vocab_size)
        if any("index" not in part for part in entries):
            raise ConfigError(f"{self.folder} does not say where documents end (format 1): prepare the data again.")
        ends, before = [], 0
        for part in entries:
            ends.append(np.fromfile(self.folder / part["index"]["file"], "<u8").astype(np.int64) + before)
            before += part["tokens"]
        return DocumentSplit(name, self.folder, entry, dtype, vocab_size, np.concatenate(ends))

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer that wrote the ids; that of a tokenizer.json is kept in the folder.

        Raises ConfigError when the one of that name has changed since.
        """
        written = self.meta["tokenizer"]
        copy = self.folder / FILE
        if written["name"].startswith("hf:") and copy.exists():
            tokenizer = tokenizer_from(f"hf:{copy}")
            tokenizer.name = written["name"]
        else:
            tokenizer = get_tokenizer(written["name"])
        if any(getattr(tokenizer, field) != written[field] for field in ("sha256", "vocab_size", "eot")):
            raise ConfigError(f"{self.folder} was written by another {tokenizer.name} tokenizer: prepare it again.")
        return tokenizer

    def require_tokenizer(self, name: str) -> None:
        """Raises ConfigError unless the ids are those of that tokenizer, under whatever name."""
        written = self.meta["tokenizer"]
        same = written["name"] == name and name in TOKENIZERS  # of a tokenizer.json the name says nothing
        if not same and get_tokenizer(name).sha256 != written["sha256"]:
            raise ConfigError(
                f"{self.folder} holds {written['name']} tokens, the run reads {name}: prepare the text "
                f"with --tokenizer {name}, or set --data.tokenizer {written['name']} for a new run."
            )


def load_prepared(folder: Path, verify: bool = True) -> Prepared:
    """Opens a prepared folder; `verify` reads every shard once, to compare its sha256 and look for impossible ids.

    Raises ConfigError, in a sentence that names the file, for whatever is missing, truncated or altered.
    """
    folder = Path(folder)
    meta = read_meta(folder / "meta.json")
    for entry in meta["splits"].values():
        for shard in entry["shards"]:
            _check_shard(folder / shard["file"], shard, meta["dtype"], meta["tokenizer"]["vocab_size"], verify)
        if "index" in entry:
            _check_index(folder / entry["index"]["file"], entry, verify)
    return Prepared(folder, meta)


def load_if_intact(folder: Path) -> Prepared | None:
    """The prepared folder; None if there is none, and None with a warning if it is damaged."""
    if not (folder / "meta.json").exists():
        return None
    try:
        return _load_all(folder)
    except (ValueError, OSError) as damage:
        warnings.warn(f"Preparing {folder} again, because it is damaged: {damage}", stacklevel=3)
        return None


def _load_all(folder: Path) -> Prepared:
    """With the tokenizer too, whose name or copy may be what is damaged."""
    prepared = load_prepared(folder)
    _ = prepared.tokenizer
    return prepared


def write_prepared(
    folder: Path, fill: Callable[[Partial], None], tokenizer: Tokenizer, shard_tokens: int, **described
) -> Prepared:
    """A new prepared folder, whose shards `fill` writes; `described` goes into its meta.json as it is.

    If another process finishes the folder first, that one is returned.
    """
    dtype = smallest_dtype(tokenizer.vocab_size)
    with partial_folder(folder, described["key"]) as (path, journal):
        header = {"format": FORMAT, "shard_tokens": shard_tokens} | described
        partial = Partial(path, journal, header, lambda: [Writer(path, name, dtype, shard_tokens) for name in SPLITS])
        try:
            fill(partial)
            for writer in partial.writers:
                writer.finish()
        finally:
            partial.close()
        identity = {name: getattr(tokenizer, name) for name in ("name", "vocab_size", "eot", "sha256")}
        splits = {writer.name: writer.entry() for writer in partial.writers}
        meta = {"format": FORMAT, "tokenizer": identity, "dtype": dtype, **described, "splits": splits}
        if isinstance(tokenizer, JsonTokenizer):
            (path / FILE).write_bytes(tokenizer.data)
        with open(path / "meta.json", "w", encoding="utf-8") as file:
            json.dump(meta, file, indent=1)
            sync(file)
        sync_folder(path)
        return _install(path, folder)


def _install(partial: Path, folder: Path) -> Prepared:
    """Gives a whole folder its final name, in the place of a damaged one but not of another process's good one."""
    while True:
        try:
            os.rename(partial, folder)
            sync_folder(folder.parent)
            (folder / JOURNAL).unlink(missing_ok=True)
            return load_prepared(folder, verify=False)
        except OSError:
            if not folder.is_dir():
                raise
            with contextlib.suppress(ValueError, OSError):
                winner = _load_all(folder)
                shutil.rmtree(partial, ignore_errors=True)
                return winner
            damaged = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}.damaged")
            os.rename(folder, damaged)
            shutil.rmtree(damaged, ignore_errors=True)


def _check_size(path: Path, expected: int) -> None:
    if not path.exists():
        raise ConfigError(f"{path} is missing: prepare the data again.")
    if path.stat().st_size != expected:
        raise ConfigError(f"{path} has {path.stat().st_size} bytes instead of {expected}: prepare the data again.")


def _check_shard(path: Path, shard: dict, dtype: str, vocab_size: int, verify: bool) -> None:
    _check_size(path, shard["tokens"] * np.dtype(dtype).itemsize)
    if verify:
        sha256, ids = hashlib.sha256(), np.memmap(path, np.dtype(dtype).newbyteorder("<"), mode="r")
        for start in range(0, len(ids), BLOCK):
            block = ids[start : start + BLOCK]
            sha256.update(block.tobytes())
            check_ids(block, vocab_size, path)
        if sha256.hexdigest() != shard["sha256"]:
            raise ConfigError(f"{path} differs from the sha256 in meta.json: prepare the data again.")


def _check_index(path: Path, entry: dict, verify: bool) -> None:
    """The ends of documents; the last may lie before the end of the split, never beyond it."""
    _check_size(path, 8 * entry["documents"])
    if verify:
        data = path.read_bytes()
        ends = np.frombuffer(data, "<u8")
        if hashlib.sha256(data).hexdigest() != entry["index"]["sha256"]:
            raise ConfigError(f"{path} differs from the sha256 in meta.json: prepare the data again.")
        if len(ends) and (ends[-1] > entry["tokens"] or (ends[1:] <= ends[:-1]).any()):
            raise ConfigError(f"{path} has ends of documents out of order: prepare the data again.")
