"""tab:main: sizes and FLOPs as the paper prints them, beside the closed forms of grt/model/cost.py.

The printed FLOPs follow from eq:flops in no unit and at no sequence length that we found, so all of them are marked;
their ratios to the dense row, which need no unit, are the ones to compare.
"""

from typing import Any, NamedTuple

import torch
from rich.table import Table

from grt.methods import build_model
from grt.model import cost
from grt.presets import preset
from grt.train.log import Output

CONVENTIONS = ("total", "without_positions", "without_embeddings")


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


def costs(name: str) -> dict[str, Any]:
    """Parameters in three conventions; FLOPs per token at the paper's T = 1,024, head apart: eq:flops and executed."""
    config = preset(name).model
    with torch.device("meta"):
        model = build_model(config)
    counted = cost.parameters(model)
    return {
        "layout": config.layout,
        "parameters": {convention: counted[convention] for convention in CONVENTIONS},
        "flops_per_token": {
            "paper": cost.paper_flops(config, config.context),
            "executed": cost.executed_flops(model, config.blocks.R, config.context),
        },
    }


def table1() -> dict[str, Any]:
    """The document of `grt info --table1`: per row what the paper prints, what we derive, and whether they differ.

    Parameters differ where the printed number is ours in none of the three conventions, rounded to millions; FLOPs
    where eq:flops per token or per sequence of 1,024, rounded as printed, does not give it. `ratio`: to the dense row.
    """
    rows, dense = [], {}
    for name, printed in EXPECTED.items():
        ours, size = costs(name), name.split("-")[1]
        flops = ours["flops_per_token"]["paper"]
        if name.startswith("dense"):
            dense[size] = (printed.flops, flops, ours["flops_per_token"]["executed"])
        digits = len(f"{printed.flops:g}".partition(".")[2])
        of_dense = dense[size]
        rows.append(
            {
                "name": name,
                "paper": {"parameters": printed.parameters * 10**6, "flops": printed.flops * 1e9, "loss": printed.loss},
                **ours,
                "ratio": {
                    "paper": printed.flops / of_dense[0],
                    "derived": flops / of_dense[1],
                    "executed": ours["flops_per_token"]["executed"] / of_dense[2],
                },
                "differs": {
                    "parameters": printed.parameters not in {round(n / 1e6) for n in ours["parameters"].values()},
                    "flops": printed.flops not in {round(flops * n / 1e9, digits) for n in (1, 1024)},
                },
            }
        )
    return {"table": "tab:main", "tokens": 1024, "rows": rows}


def show_table1(report: dict[str, Any]) -> None:
    table = Table(title="tab:main: the paper's sizes and FLOPs beside ours; ! where they differ")
    for column in ("model", "layout", "params, paper (M)", "total (M)", "- wpe", "- wte", "FLOPs, paper (G)",
                   "eq:flops, token (M)", "sequence (G)", "ratio, paper", "eq:flops", "executed"):  # fmt: skip
        table.add_column(column, justify="left" if column in ("model", "layout") else "right")
    for row in report["rows"]:
        paper, differs, flops = row["paper"], row["differs"], row["flops_per_token"]["paper"]
        table.add_row(
            row["name"], row["layout"],
            f"{paper['parameters'] / 1e6:.0f}{' !' if differs['parameters'] else '  '}",
            *(f"{row['parameters'][convention] / 1e6:.2f}" for convention in CONVENTIONS),
            f"{paper['flops'] / 1e9:g}{' !' if differs['flops'] else '  '}",
            f"{flops / 1e6:,.1f}", f"{flops * 1024 / 1e9:,.1f}",
            *(f"{row['ratio'][of]:.3f}" for of in ("paper", "derived", "executed")),
        )  # fmt: skip
    console = Output()
    console.print(table)
    console.print(
        "total: every parameter once, the tied embedding included; - wpe: without positions; - wte: without either "
        "embedding. ratio: to the dense row; eq:flops adds 10 d^2 a recurrence whatever the method, executed is what "
        "this code runs (MoR at its capacities). Head apart everywhere."
    )
