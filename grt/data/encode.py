"""Pieces of text -> ids, on as many processes as one likes, in order. Nothing here imports torch: workers start fast.

A piece is a document or a part of one that the tokenizer may encode by itself. Pieces are handed out in jobs, cut by
their size alone, so that ids and their order don't depend on the number of workers.
"""

import os
import signal
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import connection, get_context, parent_process

import numpy as np

from grt.data.tokenizer import Tokenizer, get_tokenizer

PIECE = 1 << 18  # characters from which on a piece of a long document is cut off
JOB = 1 << 20  # characters from which on a job is full

Piece = tuple[str, str, bool]  # split, text, whether its document ends here
Job = list[Piece]


@dataclass
class Encoded:
    """What a job adds to one split: ids with their ends of text, and how many of them there are after each document."""

    ids: list[np.ndarray] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    n_bytes: int = 0


def pieces(parts: Iterable[str], tokenizer: Tokenizer) -> Iterator[tuple[str, bool]]:
    """A document's parts, put together and cut where the tokenizer may: (text, whether it is the last one)."""
    pending = ""
    for part in parts:
        pending += part
        while len(pending) > PIECE and (at := tokenizer.cut(pending[:PIECE]) or tokenizer.cut(pending)):
            if at == len(pending):
                break
            yield pending[:at], False
            pending = pending[at:]
    yield pending, True


def jobs(source: Iterable[Piece]) -> Iterator[Job]:
    job: Job = []
    size = 0
    for piece in source:
        job.append(piece)
        size += len(piece[1])
        if size >= JOB:
            yield job
            job, size = [], 0
    if job:
        yield job


def encode(tokenizer: Tokenizer, job: Job) -> dict[str, Encoded]:
    out: dict[str, Encoded] = {}
    n_ids: dict[str, int] = {}
    for split, text, ends in job:
        part = out.setdefault(split, Encoded())
        ids = tokenizer.encode(text)
        part.ids.append(np.append(ids, ids.dtype.type(tokenizer.eot)) if ends else ids)
        part.n_bytes += len(text.encode())
        n_ids[split] = n_ids.get(split, 0) + len(part.ids[-1])
        if ends:
            part.ends.append(n_ids[split])
    for part in out.values():
        part.ids = [np.concatenate(part.ids)]
    return out


def encoded(source: Iterable[Job], tokenizer: Tokenizer, workers: int) -> Iterator[dict[str, Encoded]]:
    """Each job's ids, in the order of the jobs. Raises BrokenProcessPool where a worker dies."""
    if workers == 1:
        for job in source:
            yield encode(tokenizer, job)
        return
    pool = ProcessPoolExecutor(workers, get_context("spawn"), _start_worker, (tokenizer.name,))
    waiting = deque()
    finished = False
    try:
        for job in source:
            waiting.append(pool.submit(_encode_in_worker, job))
            if len(waiting) > 2 * workers:  # what is read ahead stays small
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
        finished = True
    finally:
        if not finished:
            # An interrupt can fall while a job is being sent: its worker then waits for the rest, and shutdown for it.
            for process in list((pool._processes or {}).values()):
                process.terminate()
        pool.shutdown(cancel_futures=True)


_worker_tokenizer: Tokenizer | None = None


def _start_worker(name: str) -> None:
    global _worker_tokenizer  # noqa: PLW0603
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent ends its workers
    threading.Thread(target=_leave_with_parent, daemon=True).start()
    _worker_tokenizer = get_tokenizer(name)


def _leave_with_parent() -> None:
    """A killed parent closes no queue, and its workers would wait for ever."""
    parent = parent_process()
    assert parent is not None
    connection.wait([parent.sentinel])
    os._exit(1)


def _encode_in_worker(job: Job) -> dict[str, Encoded]:
    assert _worker_tokenizer is not None
    return encode(_worker_tokenizer, job)
