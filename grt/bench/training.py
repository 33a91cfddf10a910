"""`grt bench training`: time per token of a training step, the recurrent model against dense of equal block executions.

Both models take turns in one process, so a change of the machine's speed hits both; the ratio is taken within each
turn and its median reported. A turn of the recurrent model runs every depth 1..R once: exactly the mean of the
sampler, without its luck.
"""

import json
import statistics
import time
from dataclasses import replace
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from grt.config import ConfigError, ModelConfig, OptimConfig, at_least
from grt.methods import build_model
from grt.model.depth import Depth
from grt.model.precision import autocast, cpu_name, dtype_name, resolve_device, resolve_dtype
from grt.model.recurrent import RecurrentDepthModel
from grt.train.optim import make_optimizer


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
        start, total = time.perf_counter(), torch.zeros((), device=self.device)
        for steps in self.depths:
            with autocast(self.device, self.dtype):
                loss = self.model.loss(ids, targets, Depth(steps)).total / len(self.depths)
            loss.backward()
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        total.item()  # waits for the device
        return (time.perf_counter() - start) / (len(self.depths) * ids.numel())


def bench_training(
    layout: str = "1+1x10+1", alternations: int = 10, *, method: str = "grt", d_model: int = 256, n_heads: int = 4,
    context: int = 256, batch_size: int = 8, dtype: str = "bf16", device: str = "auto",
) -> dict[str, Any]:  # fmt: skip
    """Alternate the two models on slots of batch_size x context tokens; the JSON document of the bench."""
    at_least("--alternations", alternations, 1)
    where = resolve_device(device)
    precision = resolve_dtype(dtype, where, d_model)
    config = ModelConfig(
        method=method, layout=layout, d_model=d_model, n_heads=n_heads, context=context, vocab_size=257
    )
    if config.blocks.is_dense:
        raise ConfigError(f"--layout {layout} has no core to compare with dense: write one as 1+1x10+1.")
    R, executions = config.blocks.R, config.blocks.n_executions()
    ours = Contestant(f"{method} {layout}", config, list(range(1, R + 1)), where, precision)
    dense = Contestant(f"dense {executions}L", replace(config, layout=f"{executions}L"), [0] * R, where, precision)
    tokens = torch.randint(0, 257, (batch_size, context + 1)).to(where)
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
        "threads": torch.get_num_threads(), "dtype": dtype_name(precision),
        "alternations": alternations,
        "shape": {"d_model": d_model, "n_heads": n_heads, "context": context, "batch_size": batch_size}, "rows": rows,
        "ratios": {f"{ours.name} / {dense.name}": statistics.median(ratios), "spread": [min(ratios), max(ratios)]},
    }  # fmt: skip


def show(report: dict[str, Any]) -> None:
    """A table for people, then the report as one JSON line."""
    console = Console(highlight=False, soft_wrap=True)
    table = Table(title=f"training, {report['dtype']} on {report['device']} ({report['threads']} threads)")
    for column in ("model", "us per token", "tokens per s", "fastest-slowest us"):
        table.add_column(column, justify="right")
    for row in report["rows"]:
        low, high = row["spread"]
        table.add_row(row["name"], f"{row['us_per_token']:.2f}", f"{row['tokens_per_s']:,.0f}", f"{low:.2f}-{high:.2f}")
    console.print(table)
    print(json.dumps(report))
