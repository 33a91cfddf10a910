"""Command-line options from dataclasses (tyro), with its errors cut down to one sentence."""

import contextlib
import io
import re
from typing import Any, TypeVar

import tyro

from grt.config import ConfigError

T = TypeVar("T")


def parse(command: type[T], arguments: list[str], name: str, default: Any = None) -> T:
    """Fill a command's dataclass from the command line; tyro's boxed errors become one sentence."""
    told = io.StringIO()
    try:
        with contextlib.redirect_stderr(told):
            return tyro.cli(command, args=arguments, prog=f"grt {name}", default=default)
    except SystemExit as stop:
        if not stop.code:
            raise
        raise ConfigError(one_sentence(told.getvalue())) from None


def one_sentence(box: str) -> str:
    """The message of one of tyro's error boxes, and the option it suggests."""
    lines = [line.strip("│╭╮╰╯ ") for line in box.splitlines()[1:-1]]
    parts = " ".join("\n" if not line.strip("─") else line for line in lines).split("\n")
    message = re.sub(r"^Error parsing [\w.]+: ", "", parts[0].strip().rstrip("."))
    if "Perhaps you meant" in box and (suggested := re.search(r"(--[\w.-]+)", parts[1])):
        message += f"; did you mean {suggested[1]}?"
    return message if message.endswith("?") else message + "."
