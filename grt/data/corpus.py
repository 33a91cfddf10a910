"""Corpora: an ordered list of files and the documents in them (see `formats`), read one at a time.

`builtin` needs no download: it is the Python source of packages that the project depends on anyway. At the pinned
versions it is the same text, to the byte, on every platform and Python version; what wheels generate at build time
or ship for some Python versions only is left out, and CRLF (the Windows wheels) is read as LF.
"""

import glob
import hashlib
import importlib.util
import sysconfig
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path

from grt.data.find import Finder
from grt.data.formats import COMPRESSED, KINDS, Document, documents_of, kind_of, of_text, remedy_for
from grt.data.remote import SHORTCUTS, download, fetch_dataset
from grt.errors import ConfigError

BUILTIN_VERSIONS = {"sympy": "1.14.0", "networkx": "3.6.1", "mpmath": "1.3.0", "numpy": "2.4.6"}
BUILTIN_SHA256 = "40029e005cc78f4bd82b9ae945bf9b7b12566880ee270e1fb1d3c375c18f0b21"
MIN_SOURCE_BYTES = 1024

# Written at build time (compilers, commit), patched in the Windows wheels (__init__), or only in those of Python 3.11.
GENERATED = ("numpy/__config__.py", "numpy/version.py", "numpy/__init__.py", "numpy/distutils/")
STDLIB_LEFT_OUT = ("site-packages/", "dist-packages/", "_sysconfigdata", "config-")
RESERVED = ("builtin", "stdlib")  # names of corpora, also where a folder of that name exists


@dataclass(frozen=True)
class Corpus:
    """Named files in a fixed order; `expected_sha256` where the text is known in advance."""

    name: str
    files: tuple[tuple[str, Path], ...]  # (document name, path)
    expected_sha256: str | None = None
    crlf_as_lf: bool = False  # source files: small
    field: str = "text"
    left_out: str = ""  # which files were, and why

    def documents(self) -> Iterator[Document]:
        """Yields the documents in order, holding one at a time. Raises ConfigError for a file that is no UTF-8 text."""
        for name, path in self.files:
            for document in documents_of(name, path, self.field):
                yield of_text(name, document.text.replace("\r\n", "\n")) if self.crlf_as_lf else document


class CorpusHash:
    """sha256 over documents in order, each preceded by its length (8 bytes, little-endian): no two cuts agree."""

    def __init__(self):
        self._sha256 = hashlib.sha256()

    def begin(self, n_bytes: int) -> None:
        self._sha256.update(n_bytes.to_bytes(8, "little"))

    def add(self, text_bytes: bytes) -> None:
        """More of the document that began last."""
        self._sha256.update(text_bytes)

    def hexdigest(self) -> str:
        return self._sha256.hexdigest()


def split_sources(sources: str | Path | Sequence[str | Path]) -> list[str]:
    """Single sources; commas part those of a string, unless they belong to the name of a file that is there."""
    found: list[str] = []
    for source in [sources] if isinstance(sources, str | Path) else sources:
        found += [str(source)] if isinstance(source, Path) else _parted(source.split(","))
    found = [source for source in found if source]
    if not found:
        raise ConfigError(f"missing: SOURCE (builtin, stdlib, or files and folders of {KINDS}).")
    return found


def _parted(parts: list[str]) -> list[str]:
    """The parts, with commas between those that are one name: of the first, as many as make a name that is there."""
    for n in range(len(parts), 1, -1):
        whole = ",".join(parts[:n])
        path = whole.strip().removeprefix("hf:")
        if Path(path).exists() or (glob.has_magic(path) and any(glob.iglob(path))):
            return [whole.strip() if n < len(parts) else whole, *_parted(parts[n:])]
    return [parts[0].strip(), *_parted(parts[1:])] if parts else []


def open_corpora(sources: Sequence[str | Path], field: str) -> list[Corpus]:
    """The corpora of several sources; a file that an earlier one has is left out of a later one."""
    corpora: list[Corpus] = []
    seen: set[Path] = set()
    for source in sources:
        corpus = open_corpus(source, field)
        files = tuple((name, path) for name, path in corpus.files if path.resolve() not in seen)
        if again := len(corpus.files) - len(files):
            note = f"{source}: left out, {again} file{'s' if again > 1 else ''} of an earlier source"
            corpus = replace(corpus, files=files, left_out="; ".join(filter(None, (corpus.left_out, note))))
        seen.update(path.resolve() for _, path in files)
        corpora.append(corpus)
    return corpora


def open_corpus(source: str | Path, field: str = "text") -> Corpus:
    """The corpus of one source; `field` is that of the rows of .jsonl and .parquet files.

    A source is `builtin`, `stdlib`, `shakespeare`, `url:...`, `hf:...` (see `remote`), a file, a folder (its files of
    all kinds that are read, by relative path, without hidden ones), or a pattern with * that finds files and folders.
    A folder of the name `builtin` is reached as `./builtin`. Raises ConfigError, in a sentence that names the path, for
    one that is missing, empty or of another kind; what is inside the files is checked as they are read.
    """
    if source == "builtin":
        files = _python_sources({name: _package_folder(name) for name in BUILTIN_VERSIONS}, GENERATED)
        return Corpus("builtin", files, BUILTIN_SHA256, crlf_as_lf=True)
    if source == "stdlib":
        root = Path(sysconfig.get_paths()["stdlib"])
        left_out = tuple(f"stdlib/{prefix}" for prefix in STDLIB_LEFT_OUT)
        return Corpus("stdlib", _python_sources({"stdlib": root}, left_out), crlf_as_lf=True)
    address = SHORTCUTS.get(str(source), str(source))
    if address.startswith("url:"):
        path = download(address)
        return Corpus(str(source) if source in SHORTCUTS else _stem(path), ((path.name, path),), field=field)
    if address.startswith("hf:"):
        path = fetch_dataset(address, field)
        return Corpus(_stem(path), ((address, path),))
    return _on_disk(str(source), field)


def _on_disk(source: str, field: str) -> Corpus:
    path, finder = Path(source), Finder()
    if path.is_dir():
        return _of_files(path.resolve().name, f"The folder {path}", finder.folder(path), finder, field)
    if not path.exists() and glob.has_magic(source):
        return _of_files("files", f"The pattern {source}", finder.pattern(source), finder, field)
    if not path.exists():
        link = f"{path} is a broken link" if path.is_symlink() else f"No file or folder {path}"
        raise ConfigError(f"{link}: give builtin, stdlib, or files and folders of {KINDS}.")
    if not kind_of(path):
        raise ConfigError(f"{path} is of no kind that is read ({KINDS}): {remedy_for(path)}.")
    if path.stat().st_size == 0:
        raise ConfigError(f"{path} is empty: give a file that holds text.")
    return Corpus(_stem(path), ((path.name, path),), field=field)


def _of_files(name: str, where: str, files: dict[str, Path], finder: Finder, field: str) -> Corpus:
    """The corpus of the files that were found. Raises ConfigError where none was."""
    said = finder.said()
    if not files:
        why = f" ({said})" if said else ""
        raise ConfigError(f"{where} holds no file of text{why}: give files of {KINDS}.")
    left_out = f"{where}: left out, {said}" if said else ""
    return Corpus(name, tuple((key, files[key]) for key in sorted(files)), field=field, left_out=left_out)


def check_expected(corpus: Corpus, sha256: str) -> None:
    """Warns when a corpus whose text is known in advance turns out to be another: results are not comparable then."""
    if corpus.expected_sha256 not in (None, sha256):
        found = ", ".join(f"{name} {version(name)} (pinned {pin})" for name, pin in BUILTIN_VERSIONS.items())
        warnings.warn(
            f"The {corpus.name} corpus differs from the expected one (sha256 {sha256[:16]} instead of "
            f"{corpus.expected_sha256[:16]}), so losses on it do not compare with published ones; it was read from "
            f"{found}: install the pinned versions to get the expected text.",
            stacklevel=3,
        )


def _stem(path: Path) -> str:
    return Path(path.stem).stem if path.suffix.lower() in COMPRESSED else path.stem


def _package_folder(name: str) -> Path:
    # For a top-level name find_spec only looks; importing sympy would take seconds.
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError(f"The builtin corpus needs {name}'s source: install {name}=={BUILTIN_VERSIONS[name]}.")
    return Path(spec.submodule_search_locations[0])


def _is_text(data: bytes) -> bool:
    """Test suites hold files that are not, on purpose."""
    try:
        return b"\0" not in data and data.decode() is not None
    except UnicodeDecodeError:
        return False


def _python_sources(roots: dict[str, Path], left_out: Iterable[str]) -> tuple[tuple[str, Path], ...]:
    """The .py files under the roots, without small ones and copies, in the order of their content's sha256.

    Only hashes are kept: the text is read again, a file at a time, by `Corpus.documents`.
    """
    found = ((root, folder, path) for root, folder in roots.items() for path in folder.rglob("*.py"))
    paths = {f"{root}/{path.relative_to(folder).as_posix()}": path for root, folder, path in found}
    by_content: dict[str, tuple[str, Path]] = {}
    for name in sorted(paths):
        if name.startswith(tuple(left_out)) or "__pycache__" in name:
            continue
        data = paths[name].read_bytes().replace(b"\r\n", b"\n")
        if len(data) >= MIN_SOURCE_BYTES and _is_text(data):
            by_content.setdefault(hashlib.sha256(data).hexdigest(), (name, paths[name]))
    return tuple(by_content[digest] for digest in sorted(by_content))
