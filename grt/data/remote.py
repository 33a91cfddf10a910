"""Text from elsewhere, kept in the cache: a file of a known sha256 (`url:`), a dataset of a hub (`hf:`).

What is fetched gets its name in the cache only when it is whole.
"""

import contextlib
import errno
import hashlib
import http.client
import json
import os
import re
import secrets
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from grt import files
from grt.data.formats import FIELD_OPTION, KINDS, kind_of
from grt.errors import ConfigError

SHORTCUTS = {
    "shakespeare": "url:https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
    "#sha256=86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed",
}
TIMEOUT = 60  # seconds without a byte


def download(source: str) -> Path:
    """The file of `url:https://...#sha256=...`, from the cache or now. Raises ConfigError where it is not to be had."""
    url, _, sha256 = source.removeprefix("url:").partition("#sha256=")
    if not url.startswith(("https://", "http://")):
        raise ConfigError(f"{source} is no address: write url:https://...#sha256=... with the sum of the file.")
    if not re.fullmatch("[0-9a-f]{64}", sha256):
        raise ConfigError(f"{source} has no sha256 to check the file by: end it in #sha256= and its 64 hex digits.")
    name = url.partition("?")[0].rpartition("/")[2]
    if not kind_of(Path(name)):
        raise ConfigError(f"{url} names no file of a kind that is read: {KINDS}; download and rename it yourself.")
    path = files.cache_folder() / "downloads" / f"{sha256[:16]}-{name}"
    if path.exists() and files.sha256(path) == sha256:
        return path
    try:
        with urllib.request.urlopen(url, timeout=TIMEOUT) as answer, _whole_file(path) as file:
            while block := answer.read(1 << 20):
                file.write(block)
            file.flush()
            if (found := files.sha256(Path(file.name))) != sha256:
                raise ConfigError(f"{url} has sha256 {found[:16]}... instead of {sha256[:16]}...: it is another file.")
    except ConfigError:
        raise
    except (OSError, ValueError, http.client.HTTPException) as error:
        if getattr(error, "filename", None) and not isinstance(error, urllib.error.URLError):
            raise  # the disk's fault; the sentence for it names the file
        reason = str(getattr(error, "reason", error)).rstrip(".")
        raise ConfigError(f"{url} cannot be had ({reason}): check the network, or give the path of a copy.") from None
    return path


def fetch_dataset(source: str, field: str) -> Path:
    """The texts of `hf:NAME` or `hf:NAME:CONFIG`, its split `train`, as compressed JSON lines in the cache.

    They are streamed once: the two passes of a preparation read the copy. Remove it to fetch the dataset again; that of
    a folder here is made anew where a file of it has changed.
    """
    name, _, config = source.removeprefix("hf:").partition(":")
    key = hashlib.sha256(json.dumps([source, field]).encode()).hexdigest()[:16]
    path = (
        files.cache_folder() / "datasets" / f"{re.sub(r'[^A-Za-z0-9.-]+', '_', name).strip('_')[-60:]}-{key}.jsonl.zst"
    )
    made_of, now = path.with_name(f"{path.name}.from"), _files_now(Path(name))
    before = made_of.read_text(encoding="utf-8") if made_of.exists() else ""
    if path.exists() and now in ("", before):
        return path
    texts = _stream(source, name, config or None, field)
    import zstandard

    with _whole_file(path) as file, zstandard.ZstdCompressor(level=3).stream_writer(file, closefd=False) as packed:
        for text in texts:
            packed.write(json.dumps({"text": text}).encode() + b"\n")
    if now:
        files.replace_file(made_of, now)
    return path


def _files_now(folder: Path) -> str:
    """Names, sizes and times of the files of a folder here, as JSON; "" where there are none, as of a name on a hub."""
    found = sorted(path for path in folder.rglob("*") if path.is_file()) if folder.is_dir() else []
    return json.dumps([(str(p), p.stat().st_size, p.stat().st_mtime_ns) for p in found]) if found else ""


def _stream(source: str, name: str, config: str | None, field: str) -> Iterator[str | None]:
    try:
        import datasets
    except ImportError:
        raise ConfigError(f"{source} needs datasets: install gated-recurrent-transformer[data].") from None
    try:
        for row in datasets.load_dataset(name, config, split="train", streaming=True):
            if field not in row:
                raise ConfigError(
                    f"{source} has no field {field!r} ({', '.join(row)}): choose one with {FIELD_OPTION}."
                )
            if not isinstance(row[field], str | None):
                raise ConfigError(f"{source} has no text in field {field!r}: choose one that holds text.")
            yield row[field]
    except ConfigError:
        raise
    except Exception as error:  # no network, no such name, no such config, a broken file: a dozen classes
        reason = (str(error).strip() or type(error).__name__).splitlines()[0].split(". ")[0].rstrip(".:")
        raise ConfigError(f"{source} cannot be had ({reason}): check its name, its config and the network.") from None


@contextlib.contextmanager
def _whole_file(path: Path) -> Iterator[IO[bytes]]:
    """A file that gets its name at the end of the block, and is removed if the block fails."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}.partial")
    try:
        with open(partial, "wb") as file:
            yield file
        os.replace(partial, path)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EFBIG, errno.EDQUOT):  # these do not say which file
            raise OSError(error.errno, error.strerror, str(partial)) from None
        raise
    finally:
        partial.unlink(missing_ok=True)
