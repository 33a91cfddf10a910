"""`grt bench training`: time per token of a training step, the recurrent model against dense of equal block executions.

Both models take turns in one process, so a change of the machine's speed hits both; the ratio is taken within each
turn and its median reported. A turn of the recurrent model runs every depth 1..R once: exactly the mean of the
sampler, without its luck.
"""

import json
import statistics
import time
from dataclasses import dataclass, replace

import torch
from rich.console import Console
from rich.table import Table

from grt.config import ModelConfig, OptimConfig
from grt.methods import build_model
from grt.model.depth import Depth
from grt.model.precision import autocast, cpu_name, dtype_name, resolve_device, resolve_dtype
from grt.model.recurrent import RecurrentDepthModel
from grt.train.optim import make_optimizer


@dataclass(frozen=True)
class Shape:
    """What is timed: 12 block executions at width 256, in slots of batch_size x context tokens."""

    layout: str = "1+1x10+1"
    method: str = "grt"
    d_model: int = 256
    n_heads: int = 4
    context: int = 256
    batch_size: int = 8
    vocab_size: int = 257


class Contestant:
    """A model that trains on random tokens; each turn is one optimizer step of several slots."""

    def __init__(self, name: str, config: ModelConfig, depths: list[int], device: torch.device, dtype: torch.dtype):
        torch.manual_seed(0)
        self.name, self.depths, self.device, self.dtype = name, depths, device, dtype
        self.model: RecurrentDepthModel = build_model(config).to(device).train()
        self.optimizer = make_optimizer(self.model, OptimConfig())

    def turn(self, tokens: torch.Tensor) -> float:
        """Seconds per token of one step on tokens (batch, context + 1)."""
        ids, targets = tokens[:, :-1], tokens[:, 1:]
        start = time.perf_counter()
        for steps in self.depths:
            with autocast(self.device, self.dtype):
                total = self.model.loss(ids, targets, Depth(steps)).total
            (total / len(self.depths)).backward()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        norm.item()  # waits for the device
        return (time.perf_counter() - start) / (len(self.depths) * ids.numel())


def bench_training(shape: Shape, alternations: int, dtype: str, device: str) -> dict[str, object]:
    """Alternate the two models; the JSON document of the bench."""
    where = resolve_device(device)
    precision = resolve_dtype(dtype, where, shape.d_model)
    config = ModelConfig(
        method=shape.method, layout=shape.layout, d_model=shape.d_model, n_heads=shape.n_heads, context=shape.context,
        vocab_size=shape.vocab_size,
    )  # fmt: skip
    R, executions = config.blocks.R, config.blocks.n_executions()
    ours = Contestant(f"{shape.method} {shape.layout}", config, list(range(1, R + 1)), where, precision)
    dense = Contestant(f"dense {executions}L", replace(config, layout=f"{executions}L"), [0] * R, where, precision)
    tokens = torch.randint(0, shape.vocab_size, (shape.batch_size, shape.context + 1)).to(where)
    times: dict[str, list[float]] = {ours.name: [], dense.name: []}
    for turn in range(alternations + 1):
        order = (ours, dense) if turn % 2 else (dense, ours)
        measured = {contestant.name: contestant.turn(tokens) for contestant in order}
        if turn:  # the first turn warms up
            for name, seconds in measured.items():
                times[name].append(seconds)
    ratios = [a / b for a, b in zip(times[ours.name], times[dense.name], strict=True)]
    rows = [
        {
            "name": name,
            "us_per_token": 1e6 * statistics.median(values),
            "tokens_per_s": 1 / statistics.median(values),
            "spread": [1e6 * min(values), 1e6 * max(values)],
        }
        for name, values in times.items()
    ]
    return {
        "bench": "training", "device": cpu_name() if where.type == "cpu" else torch.cuda.get_device_name(where),
        "threads": torch.get_num_threads(), "dtype": dtype_name(precision), "alternations": alternations,
        "shape": vars(shape), "rows": rows,
        "ratios": {f"{ours.name} / {dense.name}": statistics.median(ratios), "spread": [min(ratios), max(ratios)]},
    }  # fmt: skip


def show(report: dict[str, object]) -> None:
    """A table for people, then the report as one JSON line."""
    console = Console(highlight=False, soft_wrap=True)
    table = Table(title=f"training, {report['dtype']} on {report['device']} ({report['threads']} threads)")
    for column in ("model", "us per token", "tokens per s", "fastest-slowest us"):
        table.add_column(column, justify="right")
    for row in report["rows"]:  # type: ignore[attr-defined]
        low, high = row["spread"]
        table.add_row(row["name"], f"{row['us_per_token']:.2f}", f"{row['tokens_per_s']:,.0f}", f"{low:.2f}-{high:.2f}")
    console.print(table)
    print(json.dumps(report))
