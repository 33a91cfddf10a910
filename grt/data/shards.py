"""The prepared folder: raw token shards, their hashes in meta.json, written once and verified when opened.

Shards are little-endian ids (train-00000.bin, val-00000.bin, ...), every document followed by end-of-text: np.memmap
reads them, and so does nanoGPT. A folder gets its final name only when it is whole and on disk, so a kill leaves at
most a hidden `.partial` folder, which nothing reads.
"""

import contextlib
import hashlib
import json
import os
import secrets
import shutil
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from grt.config import ConfigError
from grt.data.loader import BLOCK, Split, check_ids
from grt.data.tokenizer import Tokenizer, get_tokenizer

FORMAT = 1
SPLITS = ("train", "val")


@dataclass(frozen=True)
class Prepared:
    """A folder of token shards and its meta.json."""

    folder: Path
    meta: dict

    def split(self, name: str) -> Split:
        """The split `train` or `val`. Raises ConfigError for another name."""
        if name not in self.meta["splits"]:
            raise ConfigError(f"No split {name!r} in {self.folder}: choose from {', '.join(self.meta['splits'])}.")
        entry, vocab_size = self.meta["splits"][name], self.meta["tokenizer"]["vocab_size"]
        return Split(name, self.folder, entry, self.meta["dtype"], vocab_size)

    def whole(self) -> Split:
        """All tokens: those of `train`, then those of `val`. Its sha256 is that of the sha256 of both."""
        entries = [entry for entry in self.meta["splits"].values() if entry["tokens"]]
        entry: dict
        if len(entries) == 1:
            entry = entries[0]
        else:
            entry = {key: sum(entry[key] for entry in entries) for key in ("documents", "tokens", "bytes")}
            entry["shards"] = [shard for part in entries for shard in part["shards"]]
            entry["sha256"] = hashlib.sha256("".join(part["sha256"] for part in entries).encode()).hexdigest()
        return Split("whole", self.folder, entry, self.meta["dtype"], self.meta["tokenizer"]["vocab_size"])

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer that wrote the ids. Raises ConfigError when the one of that name has changed since."""
        tokenizer = get_tokenizer(self.meta["tokenizer"]["name"])
        if tokenizer.sha256 != self.meta["tokenizer"]["sha256"]:
            raise ConfigError(f"{self.folder} was written by another {tokenizer.name} tokenizer: prepare it again.")
        return tokenizer


def load_prepared(folder: Path, verify: bool = True) -> Prepared:
    """Opens a prepared folder; `verify` reads every shard once, to compare its sha256 and look for impossible ids.

    Raises ConfigError, in a sentence that names the file, for whatever is missing, truncated or altered.
    """
    folder = Path(folder)
    meta = read_meta(folder / "meta.json")
    for entry in meta["splits"].values():
        for shard in entry["shards"]:
            _check_shard(folder / shard["file"], shard, meta["dtype"], meta["tokenizer"]["vocab_size"], verify)
    return Prepared(folder, meta)


def load_if_intact(folder: Path) -> Prepared | None:
    """The prepared folder; None if there is none, and None with a warning if it is damaged."""
    if not (folder / "meta.json").exists():
        return None
    try:
        return load_prepared(folder)
    except ValueError as damage:
        warnings.warn(f"Preparing {folder} again, because it is damaged: {damage}", stacklevel=3)
        return None


def read_meta(path: Path) -> dict:
    """meta.json. Raises ConfigError where it is missing, no JSON, or of another format."""
    if not path.exists():
        raise ConfigError(f"{path} is missing, so {path.parent} is no prepared folder: make one with grt prepare.")
    try:
        meta = json.loads(path.read_bytes())
    except ValueError:
        raise ConfigError(f"{path} is not JSON: prepare the data again.") from None
    if not isinstance(meta, dict) or meta.get("format") != FORMAT:
        raise ConfigError(f"{path} is not in format {FORMAT}, which this version reads: prepare the data again.")
    return meta


def write_prepared(
    folder: Path, parts: Iterable[tuple[str, str]], tokenizer: Tokenizer, shard_tokens: int, **described
) -> Prepared:
    """Encodes (split, text) pairs into a new prepared folder; `described` goes into its meta.json as it is.

    If another process finishes the folder first, that one is returned.
    """
    partial = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}.partial")
    partial.mkdir(parents=True)
    try:
        dtype = "uint16" if tokenizer.vocab_size <= 1 << 16 else "uint32"
        splits = _write_splits(partial, parts, tokenizer, dtype, shard_tokens)
        identity = {name: getattr(tokenizer, name) for name in ("name", "vocab_size", "eot", "sha256")}
        meta = {"format": FORMAT, "tokenizer": identity, "dtype": dtype, **described, "splits": splits}
        with open(partial / "meta.json", "w") as file:
            json.dump(meta, file, indent=1)
            _sync(file)
        _sync_folder(partial)
        return _install(partial, folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _write_splits(
    folder: Path, parts: Iterable[tuple[str, str]], tokenizer: Tokenizer, dtype: str, shard_tokens: int
) -> dict:
    with contextlib.ExitStack() as stack:
        writers = {name: _Writer(folder, name, dtype, shard_tokens) for name in SPLITS}
        for writer in writers.values():
            stack.callback(writer.finish_shard)
        for name, text in parts:
            ids = tokenizer.encode(text)
            writers[name].add(np.append(ids, ids.dtype.type(tokenizer.eot)), len(text.encode()))
    return {name: writer.entry() for name, writer in writers.items()}


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
                self.file, self.shard_sha256 = open(self.folder / self.shards[-1]["file"], "wb"), hashlib.sha256()  # noqa: SIM115
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
            _sync(self.file)
            self.file.close()
            self.file = None

    def entry(self) -> dict:
        """The split's part of meta.json."""
        tokens, sha256 = sum(shard["tokens"] for shard in self.shards), self.sha256.hexdigest()
        return dict(documents=self.documents, tokens=tokens, bytes=self.bytes, sha256=sha256, shards=self.shards)


def _install(partial: Path, folder: Path) -> Prepared:
    """Gives a whole folder its final name, in the place of a damaged one but not of another process's good one."""
    while True:
        try:
            os.rename(partial, folder)
            _sync_folder(folder.parent)
            return load_prepared(folder, verify=False)
        except OSError:
            if not folder.is_dir():
                raise
            with contextlib.suppress(ValueError):
                return load_prepared(folder)
            damaged = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}.damaged")
            os.rename(folder, damaged)
            shutil.rmtree(damaged, ignore_errors=True)


def _check_shard(path: Path, shard: dict, dtype: str, vocab_size: int, verify: bool) -> None:
    expected = shard["tokens"] * np.dtype(dtype).itemsize
    if not path.exists():
        raise ConfigError(f"{path} is missing: prepare the data again.")
    if path.stat().st_size != expected:
        raise ConfigError(f"{path} has {path.stat().st_size} bytes instead of {expected}: prepare the data again.")
    if verify:
        sha256, ids = hashlib.sha256(), np.memmap(path, np.dtype(dtype).newbyteorder("<"), mode="r")
        for start in range(0, len(ids), BLOCK):
            block = ids[start : start + BLOCK]
            sha256.update(block.tobytes())
            check_ids(block, vocab_size, path)
        if sha256.hexdigest() != shard["sha256"]:
            raise ConfigError(f"{path} differs from the sha256 in meta.json: prepare the data again.")


def _sync(file) -> None:
    file.flush()
    os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    """Makes the names in a folder durable. Only POSIX can open a folder to do so."""
    if os.name == "posix":
        descriptor = os.open(folder, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)
