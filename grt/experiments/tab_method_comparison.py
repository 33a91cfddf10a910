"""tab:method_comparison: what each method does, as printed and as found by running it; with this scale's results."""

from collections.abc import Callable, Mapping, Sequence

from grt.config import RunConfig
from grt.experiments import properties
from grt.experiments.properties import probe
from grt.experiments.recipes import row
from grt.presets import METHODS
from grt.study.compare import NEAR, NOT_RUN, is_idle
from grt.study.report import Report, Table
from grt.study.results import Result, Results
from grt.study.statistics import summary

COLUMNS = ("dense", "mor", "poisson", "rrt", "ouro", "grt")


def printed(*cells: str) -> dict[str, str]:
    return dict(zip(COLUMNS, cells, strict=True))


EXPECTED: dict[str, dict[str, str]] = {
    "full weight sharing": printed("n/a", "Yes", "Yes", "No", "Yes", "Yes"),
    "variable inference depth": printed("No", "Yes", "Yes", "No", "Yes", "Yes"),
    "input-dependent gating": printed("No", "Yes", "No", "No", "Yes", "Yes"),
    "per-step noise": printed("No", "No", "Init only", "No", "No", "Yes"),
    "per-iteration loss": printed("No", "No", "No", "No", "Yes", "No"),
    "emergent early exit": printed("No", "Yes", "Yes", "No", "Yes", "Yes"),
    "training time": printed("3h18m", "12h19m", "4h16m", "6h42m", "8h20m", "6h18m"),
    "loss": printed("3.15", "3.30", "3.23", "3.14", "3.19", "3.14"),
}
# Printed entries that something else speaks against, marked * in the table.
DISPUTED: dict[tuple[str, str], str] = {
    ("input-dependent gating", "ouro"): "Ouro's gate decides when to exit and never what a step writes "
    "(arXiv 2510.25741).",
    ("emergent early exit", "ouro"): "Ouro is trained to read out every step, so that its early exits do not emerge.",
    ("training time", "dense"): "compiled, where all others ran eagerly (the table's own caption).",
    ("training time", "mor"): "the longest, although MoR at its own capacities computes 0.60 of the same layout "
    "without a router.",
    ("training time", "poisson"): "two thirds of GRT's, although depths of mean R are deeper than GRT's uniform ones: "
    "the paper prints neither its mean depth nor how many steps carry gradient.",
    ("loss", "dense"): "3.154 in tab:seeds, 3.157 in fig:ablation_ladder; and one of its three seeds has 3.253.",
}


def RUNS(scale: str, seeds: Sequence[int]) -> list[RunConfig]:
    """None of its own: the results are those of tab:main."""
    return []


def yes(found: bool) -> str:
    return "Yes" if found else "No"


def sharing(name: str) -> str:
    with tiny(name) as (model, ids):
        found = properties.shares_weights(model, ids)
    return "n/a" if found is None else yes(found)


def depth(name: str) -> str:
    with tiny(name) as (model, ids):
        return yes(len(properties.trained_depths(model, ids)) > 1)


def gating(name: str) -> str:
    with tiny(name) as (model, ids):
        return yes(properties.gates_the_update(model, ids))


def noise(name: str) -> str:
    with tiny(name) as (model, ids):
        return {"per step": "Yes", "init only": "Init only", "none": "No"}[properties.noise(model, ids)]


def loss(name: str) -> str:
    with tiny(name) as (model, ids):
        return yes(len(properties.readouts(model, ids, model.full_depth)) > 1)


def tiny(name: str):
    """The method with what its presets set, at properties' size."""
    return probe(name, **METHODS[name]) if name in METHODS else probe("ladder", "3L")


FOUND: dict[str, Callable[[str], str]] = {
    "full weight sharing": sharing, "variable inference depth": depth, "input-dependent gating": gating,
    "per-step noise": noise, "per-iteration loss": loss,
}  # fmt: skip


def early_exit(runs: Sequence[Result]) -> str:
    """Mean over seeds, with how much higher the loss at half the depth is; an idle loop has nothing to exit from."""
    R = runs[0].config.model.blocks.R
    if R == 0:
        return "No"
    full, half = (summary([run.by_depth[k] for run in runs]).mean for k in (R, (R + 1) // 2))
    idle = ", idle" if is_idle(runs) else ""
    return f"{yes(half <= (1 + NEAR) * full and not idle)} ({half / full - 1:+.2%}{idle})"


def seconds(runs: Sequence[Result]) -> str:
    return f"{summary([run.cost['seconds'] for run in runs]).mean:,.0f} s"


def full_loss(runs: Sequence[Result]) -> str:
    return f"{summary([run.loss for run in runs]).mean:.4f}"


MEASURED: dict[str, Callable[[Sequence[Result]], str]] = {
    "emergent early exit": early_exit, "training time": seconds, "loss": full_loss,
}  # fmt: skip


def measured(name: str, of: Callable[[Sequence[Result]], str], results: Results) -> str:
    runs = list(results.by_seed(row(name, results.scale)).values())
    return of(runs) if runs else NOT_RUN


def build(results: Results) -> Report:
    ours = {what: {name: find(name) for name in COLUMNS} for what, find in FOUND.items()}
    ours |= {what: {name: measured(name, of, results) for name in COLUMNS} for what, of in MEASURED.items()}
    caption = (
        "Design properties, training time and loss at full depth: the paper's of its small models "
        f"(iso-FLOP), ours of {results.scale} scale, means over seeds. *: disputed below. !: ours differs."
    )
    table = Table("tab_method_comparison", caption, ("property", "", *COLUMNS), rows(ours))
    disputes = [f"*{what}, {name}: {reason}" for (what, name), reason in DISPUTED.items()]
    return Report(f"tab:method_comparison at {results.scale} scale", [table], {}, [*HOW, *disputes])


def rows(ours: Mapping[str, Mapping[str, str]]) -> list[Sequence[str]]:
    """Two for each property. Times and losses are of other text, sizes and machines: they are not compared."""
    body = []
    for what, cells in EXPECTED.items():
        starred = [f"{cell}*" if (what, name) in DISPUTED else cell for name, cell in cells.items()]
        found = [
            f"{cell} !" if cells[name] in ANSWERS and cell != NOT_RUN and not cell.startswith(cells[name]) else cell
            for name, cell in ours[what].items()
        ]
        body += [(what, "paper", *starred), (what, "ours", *found)]
    return body


ANSWERS = ("Yes", "No", "Init only", "n/a")
HOW = [
    "Ours, of a tiny model (width 16, three steps, random weights), run: sharing, that every step makes the same of "
    "the same core input; variable depth, that training reads out states of more than one number of steps; gating, "
    "that the share of a proposal that is written depends on the token; noise, that a training step from the same "
    "state depends on the random generator (init only: the start alone does); per-iteration loss, that the loss reads "
    "out more than one state.",
    f"Early exit, of trained models: at half the steps (rounded up) the loss is within {NEAR:.0%} of full depth's; in "
    f"brackets how much higher it is. idle: at depth 0, where the core is not run, it is within {NEAR:.0%} too, so "
    "that there is no depth to exit from.",
    "Training time, ours, is as it passed on a machine that did other things too: it measures no method's speed.",
]
