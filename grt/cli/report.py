"""What `grt generate`, `info` and `list` say (eval_report.py: `grt eval`): a dict for --json, a table for people."""

import json
import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from grt.config import Layout, RunConfig, Weights, config_hash, load
from grt.console import Output, working
from grt.data.tokenizer import get_tokenizer
from grt.decode.quantize import keep_weights
from grt.decode.sampling import Sampling
from grt.decode.speculative import Draft, SpeculativeStream
from grt.decode.stream import Stream
from grt.decode.text import TextStream
from grt.device import resolve_device, resolve_dtype
from grt.errors import ConfigError
from grt.evals.report import evaluation_report, show_evaluation
from grt.exits.kept import NOBODY, Wanted, find_exit
from grt.files import replace_file
from grt.methods import METHODS, build_model, depth_sampler
from grt.model import cost
from grt.presets import PRESETS, SIZES, preset
from grt.runs.checkpoint import find_checkpoint, load_model
from grt.runs.metrics import read_metrics

console = Output()


def generation_report(
    run: Path, prompt: str, *, device: str = "auto", dtype: str = "fp32", show: Callable[[str], None] | None = None,
    stop: Sequence[str] = (), logprobs: bool = False, seed: int = 0, draft: Draft | None = None,
    exit: Wanted = NOBODY, weights: Weights | None = None, **options: Any,
) -> dict[str, Any]:  # fmt: skip
    """The JSON document of `grt generate`; `show` is given the prompt and then the text as it comes. draft: speculative
    decoding. weights: as for keep_weights. options: Stream's.

    A stop string is not part of the text, but the tokens that spell it are among the tokens.
    """
    where = resolve_device(device)
    model, config = load_model(run, where)
    keep_weights(model, weights, resolve_dtype(dtype, where, config.model.d_model))
    tokenizer = get_tokenizer(config.data.tokenizer)
    try:
        ids = [int(i) for i in tokenizer.encode(prompt)] or [tokenizer.eot]
    except UnicodeEncodeError:
        raise ConfigError("the prompt is not UTF-8: convert it first.") from None
    text, logs, depths = TextStream(tokenizer.decode, stop, ids), [], []
    options |= {"seeds": [seed], "stop_ids": [tokenizer.eot]}
    options["sampling"] = replace(options.get("sampling") or Sampling(), never=tuple(tokenizer.unused))
    options["exit"] = find_exit(run, model, exit, options.get("depth"))
    speculative = None if draft is None else SpeculativeStream(model, [ids], draft=draft, **options)
    steps, start = speculative or Stream(model, [ids], **options), time.perf_counter()
    show = show or (lambda piece: None)
    with working("token", steps.max_new_tokens, shown="line") as progress:
        show(prompt)
        for (drawn,) in steps:
            assert drawn is not None  # a row alone ends the stream
            logs.append(drawn.logprob)
            depths.append(drawn.depth)
            show(text.add(drawn.token))
            progress.advance()
            if text.ended:
                break
    seconds = time.perf_counter() - start
    show(text.finish())
    n, deepest = len(text.tokens), options.get("depth") or config.model.blocks.R
    return {
        "prompt": prompt,
        "text": text.text,
        "tokens": text.tokens,
        "finish_reason": "length" if n == steps.max_new_tokens and not text.ended else "stop",
        "depths": depths,
        "mean_depth": math.fsum(depths) / n if n else float(deepest),
        "tokens_per_s": n / max(seconds, 1e-9),
        **({"logprobs": logs} if logprobs else {}),
        **({"speculative": speculative.report()} if speculative else {}),
    }


def show_run(out: Path, device: str = "auto") -> None:
    """After training: loss at each depth on the validation text, a sample (kept in sample.txt), where the curve is."""
    config = load(out / "config.json")
    dtype = json.loads((out / "env.json").read_text(encoding="utf-8"))["dtype"]
    report = evaluation_report(out, limit=4 * config.train.eval_windows, dtype=dtype, device=config.train.device)
    show_evaluation(report)
    sampling = Sampling(temperature=0.8)
    options = {"device": device, "seed": 1337, "max_new_tokens": 400, "crop": True}
    text = generation_report(out, "", sampling=sampling, **options)["text"]
    replace_file(out / "sample.txt", text)
    console.print("a sample (temperature 0.8):", style="bold")
    console.print(text)
    console.print(f"curve: {out / 'curve.png'}   metrics: {out / 'metrics.jsonl'}   sample: {out / 'sample.txt'}")


def info_report(what: str) -> dict[str, Any]:
    """The JSON document of `grt info` for a preset or a run: closed forms of grt/model/cost.py."""
    path = Path(what)
    if what in PRESETS:
        config = preset(what)
    elif path.is_dir() and not (path / "config.json").exists() and (path / "manifest.json").exists():
        config = find_checkpoint(path)[1]
    elif path.is_dir():
        config = load(path / "config.json")
    else:
        try:
            config = preset(what)
        except ConfigError as error:
            raise ConfigError(f"{what} is no folder of a run, and as a preset: {error}") from None
    with torch.device("meta"):
        model = build_model(config.model)
    R, context = config.model.blocks.R, config.model.context
    sampler = depth_sampler(config.model, config.train.depth)
    return {
        "name": config.name,
        "layout": config.model.layout,
        "method": config.model.method_name,
        "parameters": cost.parameters(model),
        "flops_per_token": {
            "paper": cost.paper_flops(config.model, context),
            "executed": cost.executed_flops(model, R, context),
            "head": cost.head_flops(config.model),
            "train_mean": cost.mean_over_depths(
                sampler, lambda depth: cost.training_forward_flops(model, depth.steps, context)
            ),
            "training": cost.mean_over_depths(
                sampler, lambda depth: cost.training_flops(model, depth, context, config.train.stage)
            ),
        },
        "kv_bytes_per_token": cost.kv_bytes_per_token(model),
        "decode_memory_bytes": cost.decode_memory(model),
        "block_executions": config.model.blocks.n_executions(),
    }


def diagram(layout: Layout) -> str:
    """The model as one line of boxes, with the loop drawn around the core."""
    if layout.is_dense:
        return f"tokens -> embed -> [{layout.n_unique} blocks] -> ln_f -> head -> logits"
    before = f"tokens -> embed -> [{layout.p} prelude] -> h_pre -> "
    core = f"read -> [{layout.n} core] -> write"
    after = f" -> h_{layout.R} -> [{layout.c} coda] -> ln_f -> head -> logits"
    loop = " " * len(before) + f"^{'x ' + str(layout.R):-^{len(core) - 2}}|"
    return f"{before}{core}{after}\n{loop}"


def equal_ones(values: dict[str, Any]) -> list[tuple[str, Any]]:
    """The different values, each with all of its names: {a: 1, b: 2, c: 1} -> [(a, c; 1), (b; 2)]."""
    different = [value for i, value in enumerate(values.values()) if value not in list(values.values())[:i]]
    return [(", ".join(name for name in values if values[name] == value), value) for value in different]


def show_info(report: dict[str, Any]) -> None:
    table = Table(title=f"{report['name']}: {report['method']} {report['layout']}", show_header=False)
    flops = report["flops_per_token"]
    rows = [(f"parameters, {k.replace('_', ' ')}", f"{v:,}") for k, v in report["parameters"].items()]
    rows += [("block executions", str(report["block_executions"]))]
    rows += [(f"MFLOPs per token, {k.replace('_', ' ')}", f"{v / 1e6:,.2f}") for k, v in flops.items()]
    rows += [(f"KV bytes per token, {names}", f"{v:,}") for names, v in equal_ones(report["kv_bytes_per_token"])]
    for names, by_batch in equal_ones(report["decode_memory_bytes"]):
        for batch, size in by_batch.items():
            rows.append((f"decode memory, {names}, batch {batch} (bf16, full context)", f"{size / 2**20:,.1f} MiB"))
    for row in rows:
        table.add_row(*row)
    console.print(diagram(Layout.parse(report["layout"])))
    console.print(table)


def show_list(what: str) -> None:
    """The presets that have `what` in their names; else all of them, methods, and the runs below the folder `what`."""
    some = [name for name in PRESETS if what in name]
    if some and not Path(what).is_dir():
        return show_presets(some)
    show_presets(PRESETS)
    console.print(f"methods: dense (a layout without a core), {', '.join(METHODS)}")
    show_runs(Path(what))


def show_presets(names: Iterable[str]) -> None:
    """A table for each size, nano first, by name."""
    by_size: dict[str, list[str]] = {"nano": [], **{size: [] for size in SIZES}}
    for name in sorted(names):
        by_size[next((size for size in SIZES if size in name.split("-")), "nano")].append(name)
    for size, names in by_size.items():
        if names:
            table = Table(title=f"presets, {size}")
            for column in ("name", "method", "layout", "width", "context", "steps", "tokens"):
                table.add_column(column)
            for name in names:
                c = preset(name)
                tokens = f"{c.train.steps * c.train.tokens_per_step / 1e6:,.0f} M"
                table.add_row(name, c.model.method_name, c.model.layout, str(c.model.d_model), str(c.model.context),
                              f"{c.train.steps:,}", tokens)  # fmt: skip
            console.print(table)


def show_runs(folder: Path) -> None:
    """How far each run got."""
    runs = sorted(p.parent for p in folder.rglob("config.json") if (p.parent / "metrics.jsonl").exists())
    if not runs:
        console.print(f"no runs under {folder}")
        return
    table = Table(title=f"runs under {folder}")
    for column in ("run", "name", "method", "layout", "step", "validation loss", "config"):
        table.add_column(column)
    broken = []
    for run in runs:
        try:
            table.add_row(*_run_row(run, load(run / "config.json")))
        except ConfigError as error:
            broken.append(f"left out: {error}")
    console.print(table)
    for line in broken:
        console.print(line)


def _run_row(run: Path, config: RunConfig) -> list[str]:
    rows = read_metrics(run / "metrics.jsonl")
    steps = [row["step"] for row in rows if row["kind"] == "train"]
    losses = [row["loss"] for row in rows if row["kind"] == "eval"]
    return [
        str(run), config.name, config.model.method_name, config.model.layout,
        f"{max(steps, default=0):,}/{config.train.steps:,}", f"{losses[-1]:.4f}" if losses else "",
        config_hash(config)[:12],
    ]  # fmt: skip
