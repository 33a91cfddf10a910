"""tab:main: the compared methods at equal block executions (isoFLOP) and at equal unique blocks (isoParam).

At nano scale: isoFLOP alone, and one more dense model, of as many unique blocks as the recurrent ones (3L).
Losses of the paper are of other text and 9.8 billion tokens: differences between rows compare, losses do not.
"""

from collections.abc import Sequence
from typing import NamedTuple

from grt.config import RunConfig
from grt.experiments.recipes import METHODS, UNSWEPT, row, with_seeds
from grt.study.compare import NO_CORE, Claim, claims_table, costs_table, idle_notes, losses_of
from grt.study.report import Report
from grt.study.results import Results


class Printed(NamedTuple):
    """flops in G a forward pass, parameters in M, loss in nats."""

    flops: float
    parameters: int
    loss: float


# Dense rows stand in the table twice.
EXPECTED: dict[str, Printed] = {
    "dense-small": Printed(1.84, 124, 3.15),
    "mor-small-isoflop": Printed(1.84, 45, 3.30),
    "poisson-small-isoflop": Printed(1.84, 34, 3.23),
    "ouro-small-isoflop": Printed(1.84, 35, 3.19),
    "rrt-small-isoflop": Printed(1.84, 33, 3.14),
    "grt-small-isoflop": Printed(1.84, 35, 3.14),
    "dense-medium": Printed(7.35, 354, 2.84),
    "mor-medium-isoflop": Printed(7.35, 137, 3.02),
    "poisson-medium-isoflop": Printed(7.35, 124, 2.97),
    "ouro-medium-isoflop": Printed(7.35, 126, 2.93),
    "rrt-medium-isoflop": Printed(7.35, 125, 2.95),
    "grt-medium-isoflop": Printed(7.35, 127, 2.89),
    "dense-large": Printed(21.1, 774, 2.71),
    "mor-large-isoflop": Printed(21.1, 309, 2.91),
    "poisson-large-isoflop": Printed(21.1, 291, 2.93),
    "ouro-large-isoflop": Printed(21.1, 290, 2.82),
    "rrt-large-isoflop": Printed(21.1, 289, 2.85),
    "grt-large-isoflop": Printed(21.1, 293, 2.77),
    "mor-small-isoparam": Printed(15.64, 135, 3.12),
    "poisson-small-isoparam": Printed(15.64, 124, 3.06),
    "ouro-small-isoparam": Printed(15.64, 127, 3.10),
    "rrt-small-isoparam": Printed(15.64, 125, 3.08),
    "grt-small-isoparam": Printed(15.64, 127, 3.04),
    "mor-medium-isoparam": Printed(26.4, 367, 2.78),
    "poisson-medium-isoparam": Printed(26.4, 356, 2.74),
    "grt-medium-isoparam": Printed(26.4, 357, 2.76),
    "mor-large-isoparam": Printed(109.0, 795, 2.69),
    "poisson-large-isoparam": Printed(109.0, 776, 2.70),
    "grt-large-isoparam": Printed(109.0, 779, 2.65),
}

REGIMES = ("isoflop", "isoparam")
PRINTED = (
    "The paper's differences are of losses with two decimals, one seed. Its dense model at small has 3.15 here, 3.154 "
    "to 3.253 over the seeds of tab:seeds, and by those GRT against dense is undecided in the paper too (tab_seeds.md)."
)


def configs(scale: str, regime: str) -> dict[str, RunConfig]:
    """Row -> config; rows that the paper has at this scale, or, at nano, what two cores can afford."""
    names = ["dense", *METHODS]
    if scale == "nano":
        names = ["dense", "dense-3L", *METHODS] if regime == "isoflop" else []
    else:
        names = [n for n in names if n == "dense" or f"{n}-{scale}-{regime}" in EXPECTED]
    return {name: row(name, scale, regime) for name in names}


def RUNS(scale: str, seeds: Sequence[int]) -> list[RunConfig]:
    return with_seeds([config for regime in REGIMES for config in configs(scale, regime).values()], seeds)


def claims(scale: str, regime: str) -> list[Claim]:
    """GRT against every other row, as printed; nano is held to the claims at small size."""
    size = "small" if scale == "nano" else scale

    def printed(name: str) -> float | None:
        found = EXPECTED.get(f"dense-{size}" if name == "dense" else f"{name}-{size}-{regime}")
        return None if found is None else found.loss

    ours = printed("grt")
    assert ours is not None
    found = {name: printed(name) for name in ("dense", *METHODS) if name != "grt"}
    return [Claim("grt", name, round(ours - loss, 2), 2) for name, loss in found.items() if loss is not None]


def build(results: Results) -> Report:
    tables, notes = [], []
    for regime in REGIMES:
        rows = configs(results.scale, regime)
        if not rows:
            notes.append(f"{regime}: not run at {results.scale} scale (its cores would be as deep as the dense model).")
            continue
        name = f"tab_main_{regime}"
        printed = {
            n: EXPECTED.get(f"dense-{results.scale}" if n == "dense" else f"{n}-{results.scale}-{regime}") for n in rows
        }
        losses = {n: f"{p.loss:.2f}" for n, p in printed.items() if p is not None}
        caption = f"tab:main, {regime}, {results.scale}: equal tokens; loss at full depth in nats per token."
        tables.append(costs_table(name, caption, rows, results, losses))
        more = [Claim("grt", f"grt{NO_CORE}", None)]
        if "dense-3L" in rows:
            more += [Claim("grt", "dense-3L", None), Claim("dense-3L", "dense", None)]
        every = [*claims(results.scale, regime), *more]
        tables.append(claims_table(f"{name}_claims", losses_of(rows, results), every))
        notes += idle_notes(rows, results)
    notes.append(PRINTED)
    if results.scale == "nano":
        notes.append(UNSWEPT)
    return Report(f"tab:main at {results.scale} scale", tables, {}, notes)
