"""Dense, GRT and Poisson at equal training FLOPs: whoever is cheaper a token reads more of them.

steps_m = steps_dense x F_dense / F_m, F being the training FLOPs of a token (forward and backward as executed, under
the method's own depth sampler, head included); warm-up and cosine are stretched with the steps.
"""

from collections.abc import Sequence

import torch

from grt.config import RunConfig
from grt.experiments.recipes import row, with_seeds
from grt.methods import build_model, depth_sampler
from grt.model import cost
from grt.presets import change
from grt.study.compare import NO_CORE, Claim, claims_table, costs_table, idle_notes, losses_of
from grt.study.report import Report
from grt.study.results import Results

ROWS = ("grt", "poisson")


def flops_per_token(config: RunConfig) -> float:
    with torch.device("meta"):
        model = build_model(config.model)
    sampler = depth_sampler(config.model, config.train.depth)
    return cost.mean_over_depths(sampler, lambda depth: cost.training_flops(model, depth, config.model.context))


def stretched(config: RunConfig, dense: RunConfig) -> RunConfig:
    """The same recipe over as many steps as cost what the dense model's training costs."""
    factor = flops_per_token(dense) / flops_per_token(config)
    warmup = round(config.optim.warmup_steps * factor)
    return change(config, train={"steps": round(dense.train.steps * factor)}, optim={"warmup_steps": warmup})


def configs(scale: str) -> dict[str, RunConfig]:
    dense = row("dense", scale)
    return {"dense": dense, **{name: stretched(row(name, scale), dense) for name in ROWS}}


def RUNS(scale: str, seeds: Sequence[int]) -> list[RunConfig]:
    return with_seeds(list(configs(scale).values()), seeds)


def build(results: Results) -> Report:
    rows = configs(results.scale)
    caption = f"Equal training FLOPs at {results.scale} scale: loss at full depth in nats per token."
    pairs = [("grt", "dense"), ("grt", "poisson"), ("poisson", "dense"), ("grt", f"grt{NO_CORE}")]
    tables = [
        costs_table("equal_flops", caption, rows, results),
        claims_table("equal_flops_claims", losses_of(rows, results), [Claim(a, b, None) for a, b in pairs]),
    ]
    notes = [
        *idle_notes(rows, results),
        "Not run at equal training FLOPs: a dense model of fewer layers, which is cheaper a token, and the other "
        "methods. What is ahead of dense 8L here need not be ahead of those.",
    ]
    return Report(f"Equal training FLOPs at {results.scale} scale", tables, {}, notes)
