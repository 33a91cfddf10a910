"""`grt list`: what there is to train, and what was trained."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from grt.options import parse


@dataclass
class List:
    """Presets, methods, and the runs under a folder."""

    folder: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="FOLDER")] = Path("runs")
    """Where to look for runs."""


def run_list(arguments: list[str]) -> int:
    command = parse(List, arguments, "list")
    from grt.report import show_list

    show_list(command.folder)
    return 0
