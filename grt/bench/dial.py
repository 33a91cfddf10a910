"""`grt bench dial`: what each depth of one trained model costs and gives: validation loss against time per token.

The depths take turns at decoding with a cache, one row, greedily, after the beginning of the validation text.
"""

import json
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from grt.bench.decoding import Cached, Task, add_ratio, empty_report, median_row, take_turns, warm_up
from grt.device import resolve_device
from grt.errors import ConfigError
from grt.evals.loss import evaluate
from grt.runs.checkpoint import load_model
from grt.runs.plots import figure_of_losses
from grt.schema import at_least
from grt.train.loop import open_data


def bench_dial(
    run: Path, depths: Sequence[int] = (), *, new: int = 64, windows: int = 16, alternations: int = 5,
    device: str = "auto", out: Path = Path("dial.png"),
) -> dict[str, Any]:  # fmt: skip
    """The JSON document of the bench, and the plot. depths: default 1..R."""
    at_least("--alternations", alternations, 1)
    at_least("--new", new, 2)
    where = resolve_device(device)
    model, config = load_model(run, where)
    if not out.parent.is_dir():
        raise ConfigError(f"--out {out} cannot be written: make the folder {out.parent} first.")
    layout, context = config.model.blocks, config.model.context
    if layout.is_dense:
        raise ConfigError(f"{run} is a dense model, {config.model.layout}, with one depth only: give a recurrent one.")
    depths = sorted(set(depths)) or list(range(1, layout.R + 1))
    model.check_depth(min(depths[0], layout.R), least=1)  # evaluate looks at the deepest
    if new >= context:
        raise ConfigError(f"--new {new} leaves no room for a prompt in model.context {context}: ask for fewer.")
    split = open_data(config, quiet=True).split("val", config.data.windows)
    losses = evaluate(model, split, depths=depths, limit=windows).loss_by_depth
    task = Task("cached", 1, context - new, new)
    prompt = torch.from_numpy(split.read(0, task.prompt))[None]
    names = {depth: f"depth {depth}" for depth in depths}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "depth .* is beyond", UserWarning)  # evaluate has said so
        contestants = [Cached(name, model, task, prompt, depth) for depth, name in names.items()]
    for contestant in contestants:
        warm_up(contestant, new)
    times = take_turns(contestants, new, alternations)
    report = empty_report("dial", where, torch.float32)
    report |= {"run": str(run), "windows": windows, "prompt": task.prompt, "new": new, "alternations": alternations}
    for depth, name in names.items():
        row = median_row(name, 1, times[name])
        report["rows"].append({"depth": depth, "loss": losses[depth], **row})
        if depth < depths[-1]:
            deepest = names[depths[-1]]
            add_ratio(report, f"ms per token, {name} / {deepest}", times[name], times[deepest])
    draw(report["rows"], out)
    return report | {"plot": str(out)}


def draw(rows: list[dict[str, Any]], out: Path) -> None:
    with figure_of_losses("ms per token", out) as axes:
        x, y = [row["ms_per_token"] for row in rows], [row["loss"] for row in rows]
        axes.plot(x, y, marker="o", ms=4, lw=1.3, label="validation loss")
        for row in rows:
            label = f"{row['name']}\n{row['tokens_per_s']:,.0f} tokens/s"
            axes.annotate(label, (row["ms_per_token"], row["loss"]), (4, 6), textcoords="offset points", fontsize=8)
        axes.margins(x=0.15, y=0.15)


def show(report: dict[str, Any]) -> None:
    """A table for people, then the report as one JSON line."""
    console = Console(highlight=False, soft_wrap=True)
    on = f"{report['dtype']}, on {report['device']} ({report['threads']} threads)"
    table = Table(title=f"{report['run']}: loss and speed by depth, {on}")
    for column in ("depth", "loss", "ms per token", "fastest-slowest", "tokens/s"):
        table.add_column(column, justify="right")
    for row in report["rows"]:
        low, high = row["spread"]
        table.add_row(
            str(row["depth"]), f"{row['loss']:.4f}", f"{row['ms_per_token']:.3f}", f"{low:.3f}-{high:.3f}",
            f"{row['tokens_per_s']:,.1f}",
        )  # fmt: skip
    console.print(table)
    console.print(f"drawn in {report['plot']}")
    print(json.dumps(report))
