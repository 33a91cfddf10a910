"""Sampled against fixed depth in training: promised by the paper, which prints no number for it."""

from collections.abc import Sequence

from grt.config import RunConfig
from grt.experiments.recipes import row, with_seeds
from grt.presets import change
from grt.study.compare import NOT_RUN, SPREAD, Claim, claims_table, costs_table, idle_notes, losses_of
from grt.study.report import Report, Table
from grt.study.results import Results
from grt.study.statistics import summary

SAMPLED = ("grt", "poisson")  # the methods that draw a depth


def configs(scale: str) -> dict[str, RunConfig]:
    rows = {}
    for name in SAMPLED:
        config = row(name, scale)
        rows |= {name: config, f"{name}-fixed": change(config, train={"depth": "fixed"})}
    return rows


def RUNS(scale: str, seeds: Sequence[int]) -> list[RunConfig]:
    return with_seeds(list(configs(scale).values()), seeds)


def build(results: Results) -> Report:
    rows = configs(results.scale)
    R = next(iter(rows.values())).model.blocks.R
    depths = sorted({0, 1, 2, (R + 1) // 2, R})
    body = []
    for name, config in rows.items():
        runs = results.by_seed(config)
        cells = [str(summary([run.by_depth[k] for run in runs.values()])) if runs else NOT_RUN for k in depths]
        body.append([name, *cells, str(len(runs))])
    caption = f"Loss by depth, in nats per token, of models trained at drawn and at fixed depth. {SPREAD}"
    columns = ["model", *(f"depth {k}" for k in depths), "seeds"]
    claims = [Claim(name, f"{name}-fixed", None) for name in SAMPLED]
    tables = [
        Table("fixed_depth", caption, columns, body),
        claims_table("fixed_depth_claims", losses_of(rows, results), claims),
        costs_table("fixed_depth_costs", "What each costs; loss at full depth in nats per token.", rows, results),
    ]
    notes = [
        "At equal tokens: drawn depths cost less training FLOPs. Differences are at full depth; depth 0 is untrained.",
        *idle_notes(rows, results),
    ]
    return Report(f"Sampled against fixed depth at {results.scale} scale", tables, {}, notes)
