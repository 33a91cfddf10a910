"""`grt calibrate`: at which threshold tokens leave."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from grt.cli.options import Device, Run, parse


@dataclass
class Calibrate:
    """Find the threshold of an exit policy on a validation text, and keep it with the run."""

    run: Run
    """A run's folder, one of its checkpoints, or a model folder."""
    exit: Annotated[str, tyro.conf.arg(metavar="POLICY")]
    """When a token leaves: state, kl, entropy, top1, q (Ouro) or fixed (grt/exits/policies.py)."""
    mean_depth: Annotated[float | None, tyro.conf.arg(metavar="FLOAT")] = None
    """The deepest threshold with a mean depth of at most this."""
    loss_increase: Annotated[float | None, tyro.conf.arg(metavar="NATS")] = None
    """Or the shallowest one that costs at most so much loss against all steps."""
    data: Annotated[str | None, tyro.conf.arg(metavar="PATH")] = None
    """Text as in grt prepare, or a prepared folder, read whole; without it, the run's own validation split."""
    windows: Annotated[int | None, tyro.conf.arg(metavar="INT")] = 64
    """Read only this many windows."""
    depth: Annotated[int | None, tyro.conf.arg(metavar="INT")] = None
    """The most steps of a token; default R."""
    batch_size: int = 16
    """Windows at a time."""
    out: Annotated[Path | None, tyro.conf.arg(metavar="FOLDER")] = None
    """Write exits.json there (a folder, made if need be), not into the run's, which is where it is looked for."""
    device: Device = "auto"
    """Where to compute."""
    json: bool = False
    """Print one JSON document."""


def run_calibrate(arguments: list[str]) -> int:
    command = parse(Calibrate, arguments, "calibrate")
    from grt.evals.calibration import calibration_report, show_calibration

    report = calibration_report(
        command.run, command.exit, mean_depth=command.mean_depth, loss_increase=command.loss_increase,
        data=command.data, limit=command.windows, batch_size=command.batch_size, steps=command.depth,
        device=command.device, out=command.out,
    )  # fmt: skip
    print(json.dumps(report)) if command.json else show_calibration(report, command.out is not None)
    return 0
