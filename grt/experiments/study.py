"""The nano study on two pages: what was run and where, what came out, which of the paper's claims it bears on."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from grt.config import RunConfig, config_hash
from grt.errors import ConfigError
from grt.experiments import ablation_ladder, depth_tasks, equal_flops, fixed_depth, learning_rates, prose, tab_main
from grt.experiments.recipes import UNSWEPT
from grt.presets import preset
from grt.study.compare import NOT_RUN, PAPERS, SPREAD, VERDICTS, idle_notes
from grt.study.report import Report, Table
from grt.study.results import WINDOWS, Result, Results, check_numbers
from grt.study.statistics import summary

FILE = "README"
OTHERS = {"equal tokens": tab_main, "ladder": ablation_ladder, "depth": fixed_depth, "equal FLOPs": equal_flops}
LONGER = ("methods/{}/eval.json", "models/{}-nano.json")  # of the presets, one seed each


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
    what = f"Claims: differences of loss at full depth in nats, paired by seed. {VERDICTS} {PAPERS}"
    tables = [losses(results), Table("study_claims", what, columns, rows), *longer(results), accuracies(results)]
    return Report(f"The {results.scale} study", tables, {}, notes(results))


def losses(results: Results) -> Table:
    prose_rows = prose.configs(results.scale)
    rows = []
    for name, config in tab_main.configs(results.scale, "isoflop").items():
        runs, layout = list(results.by_seed(config).values()), config.model.blocks
        by_depth = [""] * 3 if layout.is_dense else [mean_at(runs, k) for k in (0, 1, (layout.R + 1) // 2)]
        full = str(summary([run.loss for run in runs])) if runs else NOT_RUN
        costs = [f"{summary([run.cost['training_flops'] for run in runs]).mean:.2e}",
                 f"{runs[0].inference_flops / 1e6:.2f}"] if runs else ["", ""]  # fmt: skip
        other = list(results.losses(prose_rows[name]).values()) if name in prose_rows else []
        cells = [config.model.layout, f"{config.optim.lr:g}", *costs, *by_depth, full, str(len(runs))]
        rows.append((name, *cells, f"{summary(other).mean:.4f}" if other else NOT_RUN))
    columns = ("model", "layout", "learning rate", "training FLOPs", "MFLOPs a token", "depth 0", "depth 1", "half",
               "full", "seeds", "on prose")  # fmt: skip
    caption = (
        f"Equal tokens, not equal FLOPs: validation loss in nats per token. {SPREAD} Depth 0: the core is not run; "
        "half: half the depth, rounded up. On prose: full depth, one seed."
    )
    caption = " ".join([caption, *idle_notes(tab_main.configs(results.scale, "isoflop"), results)])
    return Table("study_losses", caption, columns, rows)


def mean_at(runs: Sequence[Result], depth: int) -> str:
    return f"{summary([run.by_depth[depth] for run in runs]).mean:.4f}" if runs else ""


def longer(results: Results) -> list[Table]:
    """The presets dense-nano and grt-nano after more tokens, where those results lie beside this scale's folder."""
    if results.scale != "nano":
        return []
    longer_grt, here = preset("grt-nano"), tab_main.configs("nano", "isoflop")
    rows = []
    runs = [list(results.by_seed(here[name]).values()) for name in ("dense", "grt")]
    if all(runs):
        by_depth = [{k: summary([run.by_depth[k] for run in of]).mean for k in of[0].by_depth} for of in runs]
        rows.append(against("this study", here["grt"], here["grt"].train.steps, WINDOWS, *by_depth))
    for file in LONGER:
        paths = [results.folder.parent / file.format(name) for name in ("dense", "grt")]
        if all(path.is_file() for path in paths):
            (_, _, dense), (step, windows, grt) = map(evaluated, paths)
            rows.append(against(f"`{file.format('*')}`", longer_grt, step, windows, dense, grt))
    columns = ("results", "tokens (M)", "windows", "gate bias", "dense", "grt", "depth 0", "depth 1", "grt - dense")
    caption = (
        "GRT against dense 8L after more tokens: this study beside longer runs of the presets dense-nano and grt-nano, "
        "one seed each, whose gates begin open: budget and recipe both differ. Depths 0 and 1 are GRT's."
    )
    return [Table("study_longer", caption, columns, rows)]


def evaluated(path: Path) -> tuple[int, int, dict[int, float]]:
    """Step, windows and loss by depth of what `grt eval --json` printed. ConfigError where it is damaged."""
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
        check_numbers({name: report[name] for name in ("step", "windows")} | report["loss_by_depth"])
        return report["step"], report["windows"], {int(k): loss for k, loss in report["loss_by_depth"].items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigError(f"{path} is damaged ({error}): write it anew with `grt eval RUN --json`.") from None


def against(
    name: str, config: RunConfig, step: int, windows: int, dense: Mapping[int, float], grt: Mapping[int, float]
) -> Sequence[str]:
    """A row of `longer`; dense and grt: loss by depth."""
    tokens = f"{step * config.train.tokens_per_step / 1e6:.2f}"
    losses = (dense[max(dense)], grt[max(grt)], grt[0], grt[1])
    difference = f"{losses[1] - losses[0]:+.4f}"
    return (name, tokens, str(windows), f"{config.model.gate_bias:+g}", *(f"{x:.4f}" for x in losses), difference)


def accuracies(results: Results) -> Table:
    rows = []
    for name in depth_tasks.ROWS:
        cells = []
        for task in depth_tasks.TASKS.values():
            runs = results.by_seed(depth_tasks.config(name, task)).values()
            found = [depth_tasks.share(run, max(run.accuracy)) for run in runs]
            missing = "" if len(found) == len(results.seeds) else f", {len(found)} seeds"
            cells.append(
                f"{summary(found).mean:.3f} ({min(found):.3f} to {max(found):.3f}{missing})" if found else NOT_RUN
            )
        rows.append((name, *cells))
    what = (
        "Depth tasks: accuracy at full depth, mean over seeds (lowest to highest). -fixed: trained at full depth "
        "alone; -half: at half the learning rate."
    )
    return Table("study_tasks", what, ("model", *depth_tasks.TASKS), rows)


def progress(results: Results) -> str:
    """Every page, and how much of its runs is done."""
    from grt.study.experiment import EXPERIMENTS, experiments

    parts = []
    for name in [name for name in EXPERIMENTS if name != "study"]:
        configs = experiments(name)[0].runs(results.scale, results.seeds)
        missing = sum(results.get(config) is None for config in configs)
        runs = [f"{len(configs)} runs"] * bool(configs) + [f"{missing} {NOT_RUN}"] * bool(missing)
        parts.append(f"[{name}]({name}.md)" + (f" ({', '.join(runs)})" if runs else ""))
    return f"Pages: {'; '.join(parts)}."


def notes(results: Results) -> list[str]:
    config = next(iter(tab_main.configs(results.scale, "isoflop").values()))
    tokens = f"{config.train.steps * config.train.tokens_per_step / 1e6:,.2f} M"
    machines = {"{cpu}, threads: {threads}, torch {torch}".format(**run.environment) for run in results.runs.values()}
    hours = sum(run.cost["seconds"] for run in results.runs.values()) / 3600
    return [
        f"Recipe: {config.train.steps:,} steps of {config.train.tokens_per_step:,} tokens ({config.data.tokenizer}) of "
        f"`{config.data.path}` ({tokens}), width {config.model.d_model}, context {config.model.context}, AdamW and "
        f"cosine as in the paper; depth tasks and equal FLOPs have their own (see their pages). {rates(results)} "
        f"Losses are on the first {WINDOWS} validation windows. A finished run is one folder in runs/, or in an "
        "archive there, with its config, environment and metrics.",
        f"Machines: {'; '.join(sorted(machines)) or NOT_RUN}. {len(results.runs)} runs took {hours:.0f} hours of "
        "training by their own clocks, many beside another.",
        f"How far it carries: {tokens} tokens a run and {len(results.seeds)} seeds at most, where the paper trains on "
        "ten billion. What is undecided here is undecided, and what holds or fails here may do otherwise there. The "
        "column `smallest that could show` is half the interval: a true difference below it would usually not be seen.",
        progress(results),
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
        f"Learning rates, and GRT's gate bias of {bias:+g} (the paper's: +4), are those of the sweep in "
        f"learning_rates.md ({done} of {len(sweep)} runs done): one seed, on the validation windows of these tables, "
        f"biases at half of the rate in use. {UNSWEPT}"
    )
