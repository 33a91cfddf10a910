"""Leaving early, in good order: what Ctrl-C, SIGTERM, SIGHUP (a closed window) and a time limit do.

A command that has nothing to save ends at once, by `Stopped`, with one sentence (Signals). Training takes note, stops
where nothing is half done, and saves (Interrupt). Either is over within seconds: a thread ends the process where the
main one does not come to it, because a single pass or a library's call takes too long.
"""

import contextlib
import os
import re
import signal
import socket
import stat
import threading
import time
from collections.abc import Callable
from types import FrameType

from grt import console
from grt.errors import ConfigError

EXIT_CODES = {signal.SIGINT: 130, signal.SIGTERM: 143}
HANGUP: signal.Signals | None = getattr(signal, "SIGHUP", None)  # Windows has none
if HANGUP is not None:
    EXIT_CODES[HANGUP] = 129
GRACE = 5.0  # seconds from a signal until the process is ended from outside of its main thread


def parse_duration(text: str) -> float:
    """Seconds of `170m`, `2h`, `90s`, `1h30m` or a plain number of seconds (ConfigError otherwise)."""
    match = re.fullmatch(r"(?:(\d+(?:\.\d+)?)h)?(?:(\d+(?:\.\d+)?)m)?(?:(\d+(?:\.\d+)?)s?)?", text.strip())
    if not text.strip() or match is None:
        raise ConfigError(f"--max-time is {text!r}: write it as 170m, 2h, 90s or 1h30m.")
    hours, minutes, seconds = (float(part or 0) for part in match.groups())
    return 3600 * hours + 60 * minutes + seconds


class Stopped(KeyboardInterrupt):
    """A signal ends the work. Of KeyboardInterrupt's kind, so that whoever cleans up after Ctrl-C does so here."""

    def __init__(self, number: signal.Signals) -> None:
        super().__init__(last_word(number))
        self.code = EXIT_CODES[number]


def last_word(number: signal.Signals) -> str:
    word = {signal.SIGINT: "interrupted", signal.SIGTERM: "terminated"}.get(number, number.name)
    return "; ".join(filter(None, (word, console.kept())))


class Signals:
    """While entered, the first of these signals raises Stopped; a second one kills as usual, or is ignored (`once`: of
    a process whose parent stops it, and ends it by SIGKILL if need be)."""

    catches = (signal.SIGINT, signal.SIGTERM)

    def __init__(self, once: bool = False, grace: float | None = None) -> None:
        self.once, self.grace = once, grace
        self.signal: signal.Signals | None = None
        self.previous: dict[signal.Signals, object] = {}
        self.backstop: Backstop | None = None

    def __enter__(self):
        if threading.current_thread() is threading.main_thread():
            under_nohup = HANGUP is not None and signal.getsignal(HANGUP) == signal.SIG_IGN
            caught = [s for s in self.catches if s != HANGUP or not under_nohup]
            self.previous = {s: signal.signal(s, self._remember) for s in caught}
            self.backstop = Backstop(self.overdue, caught, self.grace)
        return self

    def __exit__(self, *exc: object) -> None:
        if self.backstop is not None:
            self.backstop.close()
        for number, handler in self.previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        self.previous = {}

    def _remember(self, number: int, frame: FrameType | None) -> None:
        self.signal = signal.Signals(number)
        for other in self.previous:
            usual = signal.default_int_handler if other == signal.SIGINT else signal.SIG_DFL
            signal.signal(other, signal.SIG_IGN if self.once else usual)
        if number == HANGUP:
            _leave_terminal()
        self.told(self.signal)

    def told(self, number: signal.Signals) -> None:
        raise Stopped(number)

    def overdue(self, number: signal.Signals) -> str:
        """The last word of a process that is ended; what it saves is saved here."""
        return f"grt: {last_word(number)}"


class Interrupt(Signals):
    """While entered, remembers the first of these signals instead of dying of it. `save`: of a main thread that does
    not come to it in time: saves, and returns the last word; another thread calls it."""

    catches = tuple(EXIT_CODES)

    def __init__(
        self, max_seconds: float | None = None, once: bool = False,
        save: Callable[[signal.Signals], str] | None = None, grace: float | None = None,
    ) -> None:  # fmt: skip
        super().__init__(once, grace)
        self.deadline = None if max_seconds is None else time.monotonic() + max_seconds
        self.save = save

    def told(self, number: signal.Signals) -> None:
        """It is remembered."""

    def overdue(self, number: signal.Signals) -> str:
        return super().overdue(number) if self.save is None else self.save(number)

    def check(self) -> None:
        """Raises Stopped where a signal has come: for places at which nothing is half done."""
        if self.signal is not None:
            raise Stopped(self.signal)

    @property
    def out_of_time(self) -> bool:
        return self.deadline is not None and time.monotonic() >= self.deadline

    @property
    def exit_code(self) -> int | None:
        """The code to leave with, or None to go on."""
        if self.signal is not None:
            return EXIT_CODES[self.signal]
        return 0 if self.out_of_time else None


class Backstop:
    """A thread that is told of signals by the system (a handler of Python's waits for the main thread, which may be
    deep in a library), and ends the process `grace` (default GRACE) seconds after the first of `numbers`."""

    def __init__(
        self, act: Callable[[signal.Signals], str], numbers: list[signal.Signals], grace: float | None = None
    ) -> None:
        self.act, self.numbers, self.grace = act, numbers, grace
        self.reader, self.writer = socket.socketpair()
        self.writer.setblocking(False)
        self.before = signal.set_wakeup_fd(self.writer.fileno(), warn_on_full_buffer=False)
        self.over, self.leaving = threading.Event(), threading.Lock()
        self.thread = threading.Thread(target=self._wait, name="grt backstop", daemon=True)
        self.thread.start()

    def _wait(self) -> None:
        number = None
        while number is None:
            data = self.reader.recv(16)
            if not data:
                return
            number = next((s for s in self.numbers if s in data), None)
        if self.over.wait(GRACE if self.grace is None else self.grace):
            return
        with self.leaving:
            if self.over.is_set():
                return
            try:
                word = self.act(number)
            except Exception as error:  # a full disk, for one
                word = f"grt: {number.name}: nothing could be saved ({' '.join(str(error).split())})"
            _write(word)
            os._exit(EXIT_CODES[number])

    def close(self) -> None:
        with self.leaving:  # a process that is being ended stays here
            self.over.set()
        signal.set_wakeup_fd(self.before)
        self.writer.close()
        self.thread.join()
        self.reader.close()


def _write(word: str) -> None:
    """Straight to the descriptor: the stream's lock may be held by the main thread."""
    with contextlib.suppress(OSError):  # nobody reads it any more
        os.write(2, f"{word}\n".encode(errors="replace"))


def _leave_terminal() -> None:
    """Output to a terminal goes nowhere from now on: it is gone, and writing to it would fail before the run saves."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for descriptor in (1, 2):
        if stat.S_ISCHR(os.fstat(descriptor).st_mode):
            os.dup2(nowhere, descriptor)
    os.close(nowhere)
