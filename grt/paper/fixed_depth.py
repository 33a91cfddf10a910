"""Sampled against fixed depth in training: promised by the paper, which prints no number for it."""

from collections.abc import Sequence

from grt.config import RunConfig
from grt.paper.compare import NOT_RUN, Claim, claims_table
from grt.paper.recipes import row, with_seeds
from grt.paper.report import Report, Table
from grt.paper.results import Results
from grt.paper.statistics import summary
from grt.presets import change

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
    depths = sorted({1, 2, (R + 1) // 2, R})
    body = []
    for name, config in rows.items():
        runs = results.by_seed(config)
        cells = [str(summary([run.by_depth[k] for run in runs.values()])) if runs else NOT_RUN for k in depths]
        flops = f"{summary([r.cost['training_flops'] for r in runs.values()]).mean:.3e}" if runs else ""
        body.append([name, *cells, flops, str(len(runs))])
    caption = "Loss at each depth of models trained at drawn and at fixed depth; ± is the 95 % interval over seeds."
    columns = ["model", *(f"depth {k}" for k in depths), "training FLOPs", "seeds"]
    claims = [Claim(name, f"{name}-fixed", None) for name in SAMPLED]
    tables = [Table("fixed_depth", caption, columns, body), claims_table("fixed_depth_claims", rows, results, claims)]
    notes = ["At equal tokens: drawn depths cost less training FLOPs. Differences are at full depth."]
    return Report(f"Sampled against fixed depth at {results.scale} scale", tables, {}, notes)
