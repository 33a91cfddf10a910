"""`grt bench memory`: what decoding holds (tab:decode_mem), weights and caches in bf16 with room for a whole context.

Everything is built for real, and every storage alive is counted once, beside the closed form and the paper's numbers.
A prompt of a few tokens goes through, so that the cache passes from the prompt phase, in which it has slots for all R
steps of a core block, to the decode phase, in which it has what the strategy keeps: both are measured. What a pass over
a longer prompt computes on its way comes on top and is not part of it.
"""

import json
from collections.abc import Sequence
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table

from grt.backbone.context import LoopContext
from grt.bench.decoding import empty_report
from grt.bench.latency import pair_of
from grt.cache.kv import KVCache
from grt.cache.sharing import parse_strategy
from grt.config import ModelConfig
from grt.methods import build_model
from grt.model import cost
from grt.model.loop import RecurrentDepthModel, last_of
from grt.schema import at_least
from grt.train.memory import LiveStorages

GIB = 2**30
PROMPT = 4  # tokens
# tab:decode_mem, in GiB: (size, model, kv) -> batch -> memory
PAPER = {
    ("medium", "dense", "full"): {1: 0.75, 32: 3.66},
    ("medium", "grt", "full"): {1: 0.41, 32: 3.32},
    ("medium", "grt", "mean"): {1: 0.35, 32: 1.44},
}


def zeros(config: ModelConfig) -> RecurrentDepthModel:
    """The model with nothing but zeros in bf16: drawing weights would take longer than all the rest."""
    with torch.device("meta"):
        model = build_model(config)
    model = model.to(torch.bfloat16).to_empty(device="cpu").eval()
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    return model


@torch.inference_mode()
def held(model: RecurrentDepthModel, kv: str, batch: int) -> tuple[int, int]:
    """Bytes alive in the prompt phase and in the decode phase, weights included."""
    storages = LiveStorages()
    for p in model.parameters():
        storages.count(p)
    with storages:
        cache = KVCache(model, batch, model.config.context, strategy=kv)
        ids = torch.zeros(batch, min(PROMPT, model.config.context), dtype=torch.long)
        ctx = LoopContext(cache=cache)
        model.logits(last_of(model.states(ids, ctx, model.full_depth)), ctx, last=True)
        del ctx, ids
        before = storages.now
        cache.commit()
        return before, storages.now


def bench_memory(
    size: str = "medium", batches: Sequence[int] = (1, 32), kv: Sequence[str] = ("full", "mean")
) -> dict[str, Any]:  # fmt: skip
    """The JSON document of the bench; ratios are to the dense model at the same batch."""
    at_least("--batch", min(batches), 1)
    for strategy in kv:
        parse_strategy(strategy)  # before anything is built
    report = empty_report("memory", torch.device("cpu"), torch.bfloat16)
    dense_bytes: dict[int, int] = {}
    for kind, config in zip(("dense", "grt"), reversed(pair_of(size)), strict=True):
        model = zeros(config)
        for strategy in dict.fromkeys(("full",) if kind == "dense" else kv):
            for batch in dict.fromkeys(batches):
                row = row_of(model, kind, size, strategy, batch)
                report["rows"].append(row)
                dense_bytes.setdefault(batch, row["bytes"])
                if kind == "grt":
                    name = f"memory, {row['name']} {strategy} / dense {size}, batch {batch}"
                    report["ratios"][name] = row["bytes"] / dense_bytes[batch]
    del report["ratio_spreads"]  # counted, not timed
    return report


def row_of(model: RecurrentDepthModel, kind: str, size: str, kv: str, batch: int) -> dict[str, Any]:
    prompt_phase, decode_phase = held(model, kv, batch)
    closed_form = cost.decode_memory(model, (batch,), (kv,))[kv][str(batch)]
    return {
        "name": f"{kind} {size}", "kv": kv, "batch": batch, "bytes": decode_phase, "closed_form_bytes": closed_form,
        "difference": decode_phase / closed_form - 1, "prompt_phase_bytes": prompt_phase,
        "paper_gib": PAPER.get((size, kind, kv), {}).get(batch),
    }  # fmt: skip


def show(report: dict[str, Any]) -> None:
    """A table for people, then the report as one JSON line."""
    console = Console(highlight=False, soft_wrap=True)
    table = Table(
        title="memory of decoding, bf16, weights and caches for a whole context, GiB", box=box.SIMPLE,
        padding=(0, 1, 0, 0),
    )  # fmt: skip
    for column in ("model", "kv", "batch", "measured", "closed form", "apart", "paper", "prompt phase"):
        table.add_column(column, justify="right", no_wrap=column == "model")
    for row in report["rows"]:
        paper = "" if row["paper_gib"] is None else f"{row['paper_gib']:.2f}"
        table.add_row(
            row["name"], row["kv"], str(row["batch"]), f"{row['bytes'] / GIB:.3f}",
            f"{row['closed_form_bytes'] / GIB:.3f}", f"{row['difference']:+.2%}", paper,
            f"{row['prompt_phase_bytes'] / GIB:.3f}",
        )  # fmt: skip
    console.print(table)
    for name, ratio in report["ratios"].items():
        console.print(f"{name}: {ratio:.2f}")
    print(json.dumps(report))
