"""What people read while a command runs: text, and how far it is. No command is silent for long.

Long work says what it is in a `working` block. While somebody watches (`watching`: every command of the command line,
and every training), standard error shows it: bars on a terminal, else a plain line now and then, from a thread of its
own, so that nothing that takes long hides it. In a program that only calls functions nobody watches, and all is quiet;
with GRT_PROGRESS=off in the environment commands show their results and notes alone.
"""

import contextlib
import errno
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import IO, Literal, TypeVar

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn

FIRST = 3.0  # seconds of silence after which a command says what it does
PAUSE = 8.0  # seconds of silence after which it says so again

T = TypeVar("T")


class Output(Console):
    """Standard output for people: text as it is (a `[` or `:x:` in a path is no markup), tables as wide as
    their content when piped, and silence once the reader has left (`| head`): a training run goes on."""

    def __init__(self) -> None:
        super().__init__(highlight=False, soft_wrap=True, markup=False, emoji=False)
        if not self.is_terminal:
            self.width = 10_000

    def on_broken_pipe(self) -> None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@dataclass(eq=False)
class Task:
    """A stretch of work: what it is, and how much of it is done. `status`: what there is to say of it, or who knows.
    `kept`: what is not lost where a signal ends it, and how to go on."""

    what: str
    total: int | None = None
    start: int = 0
    unit: Literal["", "bytes"] = ""
    status: str | Callable[[], str] = ""
    kept: str = ""
    shown: Literal["bar", "line", "elsewhere"] = "bar"
    done: int = 0
    began: float = field(default_factory=time.monotonic)
    bar: TaskID | None = None
    on_change: Callable[[], None] = lambda: None

    def advance(self, n: int = 1, status: str | None = None) -> None:
        self.reach(self.done + n, status)

    def reach(self, done: int, status: str | None = None, total: int | None = None) -> None:
        self.done, self.total = done, self.total if total is None else total
        if status is not None:
            self.status = status
        self.on_change()

    def restart(self, what: str, total: int | None) -> None:
        """Other work follows, in place of this one."""
        self.what, self.total, self.start, self.done, self.began = what, total, 0, 0, time.monotonic()
        self.on_change()

    @property
    def count(self) -> str:
        """12/64, 1.2/30.0 MB, or as much as is known."""
        if self.unit == "bytes":
            megabytes = [f"{n / 1e6:,.1f}" for n in (self.done, self.total) if n]
            return f"{'/'.join(megabytes)} MB" if self.done else ""
        return str(self.done or "") if self.total is None else f"{self.done}/{self.total}"

    @property
    def said(self) -> str:
        return self.status if isinstance(self.status, str) else self.status()


def in_words(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"


def time_left(tasks: Sequence[Task], now: float) -> float | None:
    """Of the outermost task that knows its end, what the ones within it have done included; None if nobody can say."""
    known = [task for task in tasks if task.total]
    if not known:
        return None
    within = 0.0
    for task in reversed(known[1:]):
        assert task.total
        within = min((task.done + within) / task.total, 1.0)
    outer = known[0]
    assert outer.total
    done = outer.done - outer.start + within
    if done <= 0:
        return None
    return max(outer.total - outer.done - within, 0) * (now - outer.began) / done


def line_of(tasks: Sequence[Task], now: float) -> str:
    """One line of what goes on, the work that holds the others first."""
    parts = [" ".join(filter(None, (task.what, task.count))) for task in tasks]
    said = [text for task in tasks if (text := task.said)]
    left = time_left(tasks, now)
    end = f"{in_words(now - tasks[-1].began)} so far" if left is None else f"left {in_words(left)}"
    return "  ".join([": ".join(parts), *said, end])


def beside_bar(task: Task) -> str:
    left = time_left([task], time.monotonic())
    return "  ".join(filter(None, (task.count, task.said, "" if left is None else f"left {in_words(left)}")))


class Watch:
    """Shows the work of one command, whose name it has: a thread that speaks up where there was silence."""

    def __init__(self, name: str) -> None:
        self.command, self.tasks = Task(name), list[Task]()
        self.mute = os.environ.get("GRT_PROGRESS") == "off"
        self.file: IO[str] | None = sys.stderr  # now: others may turn the stream away for a while
        self.spoke, self.spoken = time.monotonic(), False
        self.lock, self.over = threading.RLock(), threading.Event()
        self.progress: Progress | None = None
        self.thread = threading.Thread(target=self._speak_up, name="grt watch", daemon=True)

    def _speak_up(self) -> None:
        wait = min(FIRST, PAUSE)
        while not self.over.wait(wait):
            with self.lock:
                wait = self.spoke + (PAUSE if self.spoken else FIRST) - time.monotonic()
                if wait > 0:
                    continue
                wait = PAUSE
                if self.progress is None and not any(task.shown == "elsewhere" for task in self.tasks):
                    self._write(line_of(self.tasks or [self.command], time.monotonic()))
                else:
                    self.alive()

    def _write(self, line: str) -> None:
        self.alive()
        try:
            if self.file is not None:
                self.file.write(line + "\n")
                self.file.flush()
        except (OSError, ValueError):  # nobody reads it any more
            self.file = None

    def alive(self) -> None:
        """Something was shown just now."""
        self.spoke, self.spoken = time.monotonic(), True

    def note(self, line: str) -> None:
        with self.lock:
            if self.progress is None:
                self._write(line)
            else:
                self.progress.console.print(line, soft_wrap=True)

    def begin(self, task: Task) -> None:
        with self.lock:
            self.tasks.append(task)
            if self.mute or task.shown != "bar" or not is_screen(self.file):
                return
            if self.progress is None:
                self.progress = bars_on(self.file)
                self.progress.start()
            task.bar = self.progress.add_task(
                task.what, total=task.total, completed=task.done, told=beside_bar(task)
            )  # fmt: skip
            task.on_change = lambda: self._move(task)

    def _move(self, task: Task) -> None:
        if self.progress is not None and task.bar is not None:
            self.progress.update(
                task.bar, description=task.what, completed=task.done, total=task.total, told=beside_bar(task)
            )

    def end(self, task: Task) -> None:
        with self.lock:
            self.tasks.remove(task)
            if self.progress is not None and task.bar is not None:
                self.progress.remove_task(task.bar)
                if not self.progress.tasks:
                    self._take_down()

    def _take_down(self) -> None:
        progress, self.progress = self.progress, None
        self.alive()
        if progress is not None:
            with maybe_gone(sys.stderr):
                progress.stop()

    def close(self) -> None:
        self.over.set()
        with self.lock:
            self._take_down()
        if not self.mute:
            self.thread.join(1.0)  # it may wait for a reader of standard error who does not read


def is_screen(file: IO[str] | None) -> bool:
    """Whether bars can be drawn there."""
    return file is not None and file.isatty() and os.environ.get("TERM") not in ("dumb", "unknown")


def bars_on(file: IO[str] | None) -> Progress:
    texts = (TextColumn(f"{{task.{name}}}", markup=False) for name in ("description", "fields[told]"))
    columns = next(texts), BarColumn(bar_width=20), next(texts)
    # Of the streams, what goes to this terminal has to be written above the bars.
    return Progress(
        *columns, console=Console(file=file, highlight=False, markup=False, emoji=False), transient=True,
        refresh_per_second=2, redirect_stdout=is_screen(sys.stdout), redirect_stderr=True,
    )  # fmt: skip


_watch: Watch | None = None


@contextlib.contextmanager
def watching(name: str) -> Iterator[None]:
    """While entered, what `working` blocks do is shown, and nothing is silent for long; within another one, that one
    goes on."""
    global _watch  # noqa: PLW0603 - a process has one standard error
    if _watch is not None:
        yield
        return
    _watch = watch = Watch(name)
    if not watch.mute:
        watch.thread.start()
    try:
        yield
    finally:
        _watch = None
        watch.close()


@contextlib.contextmanager
def working(
    what: str, total: int | None = None, *, start: int = 0, unit: Literal["", "bytes"] = "",
    status: str | Callable[[], str] = "", kept: str = "", shown: Literal["bar", "line", "elsewhere"] = "bar",
) -> Iterator[Task]:  # fmt: skip
    """A stretch of work, which the block moves on by `advance` or `reach`. Its arguments are Task's; `start`: done
    before; shown: by a bar where there is a terminal, by lines alone (where the block itself writes there), or by
    whoever does it."""
    task, watch = Task(what, total, start, unit, status, kept, shown, done=start), _watch
    if watch is not None:
        watch.begin(task)
    try:
        yield task
    finally:
        if watch is not None:
            watch.end(task)


def each(items: Sequence[T], what: str) -> Iterator[T]:
    """The items, with their number shown as work."""
    with working(what, len(items)) as task:
        for item in items:
            yield item
            task.advance()


def kept() -> str:
    """What is not lost where the command ends now."""
    said = [task.kept for task in (_watch.tasks if _watch is not None else []) if task.kept]
    return said[-1] if said else ""


def alive() -> None:
    """Tell the watch that the command itself has just shown something."""
    if _watch is not None:
        _watch.alive()


def note(line: str) -> None:
    """A line on standard error while a command runs; nothing where nobody watches."""
    if _watch is not None:
        _watch.note(line)


def say(text: str) -> None:
    """A line of a command's own output while it runs: on standard output, above the bars if it has any."""
    with maybe_gone(sys.stdout):
        if _watch is not None and _watch.progress is not None and is_screen(sys.stdout):
            _watch.note(text)
        else:
            Output().print(text)
            alive()


@contextlib.contextmanager
def maybe_gone(stream: IO[str]) -> Iterator[None]:
    """A terminal whose window was closed refuses what is written, and the run has yet to save."""
    try:
        yield
    except OSError as error:
        if error.errno != errno.EIO:
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
