"""Which files a folder or a pattern stands for: each real file once, whatever links lead to it.

Links are followed, those in a circle once; a file's own path goes before a link to it. Hidden files and folders are no
text. Whatever else is left out is kept by its reason, so that it can be said.
"""

import fnmatch
import glob
import os
from collections.abc import Iterator
from pathlib import Path

from grt.data.formats import kind_of

NAMED = 3  # files of a reason that are named


class Finder:
    """Finds the files of one source after the other; a file that was found before is left out of later ones."""

    def __init__(self) -> None:
        self._folders: set[str] = set()
        self._files: set[str] = set()
        self.left_out: dict[str, list[str]] = {}

    def file(self, path: Path) -> bool:
        """Whether the file is one to read; if not, why is kept."""
        real = os.path.realpath(path)
        if not path.exists():
            return self._leave_out("broken link", path)
        if not path.is_file():
            return self._leave_out("no regular file", path)
        if not kind_of(path):
            return self._leave_out(f"kind that is not read ({path.suffix or 'no suffix'})", path)
        if not path.stat().st_size:
            return self._leave_out("empty", path)
        if real in self._files:
            return self._leave_out("found twice", path)
        self._files.add(real)
        return True

    def folder(self, root: Path) -> dict[str, Path]:
        """The files below `root` that are read, by relative path."""
        return {path.relative_to(root).as_posix(): path for path in self._below(root) if self.file(path)}

    def pattern(self, pattern: str) -> dict[str, Path]:
        """The files that a pattern finds, and those below the folders that it finds, by path."""
        parts = Path(pattern).parts
        if "**" in parts:  # not by glob, which goes round a circle of links forty times
            roots = glob.glob(str(Path(*parts[: parts.index("**")])))
            below = (path for root in sorted(roots) for path in self._below(Path(root)))
            paths = [path for path in below if _matches(path.parts, parts)]
        else:
            found = map(Path, sorted(glob.glob(pattern), key=lambda hit: (os.path.islink(hit), hit)))
            paths = [path for hit in found for path in (self._below(hit) if hit.is_dir() else [hit])]
        return {path.as_posix(): path for path in paths if self.file(path)}

    def said(self) -> str:
        """What was left out and why, in one sentence; "" where nothing was."""
        parts = []
        for why, names in sorted(self.left_out.items()):
            more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
            parts.append(f"{why}: {', '.join(names[:NAMED])}{more}")
        return "; ".join(parts)

    def _leave_out(self, why: str, path: Path | str) -> bool:
        self.left_out.setdefault(why, []).append(str(path))
        return False

    def _below(self, root: Path) -> Iterator[Path]:
        """All files below a folder that was not walked yet: first along real folders, then behind links to folders."""
        pending = [str(root)]
        while pending:
            for folder, folders, names in os.walk(pending.pop(0), onerror=self._unreadable):
                real = os.path.realpath(folder)
                if real in self._folders:
                    self._leave_out("found twice", folder)
                    folders.clear()
                    continue
                self._folders.add(real)
                folders[:] = sorted(name for name in folders if not name.startswith((".", "__pycache__")))
                pending += [path for name in folders if os.path.islink(path := os.path.join(folder, name))]
                yield from (Path(folder, name) for name in sorted(names) if not name.startswith("."))

    def _unreadable(self, error: OSError) -> None:
        self._leave_out(f"cannot be read ({error.strerror})", error.filename)


def _matches(path: tuple[str, ...], pattern: tuple[str, ...]) -> bool:
    """Whether the pattern finds this path, or a folder above it; ** stands for any number of folders."""
    if not pattern:
        return True
    if pattern[0] == "**":
        return any(_matches(path[i:], pattern[1:]) for i in range(len(path) + 1))
    return bool(path) and fnmatch.fnmatchcase(path[0], pattern[0]) and _matches(path[1:], pattern[1:])
