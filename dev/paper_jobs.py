"""Two runs at once against one after the other: training throughput of `grt paper run` both ways.

    python dev/paper_jobs.py [STEPS [TURNS]]

Trains two seeds of grt-nano for STEPS steps with the engine itself, in a temporary folder, TURNS times in each way (the
order of the ways turns round every time), and prints one JSON line. `seconds` are those of each run's training, from
its metrics.jsonl without the first WARM steps: processes that start, validate and collect are left out. The machine
should do nothing else. Medians of throughput (tokens of both runs per second):

`at_once / one_after_the_other`: what --jobs 2 gains over --jobs 1, whose runs have all threads each.
`at_once / alone`: held to runs that have half of the threads and the machine to themselves, as if two of those did not
disturb one another; what is below 1 is lost to the neighbour.
"""

import contextlib
import json
import sys
import tempfile
from pathlib import Path
from statistics import median

from grt.config import RunConfig
from grt.experiments.recipes import nano, with_seeds
from grt.presets import change
from grt.runs.metrics import read_metrics
from grt.study.engine import Engine, cores
from grt.study.results import Results
from grt.study.worker import run_folder

SEEDS = (1, 2)
WARM = 5  # steps
# name -> jobs, threads, what two runs take together
WAYS = {
    "one_after_the_other": (1, cores(), sum),
    "at_once": (2, cores(), max),
    "alone": (1, cores() // 2, max),
}


def seconds(jobs: int, threads: int, steps: int, folder: Path) -> list[float]:
    """Of each seed's training."""
    configs = with_seeds([config(steps)], SEEDS)
    engine = Engine(configs, Results(folder / "results", "nano", SEEDS), folder / "runs", jobs, threads)
    with contextlib.redirect_stdout(sys.stderr):
        if engine.run():
            raise SystemExit("a run failed, as told above.")
    found = []
    for run in configs:
        rows = read_metrics(run_folder(folder / "runs", run) / "metrics.jsonl")
        at = {row["step"]: row["seconds"] for row in rows if row["kind"] == "train"}
        found.append(at[steps] - at[WARM])
    return found


def config(steps: int) -> RunConfig:
    return change(nano("grt"), train={"steps": steps, "eval_windows": 1, "checkpoint_every": steps})


def measure(steps: int, turns: int) -> dict:
    found: dict[str, list[list[float]]] = {way: [] for way in WAYS}
    for turn in range(turns):
        for way in list(WAYS)[:: -1 if turn % 2 else 1]:
            jobs, threads, _ = WAYS[way]
            with tempfile.TemporaryDirectory() as folder:
                found[way].append(seconds(jobs, threads, steps, Path(folder)))
    tokens = len(SEEDS) * (steps - WARM) * config(steps).train.tokens_per_step
    rates = {way: [tokens / together(both) for both in found[way]] for way, (_, _, together) in WAYS.items()}
    return {
        "cores": cores(), "steps": steps, "seconds": found, "tokens_per_s": rates,
        "ratios": {f"at_once / {way}": ratio(rates["at_once"], rates[way]) for way in WAYS if way != "at_once"},
    }  # fmt: skip


def ratio(a: list[float], b: list[float]) -> float:
    return median(x / y for x, y in zip(a, b, strict=True))


if __name__ == "__main__":
    print(json.dumps(measure(*map(int, [*sys.argv[1:], *("100", "3")[len(sys.argv) - 1 :]]))))
