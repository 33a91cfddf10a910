"""The nano study on two pages: what was run and where, what came out, which of the paper's claims it bears on."""

from collections.abc import Sequence

from grt.config import RunConfig, config_hash
from grt.paper import ablation_ladder, depth_tasks, equal_flops, fixed_depth, learning_rates, tab_main, tab_seeds
from grt.paper.compare import NOT_RUN, SPREAD, VERDICTS
from grt.paper.report import Report, Table
from grt.paper.results import WINDOWS, Result, Results
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
    what = f"Claims: differences of loss at full depth in nats, paired by seed. {VERDICTS}"
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
    caption = f"Equal tokens, not equal FLOPs: validation loss in nats per token. {SPREAD}"
    return Table("study_losses", caption, columns, rows)


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
    what = (
        "Depth tasks: accuracy at full depth, mean over seeds (how many). -fixed: trained at full depth alone; -half: "
        "at half the learning rate."
    )
    return Table("study_tasks", what, ("model", *depth_tasks.TASKS), rows)


def notes(results: Results) -> list[str]:
    config = next(iter(tab_main.configs(results.scale, "isoflop").values()))
    tokens = f"{config.train.steps * config.train.tokens_per_step / 1e6:,.2f} M"
    machines = {"{cpu}, {threads} threads, torch {torch}".format(**run.environment) for run in results.runs.values()}
    return [
        f"Recipe: {config.train.steps:,} steps of {config.train.tokens_per_step:,} tokens ({config.data.tokenizer}) of "
        f"`{config.data.path}` ({tokens}), width {config.model.d_model}, context {config.model.context}, AdamW and "
        f"cosine as in the paper. {rates(results)} Losses are on the first {WINDOWS} validation windows. One run is "
        "one folder in runs/, with its config, environment and metrics.",
        f"Machines: {'; '.join(sorted(machines)) or NOT_RUN}.",
        f"How far it carries: {tokens} tokens a run and {len(results.seeds)} seeds at most, where the paper trains on "
        "ten billion. What is undecided here is undecided, and what holds or fails here may do otherwise there. The "
        "column `smallest that could show` is half the interval: a true difference below it would usually not be seen.",
        f"Made by `grt paper build all --scale {results.scale}` from the runs alone; `grt paper run all --scale "
        f"{results.scale}` trains what is missing.",
    ]


def rates(results: Results) -> str:
    """Where the learning rates come from, as far as it has got."""
    sweep = {config_hash(config) for config in learning_rates.RUNS(results.scale, results.seeds)}
    if not sweep:
        return "Learning rates and gate bias are the paper's."
    done = len(sweep & results.runs.keys())
    bias = tab_main.configs(results.scale, "isoflop")["grt"].model.gate_bias
    return (
        f"The learning rates in use, and GRT's gate bias of {bias:+g} (the paper's: +4), are decided by the sweep in "
        f"learning_rates.md, as far as it is done ({done} of {len(sweep)} runs); it looks at one seed, on the "
        "validation windows of these tables."
    )
