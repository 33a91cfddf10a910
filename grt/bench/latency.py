"""`grt bench latency`: time per generated token (tab:latency), in two protocols.

`cached`: prompts are read at once, then each token goes through a KV cache. `paper`: as the paper's own measurement
seems to have been made: no cache; each token costs a forward pass over the last `context` tokens.

With kept weights, a tape of the pass stands in for compiling (grt/cpu/captured.py).

Contestants are GRT isoFLOP, dense of equal block executions and, with a cache, transformers' GPT-2 on the weights of
that dense model. Weights are random, in bf16 or fp32 throughout, or ours kept apart (`weights`,
grt/decode/quantize.py). They take turns in one process; ratios are taken
within each turn and their median reported. ms_per_token is the time of a decoding step, which makes one token of each
row: everything behind the first new token, which is prefill_ms. The roofline is of what such a step has to read
(cost.decode_bytes at the mean length of the decoding), against the speed at which this machine reads a long tensor.
"""

import itertools
import json
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table

from grt.bench.decoding import (
    FEW,
    Cached,
    Contestant,
    Recomputed,
    Task,
    Transformers,
    add_ratio,
    empty_report,
    median_row,
    on,
    take_turns,
    warm_up,
)
from grt.cache.sharing import parse_strategy
from grt.config import ModelConfig, Weights
from grt.cpu import kernels
from grt.device import dtype_name, resolve_device, resolve_dtype
from grt.errors import ConfigError
from grt.model import cost
from grt.model.loop import RecurrentDepthModel
from grt.presets import preset
from grt.schema import at_least

# GRT and dense presets of equal block executions
SIZES = {size: (f"grt-{size}-isoflop", f"dense-{size}") for size in ("small", "medium", "large")}
SIZES |= {"nano": ("grt-nano", "dense-nano")}
PROTOCOLS = ("cached", "paper")
READ = 256 << 20  # bytes of the tensor whose reading is the peak
KEYS = ("bytes_per_token", "gb_per_s", "share_of_peak")


def pair_of(size: str) -> tuple[ModelConfig, ModelConfig]:
    """GRT and dense, without rows of padding: others' models have none."""
    if size not in SIZES:
        raise ConfigError(f"size is {size!r}: choose among {', '.join(SIZES)}.")
    grt, dense = (replace(preset(name).model, vocab_multiple=1) for name in SIZES[size])
    return grt, dense


def peak_gb_per_s(device: torch.device, repeats: int = 10) -> float:
    """Speed of reading a long tensor of the device's memory to sum it up: the best of several times."""
    x = torch.ones(READ // 4, device=device)
    best = 0.0
    for _ in range(repeats):
        start = time.perf_counter()
        x.sum().item()  # waits for the device
        best = max(best, READ / (time.perf_counter() - start) / 1e9)
    return best


def plan(
    sizes: Sequence[str], protocols: Sequence[str], batches: Sequence[int], prompt: int | None, new: int | None,
    kv: str, compiled: bool, on_cpu: bool, notes: list[str],
) -> list[tuple[str, list[Task]]]:  # fmt: skip
    """Each size and its tasks. What is not given is as in tab:latency; but without a cache a CPU takes a second or
    more for each token, so there the smallest model and a few tokens are enough, and `notes` says so."""
    parse_strategy(kv)
    tasks: dict[str, list[Task]] = {}
    for protocol in dict.fromkeys(protocols):
        few = protocol == "paper" and on_cpu
        its_sizes = sizes or (("small",) if few else ("small", "medium", "large"))
        its_new = (FEW if few else 128) if new is None else new
        at_least("--new", its_new, 2)
        if few and not (sizes and new):
            notes.append(f"paper on a CPU: {', '.join(its_sizes)} only, {its_new} new tokens (--sizes, --new: others)")
        for size in dict.fromkeys(its_sizes):
            context = pair_of(size)[0].context
            P = context if protocol == "paper" else max(1, context - its_new) if prompt is None else prompt
            at_least("--prompt", P, 1)
            if protocol == "cached" and P + its_new > context:
                raise ConfigError(
                    f"--prompt {P} and --new {its_new} are more than the context of {size}, {context}: ask for fewer."
                )
            tasks.setdefault(size, []).extend(
                Task(protocol, B, P, its_new, kv, compiled) for B in dict.fromkeys(batches)
            )
    return list(tasks.items())


def bench_latency(
    sizes: Sequence[str] = (), protocols: Sequence[str] = PROTOCOLS, batches: Sequence[int] = (1, 4), *,
    prompt: int | None = None, new: int | None = None, dtype: str = "auto", weights: Weights | None = None,
    kv: str = "full", compiled: bool = True, alternations: int = 5, peers: Sequence[str] = ("dense", "transformers"),
    device: str = "auto",
) -> dict[str, Any]:  # fmt: skip
    """The JSON document of the bench. peers, dense: GRT against dense; transformers: our dense against theirs."""
    at_least("--alternations", alternations, 1)
    at_least("--batch", min(batches), 1)
    batches = list(dict.fromkeys(batches))
    where = resolve_device(device)
    notes: list[str] = []
    planned = plan(sizes, protocols, batches, prompt, new, kv, compiled, where.type == "cpu", notes)
    precision = resolve_dtype(dtype, where, pair_of(planned[0][0])[0].d_model)
    report = empty_report("latency", where, precision)
    report |= {"alternations": alternations, "kv": kv, "compiled": compiled, "notes": notes}
    report |= {
        "weights": weights or dtype_name(precision),
        "kernels": kernels.best() if weights and where.type == "cpu" else None,
    }
    report["roofline"] = {"peak_gb_per_s": peak_gb_per_s(where)} | {key: {} for key in KEYS}
    for size, tasks in planned:
        configs = dict(zip((f"grt {size}", f"dense {size}"), pair_of(size), strict=True))
        if "dense" not in peers:
            del configs[f"grt {size}"]
        models = {name: on(where, precision, config, weights) for name, config in configs.items()}
        peer = on(where, precision, configs[f"dense {size}"]) if "transformers" in peers else None
        for task in tasks:
            measure(models, task, peer, report)
            torch.compiler.reset()  # what was compiled for the next models comes on top of this, up to a limit
    return report


def contestants_of(
    models: dict[str, RecurrentDepthModel], task: Task, peer: RecurrentDepthModel | None
) -> list[Contestant]:
    """GRT if it takes part, dense, and, where there is a cache, transformers with the weights of `peer`."""
    *_, (name_of_dense, dense) = models.items()
    prompts = task.prompts(dense.config.vocab_size)
    make = Recomputed if task.protocol == "paper" else Cached
    made: list[Contestant] = [make(name, model, task, prompts) for name, model in models.items()]
    return made + (
        [Transformers(name_of_dense.replace("dense", "transformers"), peer, prompts)]
        if peer is not None and make is Cached
        else []
    )


def measure(
    models: dict[str, RecurrentDepthModel], task: Task, peer: RecurrentDepthModel | None, report: dict[str, Any]
) -> None:
    """Let one group take turns; add its rows, its rooflines and the ratio of each pair to `report`."""
    contestants = contestants_of(models, task, peer)
    compile_s = {c.name: warm_up(c, task.new) for c in contestants}
    times = take_turns(contestants, task.new, report["alternations"])
    *_, (dense, dense_model) = models.items()
    where = f"{task.protocol}, batch {task.batch}"
    for name, of_turns in times.items():
        row = median_row(name, task.batch, of_turns) | {"protocol": task.protocol, "compile_s": compile_s[name]}
        row |= {"prompt": task.prompt, "new": task.new}
        if task.protocol == "cached":
            model = models.get(name, peer or dense_model)
            row |= roofline(model, task, row["ms_per_token"], report["roofline"]["peak_gb_per_s"])
            for key in KEYS:
                report["roofline"][key][f"{row['name']}, batch {task.batch}"] = row[key]
        report["rows"].append(row)
    if len(models) > 1:
        grt = next(iter(models))
        add_ratio(report, f"ms per token, {grt} / {dense}, {where}", times[grt], times[dense])
    for theirs in times.keys() - models.keys():  # tokens per second, so the other way round
        add_ratio(report, f"tokens/s, {dense} / {theirs}, {where}", times[theirs], times[dense])


def roofline(model: RecurrentDepthModel, task: Task, ms_per_token: float, peak: float) -> dict[str, float]:
    weight = model.embed.tokens.weight
    seen = task.prompt + task.new / 2  # mean of prompt + 1 .. prompt + new - 1
    sizes = {"itemsize": weight.itemsize, "kv_itemsize": weight.dtype.itemsize}
    read = cost.decode_bytes(model, model.config.blocks.R, seen, task.batch, **sizes)
    speed = read / (1e-3 * ms_per_token) / 1e9
    return dict(zip(KEYS, (read, speed, speed / peak), strict=True))


def show(report: dict[str, Any]) -> None:
    """A table of each group for people, then the report as one JSON line."""
    console = Console(highlight=False, soft_wrap=True)
    how = "compiled" if report["compiled"] else "eager"
    if report["weights"] != report["dtype"]:
        how += f", weights {report['weights']}"
    if report["kernels"]:
        how += f" by kernels for {report['kernels']}"
    console.print(
        f"latency, {report['dtype']}, {how}, kv {report['kv']}, on {report['device']} ({report['threads']} threads), "
        f"which reads at most {report['roofline']['peak_gb_per_s']:.1f} GB/s"
    )
    for note in report["notes"]:
        console.print(note)
    for group, rows in itertools.groupby(report["rows"], key=lambda row: (row["protocol"], row["batch"])):
        console.print(table_of(*group, list(rows)))
    for name, ratio in report["ratios"].items():
        low, high = report["ratio_spreads"][name]
        console.print(f"{name}: {ratio:.3f} ({low:.3f}-{high:.3f})")
    print(json.dumps(report))


def table_of(protocol: str, batch: int, rows: list[dict[str, Any]]) -> Table:
    title = f"{protocol}, batch {batch}, {rows[0]['prompt']} tokens and {rows[0]['new']} new ones"
    table = Table(title=title, box=box.SIMPLE, padding=(0, 1, 0, 0))  # 80 columns have to do
    for column in ("model", "prompt ms", "ms/token", "range", "tokens/s", "of peak", "compile s"):
        table.add_column(column, justify="right", no_wrap=column == "model")
    for row in rows:
        low, high = row["spread"]
        prefill, share, seconds = row["prefill_ms"], row.get("share_of_peak"), row["compile_s"]
        table.add_row(
            row["name"], "" if prefill is None else f"{prefill:.1f}", f"{row['ms_per_token']:.2f}",
            f"{low:.2f}-{high:.2f}", f"{row['tokens_per_s']:,.1f}", "" if share is None else f"{share:.0%}",
            "" if seconds is None else f"{seconds:.1f}",
        )  # fmt: skip
    return table
