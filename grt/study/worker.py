"""One run, from wherever it stands to its collected result; as a process, the run that its standard input names.

`grt paper work RUNS RESULTS` reads a config, one line of JSON. When its input ends, whoever started it is gone: it
saves and leaves as after SIGTERM. It leaves with HELD where another process has begun the same run.
"""

import json
import signal
import sys
import threading
from pathlib import Path

from grt.config import RunConfig, config_hash
from grt.errors import ConfigError
from grt.schema import from_dict

HELD = 75  # exit code, EX_TEMPFAIL of sysexits.h


def run_folder(runs: Path, config: RunConfig) -> Path:
    return runs / f"{config.name}-{config.train.seed}-{config_hash(config)[:8]}"


def train_and_collect(
    config: RunConfig, runs: Path, results: Path, max_seconds: float | None = None, once: bool = False
) -> int:
    """Train into `runs` (or go on there), evaluate, collect into `results`. Returns the exit code of training, 0 also
    where the time was over. `once`: as of Interrupt. Raises what Trainer raises."""
    from grt.runs.folder import FolderLock, HeldError
    from grt.study.results import collect
    from grt.train.loop import Trainer

    out = run_folder(runs, config)
    begun = (out / "config.json").exists()
    try:
        trainer = Trainer(config, out, resume=begun)
        code = trainer.run(max_seconds, once)
        if not code and trainer.state.step == config.train.steps:
            lock = FolderLock(out)  # until the result is there, for whoever waits to train the run
            try:
                collect(out, results, config)
            finally:
                lock.release()
        return code
    except HeldError:
        raise
    except ConfigError as error:  # it names remedies of `grt train`; this one is always there
        raise ConfigError(f"{error} Or remove {out} and call grt paper run again.") if begun else error from None


def _follow_parent() -> None:
    sys.stdin.read()
    signal.raise_signal(signal.SIGTERM)


def work(runs: Path, results: Path) -> int:
    from grt.runs.folder import HeldError

    config = from_dict(RunConfig, json.loads(sys.stdin.readline()))
    threading.Thread(target=_follow_parent, daemon=True).start()
    try:
        return train_and_collect(config, runs, results, once=True)
    except HeldError:
        return HELD
