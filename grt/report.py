"""What `grt eval`, `generate`, `info` and `list` say: each a dict (the --json document), and a table for people."""

import itertools
import json
import math
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from grt.config import ConfigError, Layout, RunConfig, config_hash, load
from grt.data.loader import Split, bigram_entropy
from grt.data.prepare import open_source
from grt.data.tokenizer import get_tokenizer
from grt.evals.loss import evaluate
from grt.infer.generate import generate
from grt.methods import METHODS, build_model, depth_sampler
from grt.model import cost
from grt.model.precision import dtype_name, resolve_device, resolve_dtype
from grt.presets import PRESETS, preset
from grt.train.checkpoint import find_checkpoint, load_model, read_manifest, replace_file
from grt.train.folder import commit
from grt.train.log import Output, read_metrics
from grt.train.loop import open_data

console = Output()


def find_text(config: RunConfig, data: str | None) -> Split:
    """The run's validation split, or all of a text file or of a prepared folder (its training text first)."""
    if data is None:
        try:
            return open_data(config, quiet=True).split("val", config.data.windows)
        except ConfigError as error:
            raise ConfigError(f"{error} (This is the run's own text; --data evaluates on another.)") from None
    text = config.data
    return open_source(data, tokenizer=text.tokenizer, val_fraction=1.0, field=text.field, quiet=True).whole(
        text.windows
    )


def _trained_on(folder: Path) -> str | None:
    """sha256 of the validation tokens when the run of this checkpoint began, from its env.json."""
    for path in (folder / "env.json", folder.parent.parent / "env.json"):
        if path.exists():
            try:
                return json.loads(path.read_text(encoding="utf-8"))["data"]["val"]
            except (ValueError, KeyError, TypeError):
                warnings.warn(f"{path} is damaged: it cannot say which text the run was trained on", stacklevel=3)
    return None


def evaluation_report(
    run: Path, data: str | None = None, *, depths: Sequence[int] | None = None, limit: int | None = None,
    batch_size: int = 16, dtype: str = "fp32", device: str = "auto",
) -> dict[str, Any]:  # fmt: skip
    """The JSON document of `grt eval`: loss, perplexity, bits per byte and FLOPs at each depth, and every setting."""
    start = time.perf_counter()
    where = resolve_device(device)
    checkpoint, config = find_checkpoint(run)
    step = read_manifest(checkpoint)["step"]
    model, _ = load_model(checkpoint, where)
    split = find_text(config, data)
    if data is None and _trained_on(checkpoint) not in (None, split.sha256):
        warnings.warn(
            f"the validation text of {run} has changed since it was trained: expect another loss", stacklevel=2
        )
    precision = resolve_dtype(dtype, where, config.model.d_model)
    result = evaluate(model, split, depths=depths, limit=limit, batch_size=batch_size, dtype=precision)
    losses = result.loss_by_depth
    if not all(map(math.isfinite, losses.values())):
        raise ConfigError(f"the loss of {run} is not finite: its weights are broken, use another checkpoint.")
    head = cost.head_flops(config.model)
    return {
        "run": str(run),
        "step": step,
        "data": {"path": data or config.data.path, "sha256": split.sha256, "tokens": split.n_tokens},
        "windows": result.windows,
        "dtype": dtype_name(precision),
        "device": where.type,
        "loss": losses[max(losses)] if depths else losses[config.model.blocks.R],
        "loss_by_depth": {str(k): loss for k, loss in losses.items()},
        "depths": {
            str(k): {
                "loss": loss,
                "perplexity": math.exp(min(loss, 700.0)),
                "bits_per_byte": result.bits_per_byte(k),
                "flops_per_token": cost.executed_flops(model, k, config.model.context) + head,
            }
            for k, loss in losses.items()
        },
        "kv": "full",
        "exit": None,
        "routing": None,
        "seed": config.train.seed,
        "commit": commit(),
        "seconds": time.perf_counter() - start,
        "bigram_entropy": bigram_entropy(split) if split.vocab_size <= 1024 else None,
    }


def show_evaluation(report: dict[str, Any]) -> None:
    data = report["data"]
    table = Table(title=f"{report['run']} at step {report['step']} on {data['path']} ({report['windows']} windows)")
    for column in ("depth", "loss (nats)", "perplexity", "bits per byte", "MFLOPs per token"):
        table.add_column(column, justify="right")
    for k, row in report["depths"].items():
        numbers = f"{row['loss']:.4f}", f"{row['perplexity']:.3f}", f"{row['bits_per_byte']:.4f}"
        table.add_row(k, *numbers, f"{row['flops_per_token'] / 1e6:.2f}")
    console.print(table)
    if report["bigram_entropy"] is not None:
        console.print(f"bigram entropy of this text: {report['bigram_entropy']:.4f} nats")


def generation_report(
    run: Path, prompt: str, *, device: str = "auto", stream: Callable[[str], None] | None = None, **options: Any
) -> dict[str, Any]:
    """The JSON document of `grt generate`; `stream` is given the prompt and then the text as it comes."""
    model, config = load_model(run, resolve_device(device))
    tokenizer = get_tokenizer(config.data.tokenizer)
    try:
        ids = [int(i) for i in tokenizer.encode(prompt)] or [tokenizer.eot]
    except UnicodeEncodeError:
        raise ConfigError("the prompt is not UTF-8: convert it first.") from None
    new = generate(model, ids, stop=tokenizer.eot, **options)
    tokens: list[int] = []
    shown, start = "", time.perf_counter()
    first = list(itertools.islice(new, 1))  # before anything is shown: settings that cannot work are found here
    if stream:
        stream(prompt)
    for token in itertools.chain(first, new):
        tokens.append(token)
        text = tokenizer.decode(tokens)
        if stream and not text.endswith("\ufffd"):  # a character whose last bytes are still to come
            stream(text[len(shown) :])
            shown = text
    seconds = time.perf_counter() - start
    text = tokenizer.decode(tokens)
    if stream:
        stream(text[len(shown) :])
    depth = options.get("depth") or config.model.blocks.R
    return {
        "prompt": prompt,
        "text": text,
        "tokens": tokens,
        "finish_reason": "length" if len(tokens) == options["max_new_tokens"] else "stop",
        "depths": [depth] * len(tokens),
        "mean_depth": float(depth),
        "tokens_per_s": len(tokens) / max(seconds, 1e-9),
    }


def show_run(out: Path, device: str = "auto") -> None:
    """After training: loss at each depth on the validation text, a sample (kept in sample.txt), where the curve is."""
    config = load(out / "config.json")
    dtype = json.loads((out / "env.json").read_text(encoding="utf-8"))["dtype"]
    report = evaluation_report(out, limit=4 * config.train.eval_windows, dtype=dtype, device=config.train.device)
    show_evaluation(report)
    options = {"temperature": 0.8, "top_k": 0, "top_p": 1.0, "seed": 1337, "max_new_tokens": 400}
    text = generation_report(out, "", device=device, **options)["text"]
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
            "training": cost.mean_over_depths(sampler, lambda depth: cost.training_flops(model, depth, context)),
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


def show_info(report: dict[str, Any]) -> None:
    table = Table(title=f"{report['name']}: {report['method']} {report['layout']}", show_header=False)
    flops = report["flops_per_token"]
    rows = [(f"parameters, {k.replace('_', ' ')}", f"{v:,}") for k, v in report["parameters"].items()]
    rows += [("block executions", str(report["block_executions"]))]
    rows += [(f"MFLOPs per token, {k.replace('_', ' ')}", f"{v / 1e6:,.2f}") for k, v in flops.items()]
    rows += [(f"KV bytes per token, {k}", f"{v:,}") for k, v in report["kv_bytes_per_token"].items()]
    for strategy, by_batch in report["decode_memory_bytes"].items():
        for batch, size in by_batch.items():
            rows.append((f"decode memory, {strategy}, batch {batch} (bf16, full context)", f"{size / 2**20:,.1f} MiB"))
    for row in rows:
        table.add_row(*row)
    console.print(diagram(Layout.parse(report["layout"])))
    console.print(table)


def show_list(folder: Path) -> None:
    """Presets, methods and the runs below `folder` with how far each got."""
    table = Table(title="presets")
    for column in ("name", "method", "layout", "width", "context", "steps", "tokens"):
        table.add_column(column)
    for name in PRESETS:
        c = preset(name)
        tokens = f"{c.train.steps * c.train.tokens_per_step / 1e6:,.0f} M"
        table.add_row(name, c.model.method_name, c.model.layout, str(c.model.d_model), str(c.model.context),
                      f"{c.train.steps:,}", tokens)  # fmt: skip
    console.print(table)
    console.print(f"methods: dense (a layout without a core), {', '.join(METHODS)}")
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
