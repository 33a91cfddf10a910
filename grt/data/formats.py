"""Files -> documents: a text file is one; a JSON line or a row of a Parquet file is one; any of them compressed.

Nothing is held whole but a document of a row: long text files are read part by part, as often as they are asked for.
"""

import codecs
import functools
import gzip
import itertools
import json
import tempfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from grt.errors import ConfigError

TEXT, ROWS, COMPRESSED = (".txt", ".md", ".py"), (".jsonl", ".ndjson", ".parquet"), (".gz", ".zst")
KINDS = f"{', '.join(TEXT + ROWS)}, each also {' or '.join(COMPRESSED)}"
FIELD_OPTION = "--data.field (of grt prepare: --field)"
BLOCK = 1 << 20  # bytes read at once; a longer text file is read in parts
ZSTD_BLOCK = 1 << 16  # compressed, these may become very many
ZSTD_WINDOW = 1 << 31  # the largest there is (zstd --long=31); memory is taken as far as the file reaches back
UTF16 = {codecs.BOM_UTF16_LE: "utf-16-le", codecs.BOM_UTF16_BE: "utf-16-be"}
REMEDIES = {
    ".json": "write its rows as JSON lines in a .jsonl file (jq -c '.[]' rows.json > rows.jsonl)",
    ".csv": "write its rows as JSON lines "
    "(pandas.read_csv('rows.csv').to_json('rows.jsonl', orient='records', lines=True))",
    ".tsv": "write its rows as JSON lines in a .jsonl file",
}


@dataclass(frozen=True)
class Document:
    """One text, as parts that are made anew each time, and the name to call it by, which never enters a hash."""

    name: str
    n_bytes: int
    parts: Callable[[], Iterable[str]]

    @property
    def text(self) -> str:
        return "".join(self.parts())


def of_text(name: str, text: str) -> Document:
    return Document(name, len(text.encode()), lambda: (text,))


def kind_of(path: Path) -> str:
    """`.txt` for a.txt and for a.txt.gz; "" for what is not read."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if suffixes and suffixes[-1] in COMPRESSED:
        suffixes.pop()
    return suffixes[-1] if suffixes and suffixes[-1] in TEXT + ROWS else ""


def remedy_for(path: Path) -> str:
    """What to do with a file of a kind that is not read."""
    suffixes = [suffix.lower() for suffix in path.suffixes if suffix.lower() not in COMPRESSED]
    return REMEDIES.get(suffixes[-1] if suffixes else "", "save its text as UTF-8 in a .txt file")


def documents_of(name: str, path: Path, field: str) -> Iterator[Document]:
    """The documents of one file that are not empty. Raises ConfigError, naming the file and the place, for bad ones."""
    kind = kind_of(path)
    if kind in (".jsonl", ".ndjson"):
        rows = _json_rows(path)
    elif kind == ".parquet":
        rows = _parquet_rows(path, field)
    else:
        document = _text_document(name, path)
        if document.n_bytes:
            yield document
        return
    for number, row in rows:
        if text := _field(row, field, f"{path} {'row' if kind == '.parquet' else 'line'} {number}"):
            yield of_text(f"{name}:{number}", text)


def _text_document(name: str, path: Path) -> Document:
    n_bytes = path.stat().st_size
    if path.suffix.lower() in COMPRESSED or _mark(path):  # its size is not that of the text
        n_bytes = sum(len(part.encode()) for part in text_parts(path))
    if n_bytes <= BLOCK:
        return of_text(name, "".join(text_parts(path)))
    return Document(name, n_bytes, functools.partial(text_parts, path))


def _mark(path: Path) -> bool:
    with open(path, "rb") as file:
        start = file.read(3)
    return start == codecs.BOM_UTF8 or start[:2] in UTF16


def text_parts(path: Path) -> Iterator[str]:
    """The text of a file, a block at a time: UTF-8, or UTF-16 where a byte-order mark says so; the mark is no text.

    Raises ConfigError at the first byte that is neither.
    """
    source = blocks(path)
    start = next(source, b"")
    while 0 < len(start) < 3 and (more := next(source, b"")):
        start += more
    encoding = UTF16.get(start[:2], "utf-8")
    at = 2 if start[:2] in UTF16 else 3 if start.startswith(codecs.BOM_UTF8) else 0
    decoder = codecs.getincrementaldecoder(encoding)()
    for block in _ended(itertools.chain([start[at:]], source)):
        if encoding == "utf-8" and (nul := block.find(0)) >= 0:
            raise ConfigError(f"{path} is a binary file (byte {at + nul} is NUL): give UTF-8 text.")
        pending = len(decoder.getstate()[0])
        try:
            yield decoder.decode(block, final=not block)
        except UnicodeDecodeError as error:
            place, name = at - pending + error.start, encoding.upper()[:6].rstrip("-")
            raise ConfigError(f"{path} is not {name} at byte {place}: convert the file to UTF-8.") from None
        at += len(block)


def _ended(parts: Iterator[bytes]) -> Iterator[bytes]:
    """The parts that are not empty, and then an empty one."""
    yield from filter(None, parts)
    yield b""


def blocks(path: Path) -> Iterator[bytes]:
    """The bytes of a file, unpacked. Raises ConfigError for a compressed file that is damaged or cut off."""
    import zstandard

    suffix = path.suffix.lower()
    try:
        with open(path, "rb") as file:
            if suffix == ".zst":
                yield from _zstd_blocks(file)
            elif suffix == ".gz":
                yield from iter(functools.partial(gzip.GzipFile(fileobj=file).read, BLOCK), b"")
            else:
                yield from iter(functools.partial(file.read, BLOCK), b"")
    except (EOFError, zlib.error, gzip.BadGzipFile, zstandard.ZstdError) as error:
        reason = str(error).rstrip(".")
        raise ConfigError(f"{path} is damaged or cut off ({reason}): get the file again.") from None


def _zstd_blocks(file: IO[bytes]) -> Iterator[bytes]:
    """By hand, because the library's stream reader takes the end of a cut file for the end of the text."""
    import zstandard

    data = file.read(ZSTD_BLOCK)
    if not data:
        raise EOFError("it is empty")
    while data:
        frame = zstandard.ZstdDecompressor(max_window_size=ZSTD_WINDOW).decompressobj()
        while True:
            yield frame.decompress(data)
            if frame.eof:
                break
            data = file.read(ZSTD_BLOCK)
            if not data:
                raise EOFError("the last frame has no end")
        data = frame.unused_data or file.read(ZSTD_BLOCK)


def _json_rows(path: Path) -> Iterator[tuple[int, Any]]:
    at = 0
    for number, line in enumerate(_lines(path), 1):
        try:
            if line.strip():
                yield number, json.loads(line.decode("utf-8-sig"))
        except UnicodeDecodeError as error:
            place = at + error.start
            raise ConfigError(f"{path} line {number} is not UTF-8 at byte {place} of the file: convert it.") from None
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{path} line {number} is not JSON ({error}): mend or remove that line.") from None
        at += len(line)


def _lines(path: Path) -> Iterator[bytes]:
    """Lines with their ends; a long one is put together once."""
    pending: list[bytes] = []
    for block in blocks(path):
        *whole, rest = block.split(b"\n")
        for line in whole:
            yield b"".join((*pending, line, b"\n"))
            pending = []
        pending.append(rest)
    if last := b"".join(pending):
        yield last


def _parquet_rows(path: Path, field: str) -> Iterator[tuple[int, Any]]:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        raise ConfigError(f"{path} needs pyarrow: install gated-recurrent-transformer[data].") from None
    with tempfile.TemporaryFile() as unpacked, open(path, "rb") as file:
        source: Any = file
        if path.suffix.lower() in COMPRESSED:  # its table of contents is at the end
            for block in blocks(path):
                unpacked.write(block)
            source = unpacked
        try:
            table = parquet.ParquetFile(source)
            names = table.schema_arrow.names
            if field not in names:
                raise ConfigError(
                    f"{path} has no column {field!r} ({', '.join(names)}): choose one with {FIELD_OPTION}."
                )
            number = 0
            for batch in table.iter_batches(batch_size=256, columns=[field]):
                for value in batch.column(0):
                    number += 1
                    yield number, {field: value.as_py()}
        except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
            reason = str(error).splitlines()[0].rstrip(".")
            raise ConfigError(f"{path} is no intact Parquet file ({reason}): get the file again.") from None


def _field(row: Any, field: str, where: str) -> str:
    """The text of a row; null counts as an empty one."""
    if not isinstance(row, dict):
        raise ConfigError(f"{where} is no JSON object: write one with a field {field!r}.")
    if field not in row:
        known = ", ".join(map(str, list(row)[:8])) or "none"
        raise ConfigError(f"{where} has no field {field!r} (it has {known}): choose one with {FIELD_OPTION}.")
    text = "" if row[field] is None else row[field]
    if not isinstance(text, str):
        raise ConfigError(f"{where} has {type(text).__name__} in field {field!r}: choose one that holds text.")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(f"{where} has half a surrogate pair at character {error.start}: mend that line.") from None
    return text
