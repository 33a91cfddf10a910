"""What a run tells: metrics.jsonl at full precision for programs, a progress bar or plain lines for people."""

import contextlib
import errno
import json
import os
import re
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from grt.config import ConfigError


class Output(Console):
    """Standard output for people: text as it is (a `[` or `:x:` in a path is no markup), tables as wide as
    their content when piped, and silence once the reader has left (`| head`): a training run goes on."""

    def __init__(self) -> None:
        super().__init__(highlight=False, soft_wrap=True, markup=False, emoji=False)
        if not self.is_terminal:
            self.width = 10_000

    def on_broken_pipe(self) -> None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class MetricsLog:
    """metrics.jsonl: one JSON object a line, appended and flushed; `step` counts finished optimizer steps."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.file = path.open("a", encoding="utf-8")

    def write(self, kind: str, step: int, **values: Any) -> None:
        with named_errors(self.path):
            self.file.write(json.dumps({"kind": kind, "step": step, **values}, allow_nan=False) + "\n")
            self.file.flush()

    def close(self) -> None:
        with contextlib.suppress(OSError):  # a full disk, which was told already
            self.file.close()


@contextlib.contextmanager
def named_errors(path: Path) -> Iterator[None]:
    """A full disk's error does not say which file."""
    try:
        yield
    except OSError as error:
        why = f"{path} cannot be written ({error.strerror})"
        raise ConfigError(f"{why}: make room and go on with --resume, earlier checkpoints are whole.") from None


def _number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) < 1e300


def _count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 62


def _depths(value: Any) -> bool:
    return isinstance(value, list) and all(map(_count, value))


def _losses(value: Any) -> bool:
    return isinstance(value, dict) and all(re.fullmatch("[0-9]{1,9}", k) and _number(v) for k, v in value.items())


# kind -> what its readers (curve, comparison, list) take from a row, and the check of each value
ROWS: dict[str, dict[str, Callable[[Any], bool]]] = {
    "train": {"tokens": _count, "loss_lm": _number, "seconds": _number, "depth": _depths},
    "eval": {"loss": _number, "bits_per_byte": _number, "loss_by_depth": _losses},
    "monitor": {},
    "event": {"event": lambda value: isinstance(value, str)},
}


def _is_row(row: Any) -> bool:
    if not isinstance(row, dict) or not isinstance(row.get("kind"), str) or row["kind"] not in ROWS:
        return False
    first = 1 if row["kind"] == "train" else 0
    if not _count(row.get("step")) or row["step"] < first:
        return False
    return all(check(row.get(name)) for name, check in ROWS[row["kind"]].items())


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The rows of a metrics.jsonl, each with the fields of its kind. A crash may cut the last line short; other lines
    that are no rows are left out with a warning."""
    rows, bad = [], []
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            if number < len(lines):
                bad.append(number)
            continue
        if _is_row(row):
            rows.append(row)
        else:
            bad.append(number)
    if bad:
        named = f"line {bad[0]}" + (f" and {len(bad) - 1} more" if len(bad) > 1 else "")
        warnings.warn(f"{path}: {named} cannot be read as a row of a run's log and is left out", stacklevel=2)
    return rows


def forget_after(path: Path, step: int) -> None:
    """Drop what was logged after `step`, and what is no row: a resumed run writes those steps again."""
    if not path.exists():
        return
    kept = [row for row in read_metrics(path) if row["step"] <= step]
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with named_errors(path):
        temporary.write_text("".join(json.dumps(row) + "\n" for row in kept), encoding="utf-8")
        os.replace(temporary, path)


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
