"""`grt paper`: the paper's comparisons, or one's own sweep: run what is missing, build the tables."""

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from grt.cli.options import parse
from grt.config import RunConfig
from grt.errors import ConfigError
from grt.schema import at_least

if TYPE_CHECKING:
    from grt.study.experiment import Experiment
    from grt.study.results import Results

Name = Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="NAME|all|FILE.py", help_behavior_hint="")]
SCALES = ("nano", "small", "medium", "large")
SEEDS = "1337,42,123"


@dataclass
class Run:
    """Train what a table or figure needs and is not there yet; what was interrupted goes on."""

    name: Name = ""
    """An experiment, all of them, or a Python file with RUNS(scale, seeds)."""
    scale: str = "nano"
    """nano, small, medium or large."""
    seeds: str = SEEDS
    """Seeds, with commas between them."""
    jobs: int = 1
    """Runs at a time; they divide the threads among them."""
    threads: int = 0
    """CPU threads of all runs together; 0: as many as there are cores (with --only: as each run's config says)."""
    max_time: str = ""
    """Save and leave after this long, with exit code 0: 170m, 2h, 90s."""
    only: Annotated[list[str], tyro.conf.arg(help_behavior_hint="")] = field(default_factory=list)
    """Train those alone whose hash begins so, one after the other, in this process (for a job of a cluster)."""
    sbatch: bool = False
    """Print a Slurm array of what is missing, and run nothing."""
    runs: Path = Path("runs/paper")
    """Where runs are trained."""
    results: Path = Path("results")
    """Where finished runs are collected."""


@dataclass
class Build:
    """Build tables and figures from collected results alone."""

    name: Name = ""
    """An experiment, all of them, or a Python file with RUNS(scale, seeds)."""
    scale: str = "nano"
    """nano, small, medium or large."""
    seeds: str = SEEDS
    """Seeds, with commas between them."""
    results: Path = Path("results")
    """Where finished runs were collected; tables go beside them."""


@dataclass
class Pack(Build):
    """Move the collected runs of an experiment into one archive, NAME.zip, from where tables read them as well."""


@dataclass
class List:
    """What there is to run and build, and how much of it is done."""

    scale: str = "nano"
    """nano, small, medium or large."""
    seeds: str = SEEDS
    """Seeds, with commas between them."""
    results: Path = Path("results")
    """Where finished runs were collected."""


def checked(scale: str, seeds: str) -> list[int]:
    if scale not in SCALES:
        raise ConfigError(f"--scale is {scale!r}: choose one of {', '.join(SCALES)}.")
    try:
        found = [int(seed) for seed in seeds.split(",")]
    except ValueError:
        raise ConfigError(f"--seeds is {seeds!r}: write whole numbers with commas, as in {SEEDS}.") from None
    if not all(0 <= seed < 1 << 63 for seed in found):
        raise ConfigError(f"--seeds is {seeds!r}: a seed is a whole number from 0 to 2^63 - 1.")
    if len(set(found)) < len(found):
        raise ConfigError(f"--seeds is {seeds!r}: name each seed once.")
    return found


def run_run(arguments: list[str]) -> int:
    command = parse(Run, arguments, "paper run")
    seeds = checked(command.scale, command.seeds)
    at_least("--jobs", command.jobs, 1)
    at_least("--threads", command.threads, 0)
    if command.sbatch and command.only:
        raise ConfigError("--sbatch prints an array of all that is missing: leave --only out, or --sbatch.")
    if sum(argument.partition("=")[0] == "--only" for argument in arguments) > 1:
        raise ConfigError("--only is given more than once: give it once, with all hashes after it.")
    from grt.presets import change
    from grt.study.engine import Engine, cores
    from grt.study.experiment import experiments
    from grt.study.results import Results
    from grt.study.slurm import array_script, train_only
    from grt.train.interrupt import parse_duration

    seconds = parse_duration(command.max_time) if command.max_time else None
    results = Results(command.results, command.scale, seeds)
    configs = [
        c for experiment in experiments(command.name) for c in trainable(experiment, results, command.name == "all")
    ]
    runs = command.runs / command.scale
    if command.sbatch:
        print(array_script(configs, results, ["grt", "paper", "run", *without(arguments, "--sbatch")]), end="")
        return 0
    if command.only:
        if command.threads:
            configs = [change(config, train={"threads": command.threads}) for config in configs]
        return train_only(configs, command.only, results, runs, seconds)
    if not configs:
        print(f"{command.name} has no runs at scale {command.scale}: nothing to train.")
        return 0
    if all(results.get(config) for config in configs):
        print(f"All {len(configs)} runs of {command.name} are done: nothing to train.")
        return 0
    return Engine(configs, results, runs, command.jobs, command.threads or cores()).run(seconds)


def trainable(experiment: "Experiment", results: "Results", one_of_all: bool) -> list[RunConfig]:
    """Its runs. Where what they read is not there: ConfigError, or, of one of all, none and a line that says so."""
    configs = experiment.runs(results.scale, results.seeds)
    if not experiment.needs or Path(experiment.needs).exists() or all(results.get(config) for config in configs):
        return configs
    why = f"{experiment.needs} does not exist: put the text of {experiment.name} there"
    if not one_of_all:
        raise ConfigError(f"{why}.")
    print(f"warning: {why}; its runs are left out.", file=sys.stderr)
    return []


def without(arguments: list[str], flag: str) -> list[str]:
    return [argument for argument in arguments if argument != flag]


def run_build(arguments: list[str]) -> int:
    command = parse(Build, arguments, "paper build")
    seeds = checked(command.scale, command.seeds)
    from grt.study.experiment import experiments
    from grt.study.results import Results

    results = Results(command.results, command.scale, seeds)
    for experiment in experiments(command.name):
        for path in experiment.build(results).write(results.folder, experiment.file):
            print(path)
    return 0


def run_pack(arguments: list[str]) -> int:
    command = parse(Pack, arguments, "paper pack")
    seeds = checked(command.scale, command.seeds)
    from grt.study.experiment import experiments
    from grt.study.results import Results

    results = Results(command.results, command.scale, seeds)
    for experiment in experiments(command.name):
        count = results.pack(experiment.name, experiment.runs(command.scale, seeds))
        print(f"{experiment.name}: {count} runs packed")
    return 0


def run_list(arguments: list[str]) -> int:
    command = parse(List, arguments, "paper list")
    seeds = checked(command.scale, command.seeds)
    from rich.table import Table

    from grt.console import Output
    from grt.study.experiment import EXPERIMENTS, experiments
    from grt.study.results import Results

    results, table = Results(command.results, command.scale, seeds), Table()
    for column in ("name", "runs", "done", "what"):
        table.add_column(column, justify="right" if column in ("runs", "done") else "left")
    for name, what in EXPERIMENTS.items():
        configs = experiments(name)[0].runs(command.scale, seeds)
        done = sum(results.get(config) is not None for config in configs)
        table.add_row(name, *((str(len(configs)), str(done)) if configs else ("", "")), what)
    Output().print(table)
    return 0


def run_work(arguments: list[str]) -> int:
    """What `run` starts its runs with."""
    if len(arguments) != 2:
        raise ConfigError("grt paper work is what grt paper run starts: call grt paper run.")
    from grt.study.worker import work

    runs, results = map(Path, arguments)
    return work(runs, results)


ACTIONS: dict[str, tuple[Callable[[list[str]], int], str]] = {
    "list": (run_list, "experiments, and how many of their runs are done"),
    "run": (run_run, "train what is missing"),
    "build": (run_build, "tables and figures from what is there"),
    "pack": (run_pack, "one archive of an experiment's finished runs, to be committed"),
}


def run_paper(arguments: list[str]) -> int:
    name, *rest = arguments or [""]
    if name in ("-h", "--help"):
        lines = "\n".join(f"  {action:<6} {what}" for action, (_, what) in ACTIONS.items())
        print(f"usage: grt paper WHAT ...\n\n{lines}\n\n`grt paper WHAT --help` shows its options.")
        return 0
    if name == "work":
        return run_work(rest)
    if name not in ACTIONS:
        given = f"{name!r} is nothing that grt paper does" if name else "say what to do with the paper's tables"
        raise ConfigError(f"{given}: choose one of {', '.join(ACTIONS)}.")
    return ACTIONS[name][0](rest)
