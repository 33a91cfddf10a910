"""One run, from wherever it stands to its collected result; as a process, the run that its standard input names.

`grt paper work RUNS RESULTS` reads a config, one line of JSON. When its input ends, whoever started it is gone: it
saves and leaves as after SIGTERM.
"""

import json
import signal
import sys
import threading
from pathlib import Path

from grt.config import RunConfig, config_hash
from grt.fields import from_dict


def run_folder(runs: Path, config: RunConfig) -> Path:
    return runs / f"{config.name}-{config.train.seed}-{config_hash(config)[:8]}"


def train_and_collect(config: RunConfig, runs: Path, results: Path, max_seconds: float | None = None) -> int:
    """Train into `runs` (or go on there), evaluate, collect into `results`. Returns the exit code of training, 0 also
    where the time was over. Raises what Trainer raises."""
    from grt.paper.results import collect
    from grt.train.loop import Trainer

    out = run_folder(runs, config)
    trainer = Trainer(config, out, resume=(out / "config.json").exists())
    code = trainer.run(max_seconds)
    if trainer.state.step == config.train.steps:
        collect(out, results)
    return code


def _follow_parent() -> None:
    sys.stdin.read()
    signal.raise_signal(signal.SIGTERM)


def work(runs: Path, results: Path) -> int:
    config = from_dict(RunConfig, json.loads(sys.stdin.readline()))
    threading.Thread(target=_follow_parent, daemon=True).start()
    return train_and_collect(config, runs, results)
