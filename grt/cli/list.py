"""`grt list`: what there is to train, and what was trained."""

from dataclasses import dataclass
from typing import Annotated

import tyro

from grt.cli.options import parse


@dataclass
class List:
    """Presets, methods, and the runs under a folder."""

    what: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="FOLDER|PART")] = "runs"
    """Where to look for runs; or, if there is no such folder, part of the names of presets to show alone."""


def run_list(arguments: list[str]) -> int:
    command = parse(List, arguments, "list")
    from grt.cli.report import show_list

    show_list(command.what)
    return 0
