"""The hidden folder in which a preparation is made, and its journal: what a killed one left is gone on with.

The journal's first line says what is made, each further line what was finished when it was written. It is locked while
somebody works in the folder; whoever comes second works in a folder of his own.
"""

import contextlib
import json
import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

from grt.data.encode import WorkerDied
from grt.data.writer import Writer

try:
    import fcntl
except ImportError:  # Windows: there, two processes must not make the same folder at once
    fcntl = None

JOURNAL = "journal.jsonl"


class Partial:
    """The writers of the splits in `folder`; `done` jobs are in their files already."""

    def __init__(self, folder: Path, journal: IO[str], header: dict, writers: Callable[[], list[Writer]]):
        self.folder, self.journal, self.done = folder, journal, 0
        self.writers = writers()
        if not self._restore(header):
            self.close()
            self.done, self.writers = 0, writers()
            for path in folder.iterdir():
                if path.name != JOURNAL:
                    path.unlink()
            journal.truncate(0)
            self._write(header)

    def record(self) -> None:
        """One more job is finished: hand what it wrote to the system, where it survives this process, and say so."""
        self.done += 1
        for writer in self.writers:
            writer.flush()
        self._write({"done": self.done, "splits": {writer.name: writer.state() for writer in self.writers}})

    def close(self) -> None:
        for writer in self.writers:
            with contextlib.suppress(OSError):  # a full disk, which was told already
                writer.close()

    def _restore(self, header: dict) -> bool:
        """Whether the journal is of this preparation, and the files are still what it says."""
        self.journal.seek(0)
        lines = [line for line in self.journal if line.endswith("\n")]
        if not lines or lines[0] != json.dumps(header) + "\n":
            return False
        if not lines[1:]:
            return False
        try:
            last = json.loads(lines[-1])
            self.done = last["done"]
            return all([writer.restore(last["splits"][writer.name]) for writer in self.writers])
        except (ValueError, KeyError, TypeError):  # a damaged line
            return False

    def _write(self, line: dict) -> None:
        try:
            self.journal.write(json.dumps(line) + "\n")
            self.journal.flush()
        except OSError as error:
            raise OSError(error.errno, error.strerror, self.journal.name) from None


@contextlib.contextmanager
def partial_folder(folder: Path, key: str) -> Iterator[tuple[Path, IO[str]]]:
    """The hidden folder beside `folder`, and its locked journal. After an error nothing of it is left.

    It stays where the process is killed, interrupted, or loses a worker.
    """
    path = folder.with_name(f".{folder.name}.{key[:8]}.partial")
    journal = _claim(path)
    if journal is None:
        path = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}.partial")
        journal = _claim(path)
        assert journal is not None
    try:
        yield path, journal
    except (KeyboardInterrupt, WorkerDied):
        raise
    except BaseException:
        shutil.rmtree(path, ignore_errors=True)
        raise
    finally:
        with contextlib.suppress(OSError):  # a full disk, which was told already
            journal.close()


def _claim(path: Path) -> IO[str] | None:
    path.mkdir(parents=True, exist_ok=True)
    journal = open(path / JOURNAL, "a+", encoding="utf-8")  # noqa: SIM115
    if fcntl is None:
        return journal
    try:
        fcntl.flock(journal, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if (path / JOURNAL).stat().st_ino == os.fstat(journal.fileno()).st_ino:
            return journal
    except OSError:  # locked; or moved, with the folder, to its final name by the one who had the lock
        pass
    journal.close()
    return None
