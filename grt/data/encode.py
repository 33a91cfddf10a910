"""Pieces of text -> ids, on as many processes as one likes, in order. Nothing here imports torch: workers start fast.

A piece is a document or a part of one that the tokenizer may encode by itself, told what stands around it. Pieces are
handed out in jobs, cut by their size alone, so that ids and their order don't depend on the number of workers.
"""

import os
import signal
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from multiprocessing import get_context, parent_process
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import NamedTuple

import numpy as np

from grt.data.tokenizer import Tokenizer, get_tokenizer

PIECE = 1 << 18  # characters from which on a piece of a long document is cut off
LONGEST = 1 << 19  # and from which on it is cut anywhere, so that memory has a bound
JOB = 1 << 20  # characters from which on a job is full


class Piece(NamedTuple):
    """Text, whether its document ends here, and what stands around it (Tokenizer.context characters)."""

    text: str
    ends: bool
    before: str = ""
    after: str = ""


Job = list[tuple[str, Piece]]  # with the split of each


@dataclass
class Encoded:
    """What a job adds to one split: ids with their ends of text, and how many of them there are after each document."""

    ids: list[np.ndarray] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    n_bytes: int = 0


def pieces(parts: Iterable[str], tokenizer: Tokenizer, size: int | None = None) -> Iterator[Piece]:
    """A document's parts, put together and cut where the tokenizer may, from `size` characters on (PIECE)."""
    size = PIECE if size is None else size
    context = tokenizer.context
    text, start = "", 0  # what stands before `start` is handed on already
    for part in parts:
        kept = max(start - context, 0)
        text, start = text[kept:] + part, start - kept
        while end := _end(text, start, tokenizer, size):
            before, after = text[max(start - context, 0) : start], text[end : end + context]
            yield Piece(text[start:end], False, before, after)
            start = end
    yield Piece(text[start:], True, text[max(start - context, 0) : start])


def _end(text: str, start: int, tokenizer: Tokenizer, size: int) -> int:
    """Where the piece ends that begins at `start`; 0 where more text has to come first."""
    while len(text) - start > size:
        if at := tokenizer.cut(text[start : start + size]):
            return start + at
        if size >= LONGEST:
            return start + size // 2
        size *= 2
    return 0


def jobs(source: Iterable[tuple[str, Piece]]) -> Iterator[Job]:
    job: Job = []
    size = 0
    for split, piece in source:
        job.append((split, piece))
        size += len(piece.text)
        if size >= JOB:
            yield job
            job, size = [], 0
    if job:
        yield job


def encode(tokenizer: Tokenizer, job: Job) -> dict[str, Encoded]:
    out: dict[str, Encoded] = {}
    n_ids: dict[str, int] = {}
    for split, (text, ends, before, after) in job:
        part = out.setdefault(split, Encoded())
        ids = tokenizer.encode(text, before, after)
        part.ids.append(np.append(ids, ids.dtype.type(tokenizer.eot)) if ends else ids)
        part.n_bytes += len(text.encode())
        n_ids[split] = n_ids.get(split, 0) + len(part.ids[-1])
        if ends:
            part.ends.append(n_ids[split])
    for part in out.values():
        part.ids = [np.concatenate(part.ids)]
    return out


def encoded(source: Iterable[Job], tokenizer: Tokenizer, workers: int) -> Iterator[dict[str, Encoded]]:
    """Each job's ids, in the order of the jobs. Raises WorkerDied where a worker does."""
    if workers == 1:
        for job in source:
            yield encode(tokenizer, job)
        return
    pool = Workers(tokenizer.name, workers)
    handed_on = 0
    try:
        for number, job in enumerate(source):
            while pool.busy == workers or number - handed_on > 2 * workers:  # what is read ahead stays small
                pool.collect()
                while handed_on in pool.results:
                    yield pool.results.pop(handed_on)
                    handed_on += 1
            pool.give(number, job)
        while pool.busy or pool.results:
            while handed_on not in pool.results:
                pool.collect()
            yield pool.results.pop(handed_on)
            handed_on += 1
    finally:
        pool.end()


class WorkerDied(Exception):
    """A worker was killed: by the system for want of memory, or by hand."""


class Workers:
    """Processes with a pipe each and no thread between: ended at any moment, none of them waits for another.

    An executor's threads can, when an interrupt falls while a job is being sent (CPython's gh-94777).
    """

    def __init__(self, tokenizer: str, n: int):
        context = get_context("spawn")
        self.results: dict[int, dict[str, Encoded]] = {}
        self._processes: list[BaseProcess] = []
        self._idle: list[Connection] = []
        self._at_work: dict[Connection, int] = {}
        try:
            for _ in range(n):
                ours, theirs = context.Pipe()
                process = context.Process(target=_work, args=(theirs, tokenizer), daemon=True)
                process.start()
                theirs.close()  # so that a dead worker's pipe reads as ended
                self._processes.append(process)
                self._idle.append(ours)
        except BaseException:
            self.end()
            raise

    @property
    def busy(self) -> int:
        return len(self._at_work)

    def give(self, number: int, job: Job) -> None:
        worker = self._idle.pop()
        self._at_work[worker] = number
        try:
            worker.send(job)
        except OSError as error:
            raise WorkerDied from error

    def collect(self) -> None:
        """Waits for the next results. An error in a worker is raised here."""
        for worker in wait(list(self._at_work)):
            assert isinstance(worker, Connection)
            try:
                result = worker.recv()
            except (EOFError, OSError) as error:
                raise WorkerDied from error
            if isinstance(result, Exception):
                raise result
            self.results[self._at_work.pop(worker)] = result
            self._idle.append(worker)

    def end(self) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        for worker in [*self._idle, *self._at_work]:
            worker.close()


def _work(pipe: Connection, name: str) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent ends its workers
    threading.Thread(target=_leave_with_parent, daemon=True).start()
    tokenizer = get_tokenizer(name)
    while True:
        job = pipe.recv()
        try:
            result = encode(tokenizer, job)
        except Exception as error:
            result = error
        pipe.send(result)


def _leave_with_parent() -> None:
    """A killed parent closes its pipes, but not while a worker that was started later still holds them."""
    parent = parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)
