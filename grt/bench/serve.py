"""`grt bench serve`: tokens per second of GRT and of dense models in vLLM, many requests at once.

Contestants are GRT isoFLOP, our dense model of equal block executions, and vLLM's own GPT-2 of that size, with random
weights. They take turns in one process: a turn is all requests, from the first prompt's arrival to the last token.
Ratios are taken within each turn, and their median reported. GRT computes a little more than dense, for projection and
gate: beside each ratio stands its share of what the FLOPs of grt/model/cost.py would make it. Threads are as many as
vLLM takes, one on a small CPU; OMP_NUM_THREADS says otherwise.
"""

import json
import random
import statistics
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table

from grt.bench.decoding import empty_report
from grt.bench.latency import pair_of
from grt.bench.turns import alternate
from grt.config import ModelConfig
from grt.device import dtype_name, resolve_dtype
from grt.errors import ConfigError
from grt.methods import build_model
from grt.model import cost
from grt.schema import at_least

if TYPE_CHECKING:
    from grt.vllm.engine import Engine


def request_flops(config: ModelConfig, prompt: int, new: int) -> float:
    """Of one request: every token but the last new one goes in, and the head reads out the new ones."""
    with torch.device("meta"):
        model = build_model(config)
    tokens = prompt + new
    return (tokens - 1) * cost.executed_flops(model, config.blocks.R, tokens) + new * cost.head_flops(config)


def check(prompt: int, new: int, requests: int, alternations: int, context: int) -> None:
    options = {"--prompt": prompt, "--new": new, "--requests": requests, "--alternations": alternations}
    for name, value in options.items():
        at_least(name, value, 1)
    if prompt + new > context:
        raise ConfigError(f"--prompt {prompt} and --new {new} are more than the context, {context}: ask for fewer.")


def engine_class() -> type["Engine"]:
    """ConfigError where vLLM is not."""
    try:
        from grt.vllm.engine import Engine
    except ModuleNotFoundError:
        raise ConfigError("vLLM is not installed here: make vllm, then .venv-vllm/bin/grt bench serve.") from None
    return Engine


def contestants(configs: Sequence[ModelConfig], kv: str, peers: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Name -> what vLLM is told of the model; configs: GRT's and dense."""
    from grt.vllm.engine import gpt2, ours

    grt, dense = configs
    made = {"grt": ours(grt, kv), "dense": ours(dense), "gpt2": gpt2(dense)}
    return {name: document for name, document in made.items() if name in ("grt", *peers)}


def bench_serve(
    size: str = "small", *, requests: int = 32, prompt: int = 128, new: int = 64, dtype: str = "auto", kv: str = "full",
    compiled: bool = True, alternations: int = 5, peers: Sequence[str] = ("dense", "gpt2"),
) -> dict[str, Any]:  # fmt: skip
    """The JSON document of the bench. peers, dense: our dense model in vLLM; gpt2: vLLM's own."""
    configs = pair_of(size)
    check(prompt, new, requests, alternations, configs[0].context)
    engine = engine_class()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    precision = resolve_dtype(dtype, device, configs[0].d_model)
    dtype = dtype_name(precision)
    engines = {
        name: engine(document, configs[0], requests=requests, length=prompt + new, dtype=dtype, compiled=compiled)
        for name, document in contestants(configs, kv, peers).items()
    }
    report = empty_report("serve", device, precision)
    report |= {"size": size, "requests": requests, "prompt": prompt, "new": new, "kv": kv, "compiled": compiled}
    prompts = [prompts_of(turn, requests, prompt, configs[0].vocab_size) for turn in range(1 + alternations)]
    seconds = take_turns(engines, prompts, new)
    for name, times in seconds.items():
        speeds = sorted(requests * new / s for s in times)
        report["rows"].append(
            {"name": name, "tokens_per_s": statistics.median(speeds), "spread": [speeds[0], speeds[-1]]}
        )
    flops = [request_flops(config, prompt, new) for config in configs]
    report |= {"flops_per_request": dict(zip(("grt", "dense"), flops, strict=True)), "of_flops": {}}
    for name in seconds.keys() - {"grt"}:
        ratios = sorted(b / a for a, b in zip(seconds["grt"], seconds[name], strict=True))
        title = f"tokens/s, grt / {name}"
        report["ratios"][title], report["ratio_spreads"][title] = statistics.median(ratios), [ratios[0], ratios[-1]]
        report["of_flops"][title] = report["ratios"][title] * flops[0] / flops[1]
    return report


def prompts_of(turn: int, requests: int, prompt: int, vocab_size: int) -> list[list[int]]:
    rng = random.Random(turn)
    return [[rng.randrange(vocab_size) for _ in range(prompt)] for _ in range(requests)]


def take_turns(engines: Mapping[str, "Engine"], prompts: list[list[list[int]]], new: int) -> dict[str, list[float]]:
    """Seconds of each turn, by contestant; the first turn warms up. All get the prompts of a turn, prompts[turn]."""
    asked = {name: iter(prompts) for name in engines}

    def one_turn(name: str) -> float:
        now = next(asked[name])
        start = time.perf_counter()
        made = engines[name].generate(now, new)
        seconds = time.perf_counter() - start
        assert all(len(row) == new for row in made)
        return seconds

    tokens = len(prompts[0]) * new
    turns = {name: partial(one_turn, name) for name in engines}
    return alternate(turns, len(prompts) - 1, warm=1, seconds=lambda s: s / tokens)


def show(report: dict[str, Any]) -> None:
    """A table for people, then the report as one JSON line."""
    console = Console(highlight=False, soft_wrap=True)
    how = "compiled" if report["compiled"] else "eager"
    console.print(
        f"serve {report['size']}, {report['dtype']}, {how}, kv {report['kv']}, on {report['device']} "
        f"({report['threads']} threads)"
    )
    title = f"{report['requests']} requests, {report['prompt']} tokens and {report['new']} new ones"
    table = Table("model", "tokens/s", "range", title=title, box=box.SIMPLE)
    for row in report["rows"]:
        low, high = row["spread"]
        table.add_row(row["name"], f"{row['tokens_per_s']:,.1f}", f"{low:,.1f}-{high:,.1f}")
    console.print(table)
    for name, ratio in report["ratios"].items():
        low, high = report["ratio_spreads"][name]
        share = report["of_flops"][name]
        console.print(f"{name}: {ratio:.3f} ({low:.3f}-{high:.3f}), {share:.3f} of what the FLOPs give")
    print(json.dumps(report))
