"""metrics.jsonl, a run's log: one JSON object a line, at full precision."""

import contextlib
import json
import os
import re
import warnings
from collections.abc import Callable, Iterator
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

from grt.errors import ConfigError
from grt.runs.folder import cannot_write


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
        raise ConfigError(cannot_write(path, error, path.parent)) from None


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


def read_metrics(path: Traversable) -> list[dict[str, Any]]:
    """The rows of a metrics.jsonl, each with the fields of its kind. A crash may cut the last line short; other lines
    that are no rows are left out with a warning."""
    rows, bad = [], []
    lines = path.read_bytes().decode("utf-8", errors="replace").splitlines()
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
    """Drop what was logged after `step`, and what is no row: a resumed run writes those steps again. The validation
    of a run that stopped before its first one goes too: a run that was never stopped has none."""
    if not path.exists():
        return
    kept = [row for row in read_metrics(path) if row["step"] <= step and not row.get("early")]
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with named_errors(path):
        temporary.write_text("".join(json.dumps(row) + "\n" for row in kept), encoding="utf-8")
        os.replace(temporary, path)
