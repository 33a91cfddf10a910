"""The sizes of tab:main: parameters and FLOPs as the paper prints them, beside the closed forms of grt/model/cost.py.

The printed FLOPs follow from eq:flops in no unit and at no sequence length that we found, so all of them are marked;
their ratios to the dense row, which need no unit, are the ones to compare.
"""

from typing import Any

import torch
from rich.table import Table

from grt.console import Output
from grt.experiments.tab_main import EXPECTED
from grt.methods import build_model
from grt.model import cost
from grt.presets import preset

CONVENTIONS = ("total", "without_positions", "without_embeddings")


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
