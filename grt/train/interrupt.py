"""Leaving early, in good order: Ctrl-C, SIGTERM, SIGHUP (a closed window) and a time limit end the run after the step
in progress."""

import os
import re
import signal
import stat
import threading
import time
from types import FrameType

from grt.errors import ConfigError

EXIT_CODES = {signal.SIGINT: 130, signal.SIGTERM: 143}
HANGUP: signal.Signals | None = getattr(signal, "SIGHUP", None)  # Windows has none
if HANGUP is not None:
    EXIT_CODES[HANGUP] = 129


def parse_duration(text: str) -> float:
    """Seconds of `170m`, `2h`, `90s`, `1h30m` or a plain number of seconds (ConfigError otherwise)."""
    match = re.fullmatch(r"(?:(\d+(?:\.\d+)?)h)?(?:(\d+(?:\.\d+)?)m)?(?:(\d+(?:\.\d+)?)s?)?", text.strip())
    if not text.strip() or match is None:
        raise ConfigError(f"--max-time is {text!r}: write it as 170m, 2h, 90s or 1h30m.")
    hours, minutes, seconds = (float(part or 0) for part in match.groups())
    return 3600 * hours + 60 * minutes + seconds


class Interrupt:
    """While entered, remembers the first of these signals instead of dying of it; a second one kills as usual, or is
    ignored too (`once`: of a process whose parent stops it, and ends it by SIGKILL if need be)."""

    def __init__(self, max_seconds: float | None = None, once: bool = False) -> None:
        self.once = once
        self.signal: signal.Signals | None = None
        self.deadline = None if max_seconds is None else time.monotonic() + max_seconds
        self.previous: dict[signal.Signals, object] = {}

    def __enter__(self) -> "Interrupt":
        if threading.current_thread() is threading.main_thread():
            under_nohup = HANGUP is not None and signal.getsignal(HANGUP) == signal.SIG_IGN
            caught = [s for s in EXIT_CODES if s != HANGUP or not under_nohup]
            self.previous = {s: signal.signal(s, self._remember) for s in caught}
        return self

    def __exit__(self, *exc: object) -> None:
        self._restore()

    def _remember(self, number: int, frame: FrameType | None) -> None:
        self.signal = signal.Signals(number)
        if self.once:
            for other in self.previous:
                signal.signal(other, signal.SIG_IGN)
        else:
            self._restore()
        if number == HANGUP:
            _leave_terminal()

    def _restore(self) -> None:
        for number, handler in self.previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        self.previous = {}

    @property
    def out_of_time(self) -> bool:
        return self.deadline is not None and time.monotonic() >= self.deadline

    @property
    def exit_code(self) -> int | None:
        """The code to leave with, or None to go on."""
        if self.signal is not None:
            return EXIT_CODES[self.signal]
        return 0 if self.out_of_time else None


def _leave_terminal() -> None:
    """Output to a terminal goes nowhere from now on: it is gone, and writing to it would fail before the run saves."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for descriptor in (1, 2):
        if stat.S_ISCHR(os.fstat(descriptor).st_mode):
            os.dup2(nowhere, descriptor)
    os.close(nowhere)
