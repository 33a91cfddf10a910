"""Appends ids to the shards of one split, and each document's end to its index; hashes are taken on the way.

The index, train.idx or val.idx, holds one little-endian uint64 a document: the number of the split's tokens up to and
with its end-of-text.
"""

import hashlib
import os
from pathlib import Path
from typing import IO

import numpy as np

BLOCK = 1 << 22  # bytes


class Writer:
    """The files of one split while they are made; `state` and `restore` let another process go on with them."""

    def __init__(self, folder: Path, name: str, dtype: str, shard_tokens: int):
        self.folder, self.name, self.shard_tokens = folder, name, shard_tokens
        self.dtype = np.dtype(dtype).newbyteorder("<")
        self.documents = self.bytes = self.tokens = 0
        self.sha256, self.index_sha256, self.shards = hashlib.sha256(), hashlib.sha256(), []
        self.file: IO[bytes] | None = None  # of the last shard, until that is full
        self.index: IO[bytes] | None = None

    def add(self, ids: np.ndarray, ends: np.ndarray | list[int], n_bytes: int) -> None:
        """`ends`: where documents end, counted from the first of these ids."""
        if len(ends):
            data = (np.array(ends, np.uint64) + np.uint64(self.tokens)).astype("<u8").tobytes()
            self.index = self.index or open(self.folder / f"{self.name}.idx", "ab")  # noqa: SIM115
            _write(self.index, data)
            self.index_sha256.update(data)
        self.documents += len(ends)
        self.bytes += n_bytes
        while len(ids):
            if self.file is None:
                self.shards.append({"file": self._shard_name(len(self.shards)), "tokens": 0})
                self.file, self.shard_sha256 = open(self.folder / self.shards[-1]["file"], "wb"), hashlib.sha256()  # noqa: SIM115
            shard = self.shards[-1]
            piece, ids = np.split(ids, [self.shard_tokens - shard["tokens"]])
            data = piece.astype(self.dtype).tobytes()
            _write(self.file, data)
            self._count(shard, data)
            if shard["tokens"] == self.shard_tokens:
                self._finish_shard()

    def flush(self) -> None:
        """Hands what is written to the system, where it survives the end of this process."""
        for file in (self.file, self.index):
            if file is not None:
                _flush(file)

    def finish(self) -> None:
        self._finish_shard()
        if self.index is None:
            self.index = open(self.folder / f"{self.name}.idx", "ab")  # noqa: SIM115
        sync(self.index)
        self.index.close()

    def close(self) -> None:
        for file in (self.file, self.index):
            if file is not None:
                file.close()

    def entry(self) -> dict:
        """The split's part of meta.json."""
        index = {"file": f"{self.name}.idx", "sha256": self.index_sha256.hexdigest()}
        sha256 = self.sha256.hexdigest()
        return dict(
            documents=self.documents, tokens=self.tokens, bytes=self.bytes, sha256=sha256, shards=self.shards,
            index=index,
        )  # fmt: skip

    def state(self) -> dict:
        """What `restore` needs, and enough to tell whether the files are still those."""
        sums = {"sha256": self.sha256.hexdigest(), "index_sha256": self.index_sha256.hexdigest()}
        return {"documents": self.documents, "bytes": self.bytes, "tokens": self.tokens} | sums

    def restore(self, state: dict) -> bool:
        """Takes up the files of a writer that was in that state, cutting off what came later; False if they differ."""
        self.documents, self.bytes = state["documents"], state["bytes"]
        while self.tokens < state["tokens"]:
            shard = {"file": self._shard_name(len(self.shards)), "tokens": 0}
            self.shards.append(shard)
            n_bytes = min(self.shard_tokens, state["tokens"] - self.tokens) * self.dtype.itemsize
            self.file, self.shard_sha256 = _reopen(self.folder / shard["file"], n_bytes), hashlib.sha256()
            if self.file is None:
                return False
            while data := self.file.read(BLOCK):
                self._count(shard, data)
            if shard["tokens"] == self.shard_tokens:
                self._finish_shard()
        self.index = _reopen(self.folder / f"{self.name}.idx", 8 * self.documents)
        while self.index and (data := self.index.read(BLOCK)):
            self.index_sha256.update(data)
        return self.state() == state

    def _count(self, shard: dict, data: bytes) -> None:
        self.sha256.update(data)
        self.shard_sha256.update(data)
        self.tokens += len(data) // self.dtype.itemsize
        shard["tokens"] += len(data) // self.dtype.itemsize
        shard["sha256"] = self.shard_sha256.hexdigest()

    def _finish_shard(self) -> None:
        if self.file is not None:
            sync(self.file)
            self.file.close()
            self.file = None

    def _shard_name(self, n: int) -> str:
        return f"{self.name}-{n:05}.bin"


def sync(file: IO) -> None:
    _flush(file)
    os.fsync(file.fileno())


def _reopen(path: Path, n_bytes: int) -> IO[bytes] | None:
    """The file cut to that length and open at its start; None if it is shorter."""
    if not path.exists() or path.stat().st_size < n_bytes:
        return None
    os.truncate(path, n_bytes)
    return open(path, "rb+")


def _write(file: IO[bytes], data: bytes) -> None:
    try:
        file.write(data)
    except OSError as error:
        raise _named(error, file) from None


def _flush(file: IO) -> None:
    try:
        file.flush()
    except OSError as error:
        raise _named(error, file) from None


def _named(error: OSError, file: IO) -> OSError:
    """A full disk's error does not say which file."""
    return OSError(error.errno, error.strerror, file.name)
