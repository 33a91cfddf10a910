"""`grt bench`: speed, always against a peer on the same machine."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from grt.options import Device, parse
from grt.presets import preset


@dataclass
class Bench:
    """Measure speed, ours and a peer in turn: a table, then one JSON line."""

    what: tyro.conf.Positional[Literal["training"]]
    """training: a step of a recurrent model against dense of equal block executions, or of our dense against peers."""
    peers: list[Literal["dense", "nanogpt", "transformers"]] = field(default_factory=lambda: ["dense"])
    """dense: the recurrent model against dense; nanogpt, transformers: our dense GPT-2 against theirs."""
    nanogpt: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """model.py of a checkout of karpathy/nanoGPT, for the peer nanogpt."""
    methods: list[str] = field(default_factory=lambda: ["grt"])
    """The recurrent models: keys of grt.methods.METHODS."""
    layout: str = "1+1x10+1"
    """Their layout."""
    preset: str = ""
    """Layout, width, context and sequences a slot of this preset instead."""
    alternations: int = 10
    """Turns that count; one more warms up."""
    dtype: Literal["auto", "fp32", "bf16"] = "bf16"
    """Precision of the matrix products; auto: the fastest here."""
    device: Device = "auto"
    """Where to compute."""
    threads: int = 0
    """CPU threads; 0: as many as torch takes by itself."""


def run_bench(arguments: list[str]) -> int:
    command = parse(Bench, arguments, "bench")
    import torch

    from grt.bench.training import bench_training, show

    if command.threads:
        torch.set_num_threads(command.threads)
    like: dict[str, Any] = {}
    if command.preset:
        config = preset(command.preset)
        shape = {name: getattr(config.model, name) for name in ("d_model", "n_heads", "context")}
        like = {"shape": shape, "batch_size": config.train.batch_size}
        command.layout = config.model.layout
    report = bench_training(
        command.layout, command.alternations, peers=command.peers, nanogpt=command.nanogpt, methods=command.methods,
        dtype=command.dtype, device=command.device, **like,
    )  # fmt: skip
    show(report)
    return 0
