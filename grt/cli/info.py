"""`grt info`: what a model costs, trained or not."""

import json
from dataclasses import dataclass
from typing import Annotated

import tyro

from grt.cli.options import parse
from grt.errors import ConfigError


@dataclass
class Info:
    """Parameters, FLOPs and memory of a preset or a run."""

    what: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="PRESET|RUN")] = ""
    """A preset's name, or a run's folder."""
    table1: bool = False
    """The paper's Table 1 instead: its sizes and FLOPs beside ours."""
    json: bool = False
    """Print one JSON document."""


def run_info(arguments: list[str]) -> int:
    command = parse(Info, arguments, "info")
    if bool(command.what) == command.table1:
        raise ConfigError("name a preset or a run's folder, or ask for --table1 alone.")
    if command.table1:
        from grt.experiments.sizes import show_table1, table1

        report, show = table1(), show_table1
    else:
        from grt.cli.report import info_report, show_info

        report, show = info_report(command.what), show_info
    print(json.dumps(report)) if command.json else show(report)
    return 0
