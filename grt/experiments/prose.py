"""The six models once more on prose, one seed: does the order of tab:main depend on the text?

The text is the user's: a folder `data/prose` where `grt paper run` is called. The committed runs read 61 MB of fiction,
non-fiction and textbooks; each run's env.json has the sha256.
"""

from collections.abc import Sequence
from dataclasses import replace

from grt.config import RunConfig
from grt.experiments.recipes import METHODS, row, with_seeds
from grt.presets import change
from grt.study.compare import costs_table, idle_notes
from grt.study.report import Report
from grt.study.results import Results
from grt.study.statistics import summary

PROSE = "data/prose"
NEEDS = PROSE


def configs(scale: str) -> dict[str, RunConfig]:
    """Row -> config; nano scale only."""
    if scale != "nano":
        return {}
    rows = {name: row(name, scale) for name in ("dense", "dense-3L", *METHODS)}
    return {n: replace(change(c, data={"path": PROSE}), name=f"{n}-prose") for n, c in rows.items()}


def RUNS(scale: str, seeds: Sequence[int]) -> list[RunConfig]:
    return with_seeds(list(configs(scale).values()), seeds[:1])


def build(results: Results) -> Report:
    caption = f"On prose instead of code, one seed: loss at full depth in nats per byte, {results.scale} scale."
    rows = configs(results.scale)
    tables = [costs_table("prose", caption, rows, results)]
    hashes = {run.evaluation["data"]["sha256"] for c in rows.values() for run in results.by_seed(c).values()}
    notes = [
        f"The text is the folder {PROSE} where `grt paper run` is called, here English fiction, non-fiction and "
        "textbooks. A run's hash knows that path and not what is in it: other text there makes another study.",
        *order(rows, results),
        *idle_notes(rows, results),
        f"sha256 of the validation tokens: {', '.join(sorted(hashes)) or 'not run'}.",
    ]
    return Report(f"Prose at {results.scale} scale", tables, {}, notes)


def order(rows: dict[str, RunConfig], results: Results) -> list[str]:
    """Whether the rows come in the order of tab:main, whose losses are means over seeds of code."""
    here = {name: summary(list(found.values())).mean for name, c in rows.items() if (found := results.losses(c))}
    there = {
        name: summary(list(found.values())).mean for name in rows if (found := results.losses(row(name, results.scale)))
    }
    if not rows or not here.keys() == there.keys() == rows.keys():
        return []
    best, other = (sorted(losses, key=lambda name: losses[name]) for losses in (here, there))
    same = "the same" if best == other else "another"
    return [
        f"From the smallest loss: {', '.join(best)}. On code it is {same} order: {', '.join(other)}. One seed each "
        "here."
    ]
