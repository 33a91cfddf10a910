"""What a run tells: metrics.jsonl at full precision for programs, a progress bar or plain lines for people."""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

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


class MetricsLog:
    """metrics.jsonl: one JSON object a line, appended and flushed; `step` counts finished optimizer steps."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.file = path.open("a", encoding="utf-8")

    def write(self, kind: str, step: int, **values: Any) -> None:
        self.file.write(json.dumps({"kind": kind, "step": step, **values}, allow_nan=False) + "\n")
        self.file.flush()

    def close(self) -> None:
        self.file.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of a metrics.jsonl up to the first that is none of ours: a crash may cut the last line short."""
    rows = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            break
        if not isinstance(row, dict) or not {"kind", "step"} <= row.keys():
            break
        rows.append(row)
    return rows


def forget_after(path: Path, step: int) -> None:
    """Drop what was logged after `step`, and a half line: a resumed run writes those steps again."""
    if not path.exists():
        return
    kept = [row for row in read_metrics(path) if row["step"] <= step]
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
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
        self.console.print(text)

    def close(self) -> None:
        if self.progress is not None:
            self.progress.stop()
