"""Depth tasks: does recurrence compute what few layers cannot? Accuracy at every depth, nano scale only.

p-hop induction and addition (grt/data/tasks.py). Six methods of layout 1+1x6+1, dense models of as many unique blocks
(3L) and of as many block executions (8L); the methods that draw a depth also at fixed depth; GRT and the dense model of
its size also at half the learning rate. The paper's gate bias of +4: on these tasks it mattered.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from grt.config import RunConfig
from grt.data.tasks import open_task
from grt.experiments.fixed_depth import SAMPLED
from grt.experiments.recipes import METHODS, with_seeds
from grt.presets import change, preset
from grt.study.compare import NOT_RUN, SPREAD, VERDICTS, costs_table
from grt.study.report import Report, Table
from grt.study.results import Result, Results
from grt.study.statistics import below, summary

TASKS = {"p-hop, 3 hops": "task:p-hop:3", "p-hop, 4 hops": "task:p-hop:4", "addition, 2 operands": "task:addition:2"}
HARDEST = "p-hop, 4 hops"
HALF_RATE = ("dense-3L", "grt")
ROWS = ("dense", "dense-3L", *METHODS, *(f"{name}-fixed" for name in SAMPLED), *(f"{name}-half" for name in HALF_RATE))


def config(name: str, task: str) -> RunConfig:
    """Width 64, 64 tokens, 32 sequences a step in one slot, 3,000 steps."""
    base, *variants = name.split("-")
    found = change(
        preset(f"{base}-nano"),
        model={"d_model": 64, "n_heads": 4, "context": 64, "gate_bias": 4.0},
        data={"path": task},
        optim={"lr": 1e-3 if "half" in variants else 2e-3, "warmup_steps": 100},
        train={
            "steps": 3000, "tokens_per_step": 32 * 64, "batch_size": 32, "dtype": "bf16", "eval_every": 500,
            "eval_windows": 256, "checkpoint_every": 500, "keep": 1,
        },
    )  # fmt: skip
    if "3L" in variants:
        found = change(found, model={"layout": "3L"})
    if "fixed" in variants:
        found = change(found, train={"depth": "fixed"})
    return replace(found, name=f"{name}-{task.split(':', 1)[1].replace(':', '-')}")


def RUNS(scale: str, seeds: Sequence[int]) -> list[RunConfig]:
    return (
        with_seeds([config(name, task) for task in TASKS.values() for name in ROWS], seeds) if scale == "nano" else []
    )


def share(run: Result, depth: int) -> float:
    """Of the answers that are right, mean over what is counted apart (numbers of operands)."""
    shares = run.accuracy[depth]
    return sum(shares.values()) / len(shares)


def build(results: Results) -> Report:
    tables = [accuracy_table(label, task, results) for label, task in TASKS.items()]
    costs = {name: config(name, TASKS[HARDEST]) for name in ROWS}  # what a model costs is the same on every task
    tables += [
        claims(results),
        costs_table("depth_tasks_costs", f"What each costs: {HARDEST}, loss in nats.", costs, results),
    ]
    figures = {
        f"depth_tasks_{_file(task)}": partial(draw, label=label, task=task, results=results)
        for label, task in TASKS.items()
    }
    recipe = config("grt", TASKS[HARDEST])
    notes = [
        f"Width {recipe.model.d_model}, context {recipe.model.context}, {recipe.train.steps:,} steps of "
        f"{recipe.train.tokens_per_step:,} tokens, gate bias {recipe.model.gate_bias:+g}. Rows that end in -fixed were "
        "trained at full depth alone, those in -half at half the learning rate.",
        "An interval by t knows nothing of a share's bounds: over few seeds of which some learn the task and some do "
        "not, it says only that the mean is not known.",
        "p-hop: a hop goes from a place of a text of letters to the one after the latest earlier occurrence of its "
        "letter; the answer is the letter p hops on. A hop may land where it began, so that fewer hops are often "
        "enough and printing the letter itself is right more often than one time in four. Addition counts exact sums, "
        "mean over the numbers of operands.",
        "One learning rate for all rows, 2e-3, chosen because with 4 hops GRT was ahead at it of itself at 1e-3 after "
        "1,000 steps; rows that end in -half have 1e-3.",
    ]
    return Report("Depth tasks", tables, figures, notes)


def copied(task: str) -> float:
    """Of the answers of p-hop, how many an output equal to the input gets right."""
    run = config("grt", task)
    split = open_task(task, "bytes").splits["val"]
    right = []
    for ids, targets in (split.window(i, run.model.context) for i in range(run.train.eval_windows)):
        right += [ids[span.start] == targets[span.start] for span in split.spans(ids)]
    return sum(right) / len(right)


def accuracy_table(label: str, task: str, results: Results) -> Table:
    depths = range(7)
    body: list[Sequence[str]] = []
    if "p-hop" in task:
        body.append(["the letter itself", *[""] * len(depths), f"{copied(task):.3f}", "", "", ""])
    for name in ROWS:
        runs = list(results.by_seed(config(name, task)).values())
        if not runs:
            body.append([name, *[""] * len(depths), NOT_RUN, "", "", "0"])
            continue
        full = max(runs[0].accuracy)
        cells = [f"{summary([share(run, k) for run in runs]).mean:.3f}" if full else "" for k in depths]
        whole = summary([share(run, full) for run in runs])
        spread = "" if whole.half is None else f" ± {whole.half:.3f}"
        ends = (f"{end(share(run, full) for run in runs):.3f}" for end in (min, max))
        body.append([name, *cells, f"{whole.mean:.3f}{spread}", *ends, str(len(runs))])
    columns = ["model", *(f"depth {k}" for k in depths), "full", "lowest", "highest", "seeds"]
    caption = f"Accuracy, {label}: means over seeds. {SPREAD} Lowest and highest: of a seed."
    return Table(f"depth_tasks_{_file(task)}", caption, columns, body)


def _file(task: str) -> str:
    return task.split(":", 1)[1].replace(":", "_").replace("-", "_")


def claims(results: Results) -> Table:
    """Is GRT's error at full depth below another row's? Paired by seed."""
    body = []
    for label, task in TASKS.items():
        errors = {
            name: {seed: 1 - share(run, max(run.accuracy)) for seed, run in results.by_seed(config(name, task)).items()}
            for name in ROWS
        }
        for other in ROWS:
            if other != "grt":
                found = below(errors["grt"], errors[other])
                difference = found.difference
                body.append(
                    [
                        f"{label}: grt - {other}",
                        NOT_RUN if difference is None else f"{-difference.mean:+.3f}",
                        "" if difference is None or difference.half is None else f"{difference.half:.3f}",
                        str(difference.n if difference else 0),
                        {"holds": "grt better", "fails": "grt worse"}.get(found.verdict, found.verdict),
                    ]
                )
    columns = ("accuracy", "difference", "smallest that could show", "seeds", "verdict")
    caption = f"Accuracy at full depth, paired by seed. {VERDICTS}"
    return Table("depth_tasks_claims", caption, columns, body)


STYLES = {"fixed": "--", "half": ":"}


def draw(axes: Any, label: str, task: str, results: Results) -> None:
    """Mean accuracy over depth; dense models, which have one depth, as lines across. A dot: a seed at full depth."""
    models = list(dict.fromkeys(_base(name) for name in ROWS))
    for name in ROWS:
        runs = list(results.by_seed(config(name, task)).values())
        if not runs:
            continue
        style = {
            "color": f"C{models.index(_base(name))}",
            "ls": STYLES.get(name.rpartition("-")[2], "-"),
            "label": name,
        }
        depths = sorted(runs[0].accuracy)
        means = [summary([share(run, k) for run in runs]).mean for k in depths]
        if len(depths) == 1:
            axes.axhline(means[0], lw=1, **style)
        else:
            axes.plot(depths, means, **style)
            full = depths[-1]
            axes.plot([full] * len(runs), [share(run, full) for run in runs], ".", ms=4, color=style["color"])
    axes.set_xlabel("depth")
    axes.set_ylabel(f"accuracy, {label}")
    axes.grid(alpha=0.3)
    if axes.has_data():
        axes.legend(fontsize=7)


def _base(name: str) -> str:
    """The model of a row, without what it was trained with."""
    return name.removesuffix("-fixed").removesuffix("-half")
