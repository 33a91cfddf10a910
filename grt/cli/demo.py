"""`grt demo`: one command from nothing to a trained model."""

import shutil
from dataclasses import dataclass
from pathlib import Path

from grt.cli.options import Device, parse
from grt.cli.train import train_and_show
from grt.config import config_hash, load
from grt.presets import change, preset


@dataclass
class Demo:
    """Train a small GRT on the builtin text, within five minutes on two cores, and show what it learned."""

    out: Path = Path("runs/demo")
    """Folder of the run; an earlier demo in it is replaced."""
    device: Device = "auto"
    """Where to train."""


def run_demo(arguments: list[str]) -> int:
    command = parse(Demo, arguments, "demo")
    config = change(preset("demo"), train={"device": command.device})
    existing = command.out / "config.json"
    if existing.exists() and config_hash(load(existing)) == config_hash(config):
        # Training repeats it bit for bit; what the user put beside it stays.
        shutil.rmtree(command.out / "checkpoints", ignore_errors=True)
        for name in ("config.json", "env.json", "metrics.jsonl", "curve.png", "sample.txt"):
            (command.out / name).unlink(missing_ok=True)
    return train_and_show(config, command.out, resume=False)
