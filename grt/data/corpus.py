"""Corpora: an ordered list of UTF-8 files, one document each, that is read one file at a time.

`builtin` needs no download: it is the Python source of packages that the project depends on anyway. At the pinned
versions it is the same text, to the byte, on every platform and Python version; what wheels generate at build time
or ship for some Python versions only is left out, and CRLF (the Windows wheels) is read as LF.
"""

import hashlib
import importlib.util
import sysconfig
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from grt.config import ConfigError

BUILTIN_VERSIONS = {"sympy": "1.14.0", "networkx": "3.6.1", "mpmath": "1.3.0", "numpy": "2.4.6"}
BUILTIN_SHA256 = "40029e005cc78f4bd82b9ae945bf9b7b12566880ee270e1fb1d3c375c18f0b21"
MIN_SOURCE_BYTES = 1024

# Written at build time (compilers, commit), patched in the Windows wheels (__init__), or only in those of Python 3.11.
GENERATED = ("numpy/__config__.py", "numpy/version.py", "numpy/__init__.py", "numpy/distutils/")
STDLIB_LEFT_OUT = ("site-packages/", "dist-packages/", "_sysconfigdata", "config-")


@dataclass(frozen=True)
class Document:
    """One text and the name to call it by; the name never enters a hash."""

    name: str
    text: str


@dataclass(frozen=True)
class Corpus:
    """Named files in a fixed order; `expected_sha256` where the text is known in advance."""

    name: str
    files: tuple[tuple[str, Path], ...]  # (document name, path)
    expected_sha256: str | None = None
    crlf_as_lf: bool = False

    def documents(self) -> Iterator[Document]:
        """Yields the documents in order, holding one at a time. Raises ConfigError for a file that is no UTF-8 text."""
        for name, path in self.files:
            data = path.read_bytes()
            if self.crlf_as_lf:
                data = data.replace(b"\r\n", b"\n")
            yield Document(name, _decode(data, path))


class CorpusHash:
    """sha256 over documents in order, each preceded by its length (8 bytes, little-endian): no two cuts agree."""

    def __init__(self):
        self._sha256 = hashlib.sha256()

    def add(self, text_bytes: bytes) -> None:
        self._sha256.update(len(text_bytes).to_bytes(8, "little"))
        self._sha256.update(text_bytes)

    def hexdigest(self) -> str:
        return self._sha256.hexdigest()


def open_corpus(source: str | Path) -> Corpus:
    """The corpus called `builtin` or `stdlib`, or that of a .txt file or of a folder's .txt files (by relative path).

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
    path = Path(source)
    if path.is_dir():
        return _folder(path)
    if not path.exists():
        raise ConfigError(f"No file or folder {path}: give builtin, stdlib, a .txt file or a folder of .txt files.")
    if path.suffix.lower() != ".txt":
        raise ConfigError(f"{path} is not a .txt file: save its text as UTF-8 under a name that ends in .txt.")
    if path.stat().st_size == 0:
        raise ConfigError(f"{path} is empty: give a file that holds text.")
    return Corpus(path.stem, ((path.name, path),))


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


def _folder(path: Path) -> Corpus:
    found = {p.relative_to(path).as_posix(): p for p in path.rglob("*") if p.suffix.lower() == ".txt" and p.is_file()}
    if not found:
        raise ConfigError(f"The folder {path} holds no .txt file: put UTF-8 text files into it, at any depth.")
    files = tuple((name, found[name]) for name in sorted(found) if found[name].stat().st_size)
    if not files:
        raise ConfigError(f"All .txt files in {path} are empty: give files that hold text.")
    return Corpus(path.resolve().name, files)


def _decode(data: bytes, path: Path) -> str:
    if (nul := data.find(0)) >= 0:
        raise ConfigError(f"{path} is a binary file (byte {nul} is NUL): give UTF-8 text.")
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 at byte {error.start}: convert the file to UTF-8.") from None


def _package_folder(name: str) -> Path:
    # For a top-level name find_spec only looks; importing sympy would take seconds.
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError(f"The builtin corpus needs {name}'s source: install {name}=={BUILTIN_VERSIONS[name]}.")
    return Path(spec.submodule_search_locations[0])


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
        try:
            _decode(data, paths[name])
        except ValueError:  # test suites hold such files on purpose
            continue
        if len(data) >= MIN_SOURCE_BYTES:
            by_content.setdefault(hashlib.sha256(data).hexdigest(), (name, paths[name]))
    return tuple(by_content[digest] for digest in sorted(by_content))
