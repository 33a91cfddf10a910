"""Leaving early, in good order: Ctrl-C, SIGTERM and a time limit end the run after the step in progress."""

import re
import signal
import threading
import time
from types import FrameType

from grt.config import ConfigError

EXIT_CODES = {signal.SIGINT: 130, signal.SIGTERM: 143}


def parse_duration(text: str) -> float:
    """Seconds of `170m`, `2h`, `90s`, `1h30m` or a plain number of seconds (ConfigError otherwise)."""
    match = re.fullmatch(r"(?:(\d+(?:\.\d+)?)h)?(?:(\d+(?:\.\d+)?)m)?(?:(\d+(?:\.\d+)?)s?)?", text.strip())
    if not text.strip() or match is None:
        raise ConfigError(f"--max-time is {text!r}: write it as 170m, 2h, 90s or 1h30m.")
    hours, minutes, seconds = (float(part or 0) for part in match.groups())
    return 3600 * hours + 60 * minutes + seconds


class Interrupt:
    """While entered, remembers the first SIGINT or SIGTERM instead of dying of it; a second one kills as usual."""

    def __init__(self, max_seconds: float | None = None) -> None:
        self.signal: signal.Signals | None = None
        self.deadline = None if max_seconds is None else time.monotonic() + max_seconds
        self.previous: dict[signal.Signals, object] = {}

    def __enter__(self) -> "Interrupt":
        if threading.current_thread() is threading.main_thread():
            self.previous = {s: signal.signal(s, self._remember) for s in EXIT_CODES}
        return self

    def __exit__(self, *exc: object) -> None:
        self._restore()

    def _remember(self, number: int, frame: FrameType | None) -> None:
        self.signal = signal.Signals(number)
        self._restore()

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
