"""`grt prepare`: text into token shards, before or without a run."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from grt.cli.options import parse


@dataclass
class Prepare:
    """Turn text into token shards."""

    source: Annotated[tyro.conf.Positional[tuple[str, ...]], tyro.conf.arg(metavar="SOURCE")]
    """Files, folders or patterns (.txt, .md, .py, .jsonl, .ndjson, .parquet, each also .gz or .zst), nanoGPT's .bin, or
    builtin, stdlib, shakespeare, hf:DATASET, url:ADDRESS#sha256=SUM."""
    out: Path
    """Folder for the shards and their meta.json."""
    tokenizer: str = "bytes"
    """How text becomes tokens: bytes, gpt2, or hf: and a tokenizer.json, its folder or a name on the hub."""
    field: str = "text"
    """Field of the rows of .jsonl and .parquet files and of datasets that holds the text."""
    val_fraction: float = 0.02
    """Share of the documents that is kept for validation, chosen by their hash."""
    workers: int = 0
    """Processes that encode; 0: one a core. The shards do not depend on it."""


def run_prepare(arguments: list[str]) -> int:
    command = parse(Prepare, arguments, "prepare")
    from grt.data.prepare import prepare

    data = prepare(
        command.source, tokenizer=command.tokenizer, val_fraction=command.val_fraction, field=command.field,
        out=command.out.resolve(), workers=command.workers, progress=True,
    )  # fmt: skip
    print(data.folder)
    return 0
