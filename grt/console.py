"""What people read while a command runs: text, and a progress bar or plain lines."""

import contextlib
import errno
import os
import sys
import time
from collections.abc import Iterator

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


class Output(Console):
    """Standard output for people: text as it is (a `[` or `:x:` in a path is no markup), tables as wide as
    their content when piped, and silence once the reader has left (`| head`): a training run goes on."""

    def __init__(self) -> None:
        super().__init__(highlight=False, soft_wrap=True, markup=False, emoji=False)
        if not self.is_terminal:
            self.width = 10_000

    def on_broken_pipe(self) -> None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class Display:
    """A rich progress bar where there is a terminal, else one plain line now and then."""

    def __init__(self, steps: int, done: int, seconds_between_lines: float = 15.0) -> None:
        self.console = Output()
        self.steps, self.pause = steps, seconds_between_lines
        self.started, self.start_step, self.last_line = time.monotonic(), done, time.monotonic()
        self.progress: Progress | None = None
        if self.console.is_terminal:
            columns = (
                TextColumn("step"), MofNCompleteColumn(), BarColumn(bar_width=20),
                TextColumn("{task.fields[status]}"), TextColumn("left"), TimeRemainingColumn(),
            )  # fmt: skip
            self.progress = Progress(*columns, console=self.console)
            self.task = self.progress.add_task("train", total=steps, completed=done, status="")
            self.progress.start()

    def update(self, step: int, loss: float, tokens_per_s: float, mfu: float) -> None:
        status = f"loss {loss:.4f}  {tokens_per_s:,.0f} tokens/s  MFU {mfu:.1%}"
        if self.progress is not None:
            self.progress.update(self.task, completed=step, status=status)
        elif time.monotonic() - self.last_line >= self.pause or step == self.steps:
            self.last_line = time.monotonic()
            per_step = (self.last_line - self.started) / max(1, step - self.start_step)
            self.say(f"step {step}/{self.steps}  {status}  left {per_step * (self.steps - step):.0f} s")

    def say(self, text: str) -> None:
        with self._maybe_gone():
            self.console.print(text)

    def close(self) -> None:
        if self.progress is not None:
            with self._maybe_gone():
                self.progress.stop()

    @contextlib.contextmanager
    def _maybe_gone(self) -> Iterator[None]:
        """A terminal whose window was closed refuses what is written, and the run has yet to save."""
        try:
            yield
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            self.console.on_broken_pipe()
