"""tab:seeds: how far seeds move the dense model and GRT, at the small size."""

from collections.abc import Sequence

from grt.config import RunConfig
from grt.experiments.recipes import row, with_seeds
from grt.study.compare import NOT_RUN, SPREAD, Claim, claims_table, idle_notes, losses_of
from grt.study.report import Report, Table
from grt.study.results import Results
from grt.study.statistics import summary

ROWS = ("dense", "grt")
EXPECTED = {"dense": {1337: 3.154, 42: 3.156, 123: 3.253}, "grt": {1337: 3.141, 42: 3.146, 123: 3.148}}


def RUNS(scale: str, seeds: Sequence[int]) -> list[RunConfig]:
    return with_seeds([row(name, scale) for name in ROWS], seeds)


def build(results: Results) -> Report:
    body = []
    for name in ROWS:
        losses = results.losses(row(name, results.scale))
        cells = [f"{losses[seed]:.4f}" if seed in losses else NOT_RUN for seed in results.seeds]
        body.append([name, *cells, *_summary(list(losses.values()))])
        printed = [f"{EXPECTED[name][seed]:.3f}" if seed in EXPECTED[name] else "" for seed in results.seeds]
        body.append([f"{name}, paper (small)", *printed, *_summary(list(EXPECTED[name].values()))])
    columns = ["model", *(f"seed {seed}" for seed in results.seeds), "mean", "sd"]
    caption = f"tab:seeds at {results.scale} scale: loss at full depth in nats per token. {SPREAD}"
    printed = summary([EXPECTED["grt"][s] - EXPECTED["dense"][s] for s in EXPECTED["grt"]])
    claim = Claim("grt", "dense", round(printed.mean, 3))
    rows = {name: row(name, results.scale) for name in ROWS}
    notes = [
        f"The paper's own difference, paired by seed: {printed.mean:+.3f} ± {printed.half:.3f}. By the rule used here "
        "it is undecided: one dense seed (3.253) makes most of it.",
        *idle_notes(rows, results),
    ]
    tables = [
        Table("tab_seeds", caption, columns, body),
        claims_table("tab_seeds_claims", losses_of(rows, results), [claim]),
    ]
    return Report(f"tab:seeds at {results.scale} scale", tables, {}, notes)


def _summary(losses: list[float]) -> tuple[str, str]:
    if not losses:
        return NOT_RUN, ""
    found = summary(losses)
    return str(found), "" if found.sd is None else f"{found.sd:.4f}"
