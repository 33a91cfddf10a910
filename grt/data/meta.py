"""meta.json, which describes a prepared folder: read with every field checked, since shards are trusted by it."""

import json
import re
from pathlib import Path
from typing import Any

from grt.errors import ConfigError

FORMAT = 2
READABLE = (1, 2)  # format 1 has no index of documents
SPLITS = ("train", "val")

COUNT = "a count"
SHA256 = re.compile("[0-9a-f]{64}")
SHARD = re.compile(r"(train|val)-\d{5}\.bin")

# field -> what it must be: a type, a pattern for a string, or COUNT; of the file, of its tokenizer, split and shard
FILE = {"source": str, "key": str, "corpus_sha256": SHA256, "split_rule": dict, "tokenizer": dict, "splits": dict}
TOKENIZER = {"name": str, "sha256": SHA256, "vocab_size": COUNT, "eot": COUNT}
SPLIT = {"documents": COUNT, "tokens": COUNT, "bytes": COUNT, "sha256": SHA256, "shards": list}
PART = {"file": SHARD, "tokens": COUNT, "sha256": SHA256}
INDEX = {"file": re.compile(r"(train|val)\.idx"), "sha256": SHA256}


def read_meta(path: Path) -> dict:
    """meta.json. Raises ConfigError where it is missing, no JSON, of another format or wrong in a field."""
    if not path.exists():
        raise ConfigError(f"{path} is missing, so {path.parent} is no prepared folder: make one with grt prepare.")
    try:
        meta = json.loads(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror}): prepare the data again.") from None
    except (ValueError, RecursionError):
        raise ConfigError(f"{path} is not JSON: prepare the data again.") from None
    if not isinstance(meta, dict) or meta.get("format") not in READABLE:
        raise ConfigError(f"{path} is not in format {FORMAT}, which this version reads: prepare the data again.")
    try:
        _check(meta)
    except _Wrong as wrong:
        raise ConfigError(f"{path} is wrong in {wrong}: prepare the data again.") from None
    return meta


class _Wrong(Exception):
    """The name of a field."""


def _check(meta: dict) -> None:
    _fields(meta, FILE, "")
    if meta.get("dtype") not in ("uint16", "uint32"):
        raise _Wrong("dtype")
    _fields(meta["tokenizer"], TOKENIZER, "tokenizer.")
    if not meta["tokenizer"]["eot"] < meta["tokenizer"]["vocab_size"] <= 1 << 32:
        raise _Wrong("tokenizer.vocab_size")
    if tuple(meta["splits"]) != SPLITS:
        raise _Wrong("splits")
    for name, entry in meta["splits"].items():
        where = f"splits.{name}."
        _fields(entry, SPLIT, where)
        for n, shard in enumerate(entry["shards"]):
            _fields(shard, PART, f"{where}shards.{n}.")
            if not shard["tokens"]:
                raise _Wrong(f"{where}shards.{n}.tokens")
        if entry["tokens"] != sum(shard["tokens"] for shard in entry["shards"]):
            raise _Wrong(f"{where}tokens")
        if meta["format"] > 1 or "index" in entry:
            _fields(entry.get("index"), INDEX, f"{where}index.")


def _fields(values: Any, wanted: dict[str, Any], where: str) -> None:
    if not isinstance(values, dict):
        raise _Wrong(where.rstrip("."))
    for name, what in wanted.items():
        value = values.get(name)
        if isinstance(what, re.Pattern):
            right = isinstance(value, str) and what.fullmatch(value) is not None
        elif what is COUNT:
            right = type(value) is int and 0 <= value < 1 << 62
        else:
            right = isinstance(value, what)
        if not right:
            raise _Wrong(where + name)
