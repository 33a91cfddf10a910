"""`grt train`, and what the end of every training shows."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import tyro

from grt.cli.options import Device, parse, starting_config
from grt.config import RunConfig
from grt.presets import change


@dataclass
class Train:
    """Train a preset (grt train PRESET --out DIR) or a config (grt train --config FILE --out DIR)."""

    out: Path
    """Folder of the run."""
    run: Annotated[RunConfig, tyro.conf.arg(name="")] = field(default_factory=RunConfig)
    init_from: Annotated[str | None, tyro.conf.arg(metavar="RUN")] = None
    """A run, checkpoint or model folder whose weights to start from: short for --train.init-from."""
    device: Annotated[Device | None, tyro.conf.arg(metavar="{auto,cpu,cuda,mps}")] = None
    """Where to train: short for --train.device."""
    resume: bool = False
    """Go on from the newest sound checkpoint of the folder."""
    max_time: str = ""
    """Save and leave after this long, with exit code 0: 170m, 2h, 90s."""


def run_train(arguments: list[str]) -> int:
    base, arguments = starting_config(arguments)
    command = parse(Train, arguments, "train PRESET", Train(out=tyro.MISSING, run=base))
    given = {"init_from": command.init_from, "device": command.device}
    config = change(command.run, train={name: value for name, value in given.items() if value is not None})
    return train_and_show(config, command.out, command.resume, command.max_time)


def train_and_show(config: RunConfig, out: Path, resume: bool, max_time: str = "") -> int:
    from grt.console import working
    from grt.train.interrupt import parse_duration
    from grt.train.loop import Trainer

    seconds = parse_duration(max_time) if max_time else None
    trainer = Trainer(config, out, resume=resume)
    code = trainer.run(seconds)
    if code or trainer.state.step < config.train.steps:
        return code
    from grt.cli.report import show_run

    with working("evaluating", kept=f"the run is complete, grt eval {out} shows what it has learned"):
        show_run(out, config.train.device)
    return 0
