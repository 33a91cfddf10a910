"""fig:ablation_ladder (small, 20,000 steps) and tab:ablation_ladder_2k (medium, 2,000 steps): one component a row."""

from collections.abc import Sequence
from typing import Any

from grt.config import RunConfig
from grt.experiments.recipes import UNSWEPT, row, with_seeds
from grt.presets import LADDER, preset
from grt.study.compare import Claim, claims_table, costs_table, idle_notes, losses_of
from grt.study.report import Report
from grt.study.results import Results
from grt.study.statistics import summary

ROWS = ("dense", *LADDER, "grt")
LABELS = {
    "dense": "dense", "ladder-core": "recurrence", "ladder": "+ prelude, coda", "ladder-noise": "+ state noise",
    "ladder-inject": "+ re-injection", "grt": "+ gate (GRT)",
}  # fmt: skip
# What each row adds to the loss of the one above it. The text prints the steps for small, the table losses for medium.
EXPECTED = {
    "small": {"ladder-core": 0.107, "ladder": -0.035, "ladder-noise": -0.018, "ladder-inject": -0.022, "grt": -0.048},
    "medium": {"ladder-core": 0.542, "ladder": -0.045, "ladder-noise": -0.019, "ladder-inject": -0.198, "grt": -0.115},
}


def configs(scale: str) -> dict[str, RunConfig]:
    """Row -> config; none at large, where the paper has no ladder."""
    if scale == "medium":
        names = {name: f"{name}-medium-2k" for name in ROWS} | {"grt": "grt-medium-isoflop-2k"}
        return {name: preset(known) for name, known in names.items()}
    return {} if scale == "large" else {name: row(name, scale) for name in ROWS}


def RUNS(scale: str, seeds: Sequence[int]) -> list[RunConfig]:
    return with_seeds(list(configs(scale).values()), seeds)


def build(results: Results) -> Report:
    rows = configs(results.scale)
    printed = EXPECTED.get(results.scale, EXPECTED["small"])
    pairs = list(zip(ROWS[1:], ROWS, strict=False))
    claims = [Claim(a, b, printed[a]) for a, b in pairs] if rows else []
    caption = f"Component ablation at {results.scale} scale: loss at full depth in nats per token."
    tables = [
        costs_table("ablation_ladder", caption, rows, results),
        claims_table("ablation_ladder_claims", losses_of(rows, results), claims),
    ]
    notes = [
        "Each difference is to the row above; held to the paper's 2,000-step table at medium, else to its figure. "
        f"The figure's names: {', '.join(f'{name} is {label!r}' for name, label in LABELS.items() if name in LADDER)}.",
        *idle_notes(rows, results),
    ]
    if results.scale == "nano":
        notes.append(UNSWEPT)
    figures = {"ablation_ladder": lambda axes: draw(axes, rows, results)} if rows else {}
    return Report(f"Component ablation at {results.scale} scale", tables, figures, notes)


def draw(axes: Any, rows: dict[str, RunConfig], results: Results) -> None:
    """Means of the rows that are done, with intervals; the dense model as a dashed line."""
    found = {name: summary(list(losses.values())) for name, c in rows.items() if (losses := results.losses(c))}
    names = [name for name in found if name != "dense"]
    means, halves = [found[name].mean for name in names], [found[name].half or 0.0 for name in names]
    axes.errorbar(range(len(names)), means, yerr=halves, fmt="o", capsize=4, color="C0")
    axes.set_xticks(range(len(names)), [LABELS[name] for name in names], fontsize=8)
    if "dense" in found:
        axes.axhline(found["dense"].mean, ls="--", color="gray", label="dense, as many block executions")
        axes.legend()
    axes.set_ylabel("loss (nats per token), 95 % interval over seeds")
    axes.grid(axis="y", alpha=0.3)
