"""The same runs on a cluster: a Slurm array with a run a task, and what each of its tasks does."""

import math
import shlex
import time
from collections.abc import Sequence
from pathlib import Path

from grt.config import RunConfig, config_hash
from grt.errors import ConfigError
from grt.study.results import Results
from grt.study.worker import train_and_collect

SHOWN = 12  # digits of a hash, more than enough to tell runs apart


def array_script(configs: Sequence[RunConfig], results: Results, command: Sequence[str]) -> str:
    """A script for sbatch that trains what is not in `results`; `command` is the call that it stands for. ConfigError
    where nothing is missing."""
    if not configs:
        raise ConfigError(f"there are no runs at scale {results.scale}: nothing to submit.")
    missing = {config_hash(c)[:SHOWN]: c for c in configs if results.get(c) is None}
    if not missing:
        raise ConfigError("nothing is missing: all runs are in the results.")
    named = "\n".join(f"  {hash_}  # {c.name}, seed {c.train.seed}" for hash_, c in missing.items())
    return f"""#!/bin/bash
#SBATCH --job-name=grt-paper
#SBATCH --array=0-{len(missing) - 1}
#SBATCH --gpus=1
#SBATCH --requeue
#SBATCH --signal=B:TERM@120
# Submit from the folder that has the results. A task that was ended early goes on when it is submitted again.
RUNS=(
{named}
)
# exec: the signal goes to the script's own process alone (B), which is the run from here on.
exec {shlex.join(command)} --only "${{RUNS[$SLURM_ARRAY_TASK_ID]}}"
"""


def train_only(
    configs: Sequence[RunConfig], prefixes: Sequence[str], results: Results, runs: Path, max_seconds: float | None
) -> int:
    """Train those whose hash begins with one of `prefixes`, within max_seconds in all. ConfigError for a prefix of none
    or of several."""
    hashes = {config_hash(c): c for c in configs}
    chosen = []
    for prefix in prefixes:
        found = [hash_ for hash_ in hashes if hash_.startswith(prefix)]
        if len(found) != 1:
            raise ConfigError(
                f"--only {prefix!r} names {len(found)} runs: give more of the hash, as --sbatch prints it."
            )
        chosen.append(hashes[found[0]])
    results.make()
    deadline = math.inf if max_seconds is None else time.monotonic() + max_seconds
    for config in chosen:
        left = deadline - time.monotonic()
        if left > 0 and results.look_again(config) is None:
            code = train_and_collect(config, runs, results.folder, None if max_seconds is None else left)
            if code:
                return code
    return 0
