"""`grt bench training`: time per token of a training step, ours and a peer in turn.

Peers: `dense`, the recurrent model against dense of equal block executions; `nanogpt` and `transformers`, our dense
GPT-2 against theirs of the same shape, precision, tokens, optimizer and clipping.

Contestants take turns in one process, so a change of the machine's speed hits all; ratios are taken within each turn
and their median reported. A turn of a recurrent model has R slots whose depths are evenly spaced quantiles of what its
method draws (for GRT every depth from 1 to R): the sampler's mean without its luck.
"""

import json
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from grt.backbone.context import LoopContext
from grt.bench.peers import LossOf, nanogpt, transformers_gpt2
from grt.bench.turns import alternate
from grt.config import ModelConfig, OptimConfig
from grt.console import note, working
from grt.data.loader import Split, batch
from grt.device import autocast, cpu_name, dtype_name, resolve_device, resolve_dtype
from grt.errors import ConfigError
from grt.methods import build_model, depth_sampler
from grt.model.depth import Depth, DepthSampler
from grt.schema import at_least
from grt.train.memory import training_peak
from grt.train.optim import make_optimizer

PEER_SLOTS = 4  # slots of a turn where no depth has to be gone through


class Contestant:
    """A model that trains on random tokens; each turn is one optimizer step of several slots."""

    def __init__(
        self, name: str, model: nn.Module, losses: Sequence[LossOf], device: torch.device, dtype: torch.dtype
    ) -> None:
        self.name, self.losses, self.device, self.dtype = name, losses, device, dtype
        self.model = model.to(device).train()
        self.optimizer = make_optimizer(self.model, OptimConfig())

    def turn(self, ids: Tensor, targets: Tensor) -> float:
        """Seconds per token of one step, each of whose slots is (ids, targets)."""
        start, total = time.perf_counter(), torch.zeros((), device=self.device)
        for loss_of in self.losses:
            with autocast(self.device, self.dtype):
                loss = loss_of(ids, targets) / len(self.losses)
            loss.backward()
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        total.item()  # waits for the device
        return (time.perf_counter() - start) / (len(self.losses) * ids.numel())

    def peak(self, ids: Tensor, targets: Tensor) -> int:
        """Bytes at the peak of the last slot of a turn, the deepest."""

        def run() -> Tensor:
            with autocast(self.device, self.dtype):
                return self.losses[-1](ids, targets)

        return training_peak(self.model, run)


def ours(name: str, config: ModelConfig, depths: list[Depth], device: torch.device, dtype: torch.dtype) -> Contestant:
    torch.manual_seed(0)
    model = build_model(config)

    def at(depth: Depth) -> LossOf:
        def loss(ids: Tensor, targets: Tensor) -> Tensor:
            ctx = LoopContext(recompute=model.rule.reads_out_often)  # as a run does by default
            return model.loss(ids, targets, depth, ctx).total

        return loss

    return Contestant(name, model, [at(depth) for depth in depths], device, dtype)


def quantiles(sampler: DepthSampler, n: int) -> list[Depth]:
    """n depths that stand for the distribution: its quantiles at 1/2n, 3/2n, ..."""
    depths, below = [], 0.0
    for steps, p in sorted(sampler.probabilities.items()):
        below += p
        while len(depths) < n and (len(depths) + 0.5) / n < below:
            depths.append(Depth(steps, sampler.grad_steps))
    return depths


def rows_of(times: dict[str, list[float]]) -> list[dict[str, Any]]:
    return [
        {
            "name": name,
            "us_per_token": 1e6 * statistics.median(values),
            "tokens_per_s": 1 / statistics.median(values),
            "spread": [1e6 * min(values), 1e6 * max(values)],
        }
        for name, values in times.items()
    ]


def loader_seconds(batch_size: int, context: int, calls: int = 50) -> float:
    """Median time in which the training loader makes a slot's batch, from a memory-mapped shard of 4 M tokens."""
    with tempfile.TemporaryDirectory() as folder:
        tokens = np.random.default_rng(0).integers(0, 257, 1 << 22).astype("<u2")
        (Path(folder) / "bench.bin").write_bytes(tokens.tobytes())
        shards = [{"file": "bench.bin", "tokens": len(tokens)}]
        entry = {"documents": 1, "tokens": len(tokens), "bytes": len(tokens), "sha256": "", "shards": shards}
        split, times = Split("bench", Path(folder), entry, "uint16", 257), []
        for step in range(calls):
            start = time.perf_counter()
            batch(split, seed=0, step=step, slot=0, rows=range(batch_size), context=context)
            times.append(time.perf_counter() - start)
    return statistics.median(times)


def recurrent_and_dense(configs: list[ModelConfig], device: torch.device, dtype: torch.dtype) -> list[Contestant]:
    config = configs[0]
    if config.blocks.is_dense:
        raise ConfigError(f"--layout {config.layout} has no core to compare with dense: write one as 1+1x10+1.")
    R, executions = config.blocks.R, config.blocks.n_executions()
    recurrent = [ours(f"{c.method} {c.layout}", c, quantiles(depth_sampler(c), R), device, dtype) for c in configs]
    dense = replace(config, layout=f"{executions}L")
    return [*recurrent, ours(f"dense {executions}L", dense, [Depth(0)] * R, device, dtype)]


def dense_and_peers(
    config: ModelConfig, peers: Sequence[str], path: Path | None, device: torch.device, dtype: torch.dtype
) -> list[Contestant]:
    make: dict[str, Callable[[], tuple[nn.Module, LossOf]]] = {
        "nanogpt": lambda: nanogpt(path, config),
        "transformers": lambda: transformers_gpt2(config),
    }
    made = {name: make[name]() for name in peers}  # first: what is missing should be said at once
    contestants = [ours(f"grt dense {config.layout}", config, [Depth(0)] * PEER_SLOTS, device, dtype)]
    return contestants + [Contestant(name, m, [loss] * PEER_SLOTS, device, dtype) for name, (m, loss) in made.items()]


def bench_training(
    layout: str = "1+1x10+1", alternations: int = 10, *, peers: Sequence[str] = ("dense",), nanogpt: Path | None = None,
    methods: Sequence[str] = ("grt",), shape: dict[str, Any] | None = None, peer_shape: dict[str, Any] | None = None,
    peer_layout: str = "12L", batch_size: int = 8, dtype: str = "auto", device: str = "auto",
) -> dict[str, Any]:  # fmt: skip
    """The JSON document of the bench. `shape` (d_model, n_heads, context) is of the recurrent models and their dense
    one, `peer_shape` of the dense models; ratios are of time per token (recurrent / dense) and of tokens per second
    (ours / peer). peak_bytes: of a slot of the deepest turn, counted on the CPU."""
    at_least("--alternations", alternations, 1)
    where = resolve_device(device)
    shape = shape or {"d_model": 256, "n_heads": 4, "context": 256}
    peer_shape = peer_shape or {"d_model": 384, "n_heads": 6, "context": 256}
    others = [peer for peer in dict.fromkeys(peers) if peer != "dense"]
    precision = resolve_dtype(dtype, where, (peer_shape if others else shape)["d_model"])
    report: dict[str, Any] = {
        "bench": "training", "device": cpu_name() if where.type == "cpu" else torch.cuda.get_device_name(where),
        "threads": torch.get_num_threads(), "dtype": dtype_name(precision), "alternations": alternations,
        "rows": [], "ratios": {}, "ratio_spreads": {},
    }  # fmt: skip
    if "dense" in peers:
        configs = [ModelConfig(method=m, layout=layout, vocab_size=257, **shape) for m in dict.fromkeys(methods)]
        *recurrent, dense = recurrent_and_dense(configs, where, precision)
        pairs = [(contestant, dense) for contestant in recurrent]
        measure([*recurrent, dense], pairs, configs[0], batch_size, report, "time per token")
    if others:
        config = ModelConfig(layout=peer_layout, vocab_size=257, **peer_shape)
        contestants = dense_and_peers(config, others, nanogpt, where, precision)
        pairs = [(contestants[0], peer) for peer in contestants[1:]]
        measure(contestants, pairs, config, batch_size, report, "tokens/s")
    return report


def measure(
    contestants: list[Contestant], pairs: list[tuple[Contestant, Contestant]], config: ModelConfig, batch_size: int,
    report: dict[str, Any], what: str,
) -> None:  # fmt: skip
    """Let the contestants, ours first, take turns; add their rows, and the ratio of each pair, to `report`."""
    tokens = torch.randint(0, 257, (batch_size, config.context + 1)).to(contestants[0].device)
    ids, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    turns = {contestant.name: partial(contestant.turn, ids, targets) for contestant in contestants}
    times = alternate(turns, report["alternations"], warm=1, seconds=float)
    rows = rows_of(times)
    for row in rows:
        note(f"{row['name']}: {row['us_per_token']:.2f} us per token")
    if ids.device.type == "cpu":
        for row, contestant in zip(rows, contestants, strict=True):
            with working(f"measuring the memory of {contestant.name}"):
                row["peak_bytes"] = contestant.peak(ids, targets)
    sizes = {name: getattr(config, name) for name in ("d_model", "n_heads", "context")} | {"batch_size": batch_size}
    seconds_of_slot = 1e-6 * rows[0]["us_per_token"] * batch_size * config.context
    rows[0]["loader_share"] = loader_seconds(batch_size, config.context) / seconds_of_slot
    report["rows"] += [{**row, "shape": sizes} for row in rows]
    for a, b in pairs:
        ratios = [x / y for x, y in zip(times[a.name], times[b.name], strict=True)]
        if what == "tokens/s":
            ratios = [1 / ratio for ratio in ratios]
        report["ratios"][f"{what}, {a.name} / {b.name}"] = statistics.median(ratios)
        report["ratio_spreads"][f"{what}, {a.name} / {b.name}"] = [min(ratios), max(ratios)]


def show(report: dict[str, Any]) -> None:
    """A table for people, then the report as one JSON line."""
    console = Console(highlight=False, soft_wrap=True)
    table = Table(title=f"training, {report['dtype']} on {report['device']} ({report['threads']} threads)")
    for column in ("model", "us per token", "tokens per s", "fastest-slowest us", "peak MB"):
        table.add_column(column, justify="right")
    for row in report["rows"]:
        low, high = row["spread"]
        peak = f"{row['peak_bytes'] / 1e6:.1f}" if "peak_bytes" in row else ""
        table.add_row(
            row["name"], f"{row['us_per_token']:.2f}", f"{row['tokens_per_s']:,.0f}", f"{low:.2f}-{high:.2f}", peak
        )
    console.print(table)
    for name, ratio in report["ratios"].items():
        low, high = report["ratio_spreads"][name]
        console.print(f"{name}: {ratio:.3f} ({low:.3f}-{high:.3f})")
    for row in report["rows"]:
        if "loader_share" in row:
            console.print(f"loader's share of a step, {row['name']}: {row['loader_share']:.2%}")
    print(json.dumps(report))
