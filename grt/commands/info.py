"""`grt info`: what a model costs, trained or not."""

import json
from dataclasses import dataclass
from typing import Annotated

import tyro

from grt.options import parse


@dataclass
class Info:
    """Parameters, FLOPs and memory of a preset or a run."""

    what: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="PRESET|RUN")]
    """A preset's name, or a run's folder."""
    json: bool = False
    """Print one JSON document."""


def run_info(arguments: list[str]) -> int:
    command = parse(Info, arguments, "info")
    from grt.report import info_report, show_info

    report = info_report(command.what)
    print(json.dumps(report)) if command.json else show_info(report)
    return 0
