"""Two runs at once against one after the other: training tokens per second of `grt paper run` both ways.

    python dev/paper_jobs.py [STEPS [TURNS]]

Trains two seeds of grt-nano for STEPS steps with the engine itself, in a temporary folder, TURNS times in each way (the
order of the ways turns round every time), and prints one JSON line. Tokens per second are those of both runs together,
from the `seconds` of their metrics.jsonl without the first WARM steps: of both added up where they follow one another,
of the slower one where they are at once. Processes that start, validate and collect are left out. The machine should do
nothing else.

`at_once / one_after_the_other` is what --jobs 2 gains over --jobs 1, whose runs have all threads each.
`at_once / twice_on_half` holds it to a run that has its half of the threads and the machine to itself: what is below 1
is lost to the neighbour.
"""

import contextlib
import json
import sys
import tempfile
from pathlib import Path
from statistics import median

from grt.paper.engine import Engine, cores
from grt.paper.recipes import nano, with_seeds
from grt.paper.results import Results
from grt.paper.worker import run_folder
from grt.presets import change
from grt.train.log import read_metrics

SEEDS = (1, 2)
WARM = 5  # steps
WAYS = {"one_after_the_other": (1, cores()), "at_once": (2, cores()), "on_half": (1, cores() // 2)}  # jobs, threads


def tokens_per_s(jobs: int, threads: int, steps: int, folder: Path) -> float:
    config = change(nano("grt"), train={"steps": steps, "eval_windows": 1, "checkpoint_every": steps})
    configs = with_seeds([config], SEEDS)
    engine = Engine(configs, Results(folder / "results", "nano", SEEDS), folder / "runs", jobs, threads)
    with contextlib.redirect_stdout(sys.stderr):
        if engine.run():
            raise SystemExit("a run failed, as told above.")
    seconds = []
    for config in configs:
        rows = read_metrics(run_folder(folder / "runs", config) / "metrics.jsonl")
        at = {row["step"]: row["seconds"] for row in rows if row["kind"] == "train"}
        seconds.append(at[steps] - at[WARM])
    tokens = len(SEEDS) * (steps - WARM) * config.train.tokens_per_step
    return tokens / (sum(seconds) if jobs == 1 else max(seconds))


def measure(steps: int, turns: int) -> dict:
    found: dict[str, list[float]] = {way: [] for way in WAYS}
    for turn in range(turns):
        for way in list(WAYS)[:: -1 if turn % 2 else 1]:
            with tempfile.TemporaryDirectory() as folder:
                found[way].append(tokens_per_s(*WAYS[way], steps, Path(folder)))
    ways = zip(*found.values(), strict=True)
    ratios = [(at_once / after, at_once / (2 * half)) for after, at_once, half in ways]
    over_after, over_half = (median(ratio) for ratio in zip(*ratios, strict=True))
    return {
        "cores": cores(), "steps": steps, "tokens_per_s": found,
        "ratios": {"at_once / one_after_the_other": over_after, "at_once / twice_on_half": over_half},
    }  # fmt: skip


if __name__ == "__main__":
    print(json.dumps(measure(*map(int, [*sys.argv[1:], *("100", "3")[len(sys.argv) - 1 :]]))))
