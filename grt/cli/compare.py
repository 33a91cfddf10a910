"""`grt compare`: what runs cost and reached."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from grt.cli.options import parse


@dataclass
class Compare:
    """Put runs side by side: what each cost and reached, in one table and one plot."""

    runs: Annotated[tyro.conf.Positional[list[Path]], tyro.conf.arg(metavar="RUN...")]
    """Folders of runs, or model folders."""
    x: Literal["tokens", "flops", "seconds"] = "tokens"
    """What the plot's losses are drawn over."""
    out: Path = Path("compare.png")
    """The plot: .png, .pdf or .svg."""
    json: bool = False
    """Print one JSON document."""


def run_compare(arguments: list[str]) -> int:
    command = parse(Compare, arguments, "compare")
    from grt.runs.compare import comparison_report, show_comparison

    report = comparison_report(command.runs, command.x, command.out)
    print(json.dumps(report)) if command.json else show_comparison(report)
    return 0
