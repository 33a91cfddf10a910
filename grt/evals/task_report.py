"""What `grt eval --tasks` says: a dict (the --json document), and a table for people."""

import importlib
import importlib.metadata
import math
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from rich.table import Table

from grt.cache.kv import KVCache
from grt.config import VERSION, RunConfig, Weights
from grt.console import Output, working
from grt.data.tokenizer import Tokenizer, get_tokenizer
from grt.decode.quantize import keep_weights
from grt.device import dtype_name, resolve_device, resolve_dtype
from grt.errors import ConfigError
from grt.evals.continuations import AtOnce, Halting, HaltingTokenByToken, Scorer, TokenByToken
from grt.evals.scores import ScoreFile, Scores
from grt.exits.kept import NOBODY, Wanted, find_exit, home_of
from grt.exits.policies import Exit
from grt.model.loop import RecurrentDepthModel
from grt.runs.checkpoint import find_checkpoint, load_model, read_manifest
from grt.runs.folder import commit
from grt.schema import at_least, identity

console = Output()


def task_report(
    run: Path, names: Sequence[str], *, data_dir: Path | None = None, depths: Sequence[int] | None = None,
    kv: Sequence[str] = (), limit: int | None = None, batch_size: int | None = None, dtype: str = "fp32",
    device: str = "auto", cache: Path | None = None, exit: Wanted = NOBODY, weights: Weights | None = None,
) -> dict[str, Any]:  # fmt: skip
    """The JSON document of `grt eval --tasks`: what lm-evaluation-harness measures, zero-shot, with standard errors, at
    each of `depths` (default R) under each of the strategies `kv` (default full), and every setting.

    batch_size: requests at a time (None: as many as make BATCH_TOKENS). cache: where scores are kept (default:
    RUN/scores). exit: tokens leave on their own, at each depth at the latest. weights: as for keep_weights. ConfigError
    for what cannot be measured, before anything is computed.
    """
    start, benchmarks = time.perf_counter(), need_lm_eval()
    for name, value in (("limit", limit), ("batch_size", batch_size)):
        at_least(name, 1 if value is None else value, 1)
    where, checkpoint = resolve_device(device), find_checkpoint(run)[0]
    model, config = load_model(checkpoint, where)
    keep_weights(model, weights, torch.float32)
    precision = resolve_dtype(dtype, where, config.model.d_model)
    ways, halting = ways_to_score(model, depths, kv, checkpoint, exit, precision)
    tokenizer = get_tokenizer(config.data.tokenizer)
    decided_by = settings(config, checkpoint, tokenizer, model, precision, halting)
    folder, kept = cache or home_of(checkpoint) / "scores", {"kept": weights} if weights in ("bf16", "int8") else {}
    with tempfile.TemporaryDirectory() as scratch:
        tasks = benchmarks.load_tasks(list(dict.fromkeys(names)), data_dir, Path(scratch))
        rows = []
        for strategy, (scorer, at) in ways.items():
            file = ScoreFile(folder, {**decided_by, **kept, "kv": strategy})
            scores = Scores(scorer, at, file, config.model.context, batch_size)
            rows += [{"kv": strategy, **row} for row in measure(tasks, scores, tokenizer, limit)]
        described = {name: benchmarks.describe(task, limit) for name, task in tasks.items()}
    return {
        "run": str(run),
        "step": read_manifest(checkpoint)["step"],
        "tasks": described,
        "results": rows,
        "averages": averages(rows),
        "data_dir": None if data_dir is None else str(data_dir),
        "limit": limit,
        "batch_size": batch_size or "auto",
        **decided_by,
        "kept": weights or "fp32",
        "kv": list(ways),
        "depths": sorted({row["depth"] for row in rows}),
        "seed": config.train.seed,
        "commit": commit(),
        "versions": {name: importlib.metadata.version(name) for name in ("lm_eval", "datasets", "torch")},
        "scores": str(folder),
        "seconds": time.perf_counter() - start,
    }


def need_lm_eval() -> ModuleType:
    try:
        return importlib.import_module("grt.evals.benchmarks")
    except ModuleNotFoundError as error:
        remedy = "pip install 'gated-recurrent-transformer[eval]'"
        raise ConfigError(f"tasks needs lm-eval, and {error.name} is missing: {remedy}.") from None


def ways_to_score(
    model: RecurrentDepthModel, depths: Sequence[int] | None, kv: Sequence[str], checkpoint: Path, exit: Wanted,
    dtype: torch.dtype,
) -> tuple[dict[str, tuple[Scorer, list[int]]], Exit | None]:  # fmt: skip
    """Strategy -> how to score under it and at which depths. ConfigError for what this model does not have."""
    R = model.config.blocks.R
    depths = sorted(set(depths)) if depths else [R]
    model.check_depth(min(depths[0], R), least=0)
    model.check_depth(depths[-1], least=0)
    kv = list(dict.fromkeys(kv)) or ["full"]
    for strategy in kv:
        KVCache(model, 1, 1, strategy=strategy)
    if exit.budget is not None:
        raise ConfigError("budget is of texts that a model writes: leave it out with --tasks.")
    halting = find_exit(checkpoint, model, exit, depths[-1])
    if halting is None:
        return {strategy: (scorer_of(model, strategy, depths, dtype), depths) for strategy in kv}, None
    exits = [Exit.of(model, halting.policy, depth) for depth in depths]
    return {strategy: (halting_scorer_of(model, strategy, exits, dtype), depths) for strategy in kv}, halting


def settings(
    config: RunConfig, checkpoint: Path, tokenizer: Tokenizer, model: RecurrentDepthModel, dtype: torch.dtype,
    exit: Exit | None,
) -> dict[str, Any]:  # fmt: skip
    """What decides the score of a piece of text, beside its depth and the sharing of keys and values."""
    files = read_manifest(checkpoint)["files"]
    return {
        "grt": VERSION,
        "weights": next(entry["sha256"] for name, entry in files.items() if name.startswith("model.safetensors")),
        "model": identity(config.model),
        "tokenizer": {"name": tokenizer.name, "sha256": tokenizer.sha256},
        "context": config.model.context,
        "exit": exit and {"policy": exit.policy.name, "threshold": exit.policy.threshold, "steps": exit.steps},
        "routing": model.rule.routing,
        "dtype": dtype_name(dtype),
        "device": model.device.type,
    }


def scorer_of(model: RecurrentDepthModel, strategy: str, depths: Sequence[int], dtype: torch.dtype) -> Scorer:
    """Keys and values of every step need no cache, and one pass gives every depth."""
    if strategy == "full":
        return AtOnce(model, depths, dtype)
    return TokenByToken(model, depths, dtype, strategy)


def halting_scorer_of(model: RecurrentDepthModel, strategy: str, exits: Sequence[Exit], dtype: torch.dtype) -> Scorer:
    if strategy == "full":
        return Halting(model, exits, dtype)
    return HaltingTokenByToken(model, exits, dtype, strategy)


def measure(tasks: dict[str, Any], scores: Scores, tokenizer: Tokenizer, limit: int | None) -> list[dict[str, Any]]:
    """A row of numbers for each task and depth. Scores are on the disk when a row needs them for the first time."""
    from grt.evals.harness import HarnessModel, evaluate_task

    rows = []
    for name, task in tasks.items():
        with working(name, kept="the same command goes on with the scores so far") as shown:
            for depth in scores.depths:
                model = HarnessModel(scores, depth, tokenizer, lambda done, of, to=shown: to.reach(done, total=of))
                row = {"task": name, "depth": depth, **evaluate_task(task, model, limit)}
                mean = model.steps / model.tokens
                rows.append({**row, "mean_depth": mean, "truncated_requests": model.truncated})
    return rows


def averages(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Means over the tasks that have an accuracy: of acc; and of acc_norm, or acc where a task has no acc_norm."""
    found = []
    for kv, depth in dict.fromkeys((row["kv"], row["depth"]) for row in rows):
        of = [row for row in rows if (row["kv"], row["depth"]) == (kv, depth) and "acc" in row]
        if of:
            means = {"acc": [row["acc"] for row in of], "acc_norm": [row.get("acc_norm", row["acc"]) for row in of]}
            found.append({"kv": kv, "depth": depth, **{name: math.fsum(x) / len(x) for name, x in means.items()}})
    return found


def show_tasks(report: dict[str, Any]) -> None:
    rows, tasks = report["results"], report["tasks"]
    metrics = list(dict.fromkeys(name for row in rows for name in row if f"{name}_stderr" in row))
    kept = "" if report["kept"] == "fp32" else f", weights {report['kept']}"
    table = Table(title=f"{report['run']} at step {report['step']}{kept}, zero-shot, with standard errors")
    for column in ("task", "kv", "depth", "mean depth", "items", *metrics):
        table.add_column(column, justify="left" if column in ("task", "kv") else "right")
    for row in rows:
        cells = (number(row.get(name), row.get(f"{name}_stderr")) for name in metrics)
        told = row["task"], row["kv"], str(row["depth"]), f"{row['mean_depth']:.2f}", str(tasks[row["task"]]["items"])
        table.add_row(*told, *cells)
    for row in report["averages"]:
        cells = (number(row.get(name), None) for name in metrics)
        table.add_row("average", row["kv"], str(row["depth"]), "", "", *cells)
    console.print(table)
    if report["averages"] and "acc_norm" in metrics:
        console.print("average of acc_norm: acc where a task has no acc_norm")
    if cut := {row["task"]: row["truncated_requests"] for row in rows if row["truncated_requests"]}:
        told = ", ".join(f"{name} {count}" for name, count in cut.items())
        console.print(f"requests that lost the start of their context of {report['context']} tokens: {told}")


def number(value: float | None, error: float | None) -> str:
    if value is None:
        return ""
    digits = ".4f" if abs(value) < 100 else ".5g"
    return f"{value:{digits}}" + ("" if error is None else f" +- {error:{digits}}")
