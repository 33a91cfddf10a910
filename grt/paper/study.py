"""The nano study on two pages: what was run and where, what came out, which of the paper's claims it bears on."""

from collections.abc import Sequence

from grt.config import RunConfig
from grt.paper import ablation_ladder, depth_tasks, equal_flops, fixed_depth, tab_main, tab_seeds
from grt.paper.compare import HOW, NOT_RUN
from grt.paper.report import Report, Table
from grt.paper.results import Result, Results
from grt.paper.statistics import summary

FILE = "README"
OTHERS = {"equal tokens": tab_main, "seeds": tab_seeds, "ladder": ablation_ladder, "depth": fixed_depth,
          "equal FLOPs": equal_flops}  # fmt: skip


def RUNS(scale: str, seeds: Sequence[int]) -> list[RunConfig]:
    """None of its own."""
    return []


def build(results: Results) -> Report:
    rows: list[Sequence[str]] = []
    columns: Sequence[str] = ()
    for name, other in OTHERS.items():
        for table in other.build(results).tables:
            if table.name.endswith("_claims"):
                columns = table.columns
                rows += [(f"{name}: {first}", *rest) for first, *rest in table.rows]
    what = "Claims: differences of loss at full depth in nats, paired by seed. A verdict needs more than its interval."
    tables = [progress(results), losses(results), Table("study_claims", what, columns, rows), accuracies(results)]
    return Report(f"The {results.scale} study", tables, {}, notes(results))


def progress(results: Results) -> Table:
    from grt.paper.experiment import EXPERIMENTS, experiments

    rows = []
    for name in EXPERIMENTS:
        configs = [] if name == "study" else experiments(name)[0].runs(results.scale, results.seeds)
        if configs:
            done = sum(results.get(config) is not None for config in configs)
            rows.append((f"`{name}`", str(len(configs)), str(done), "" if done else NOT_RUN))
    return Table(
        "study_progress", "What belongs to it, and how much of it is done.", ("table", "runs", "done", ""), rows
    )


def losses(results: Results) -> Table:
    rows = []
    for name, config in tab_main.configs(results.scale, "isoflop").items():
        runs = list(results.by_seed(config).values())
        by_depth = [mean_at(runs, k) for k in (1, 2, 3)] if not config.model.blocks.is_dense else [""] * 3
        full = str(summary([run.loss for run in runs])) if runs else NOT_RUN
        flops = f"{summary([run.cost['training_flops'] for run in runs]).mean:.2e}" if runs else ""
        rows.append((name, config.model.layout, f"{config.optim.lr:g}", flops, *by_depth, full, str(len(runs))))
    columns = ("model", "layout", "learning rate", "training FLOPs", "depth 1", "2", "3", "full", "seeds")
    return Table("study_losses", f"Equal tokens: validation loss in nats per token. {HOW}", columns, rows)


def mean_at(runs: Sequence[Result], depth: int) -> str:
    return f"{summary([run.by_depth[depth] for run in runs]).mean:.4f}" if runs else ""


def accuracies(results: Results) -> Table:
    rows = []
    for name in depth_tasks.ROWS:
        cells = []
        for task in depth_tasks.TASKS.values():
            runs = results.by_seed(depth_tasks.config(name, task)).values()
            found = [depth_tasks.share(run, max(run.accuracy)) for run in runs]
            cells.append(f"{summary(found).mean:.3f} ({len(found)})" if found else NOT_RUN)
        rows.append((name, *cells))
    what = "Depth tasks: accuracy at full depth, mean over seeds (how many)."
    return Table("study_tasks", what, ("model", *depth_tasks.TASKS), rows)


def notes(results: Results) -> list[str]:
    config = next(iter(tab_main.configs(results.scale, "isoflop").values()))
    tokens = config.train.steps * config.train.tokens_per_step / 1e6
    machines = set()
    for run in results.runs.values():
        machines.add("{cpu}, {threads} threads, torch {torch}".format(**run.environment))
    return [
        f"Recipe: {config.train.steps:,} steps of {config.train.tokens_per_step:,} bytes of the `{config.data.path}` "
        f"corpus ({tokens:.2f} M), width {config.model.d_model}, context {config.model.context}, AdamW and cosine as "
        "in the paper; the learning rate of each method by the sweep in learning_rates.md. Losses are on the first 256 "
        "validation windows. One run is one folder in runs/, with its config, environment and metrics.",
        f"Machines: {'; '.join(sorted(machines)) or NOT_RUN}.",
        "How far it carries: a few million bytes, models below two million parameters, three seeds at most. What is "
        "undecided here is undecided, and what holds or fails here may do otherwise at ten billion tokens. The column "
        "`smallest that could show` is half the interval: a true difference below it would not have been seen.",
        f"Made by `grt paper build all --scale {results.scale}` from the runs alone; `grt paper run all --scale "
        f"{results.scale}` trains what is missing.",
    ]
