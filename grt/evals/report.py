"""What `grt eval` says: a dict (the --json document), and a table for people."""

import json
import math
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from grt.cache.kv import KVCache
from grt.config import RunConfig, Weights
from grt.console import Output, each
from grt.data.documents import DocumentSplit
from grt.data.loader import Split, bigram_entropy
from grt.data.prepare import open_source
from grt.data.tasks import TaskSplit
from grt.data.tokenizer import get_tokenizer
from grt.decode.quantize import keep_weights
from grt.device import dtype_name, resolve_device, resolve_dtype
from grt.errors import ConfigError
from grt.evals.accuracy import accuracy_by_depth
from grt.evals.cloze import cloze_accuracy, dump_items, make_items
from grt.evals.loss import Evaluation, evaluate
from grt.evals.sharing import sharing_loss
from grt.exits.kept import NOBODY, Wanted, evaluated_exit, find_exit, show_exit
from grt.exits.policies import Exit
from grt.model import cost
from grt.model.loop import RecurrentDepthModel
from grt.presets import change
from grt.runs.checkpoint import find_checkpoint, load_model, read_manifest
from grt.runs.folder import commit
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


def known_text(run: Path, checkpoint: Path, config: RunConfig, data: str | None) -> Split:
    """`find_text`, with a warning where the run's own text is not what it was trained beside."""
    split = find_text(config, data)
    if data is None and _trained_on(checkpoint) not in (None, split.sha256):
        warnings.warn(
            f"the validation text of {run} has changed since it was trained: expect another loss", stacklevel=3
        )
    return split


def evaluation_report(
    run: Path, data: str | None = None, *, depths: Sequence[int] | None = None, limit: int | None = None,
    batch_size: int = 16, dtype: str = "fp32", device: str = "auto", routing: str | None = None,
    kv: Sequence[str] = (), cloze: int = 0, exit: Wanted = NOBODY, weights: Weights | None = None,
) -> dict[str, Any]:  # fmt: skip
    """The JSON document of `grt eval`: loss, perplexity, bits per byte and FLOPs at each depth, and every setting.

    routing: as in `evaluate`; None: by the threshold where there is a router, with the loss of top-k beside it.
    kv: strategies whose loss is measured too, and with it accuracy on `cloze` items. exit: what tokens are worth that
    leave on their own, after the deepest of `depths` at the latest. weights: as for keep_weights.
    """
    start, where = time.perf_counter(), resolve_device(device)
    model, config = load_model(checkpoint := find_checkpoint(run)[0], where)
    keep_weights(model, weights, torch.float32)
    halting = find_exit(checkpoint, model, exit, max(depths) if depths else None)
    check_sharing(model, kv, cloze, halting)
    split = known_text(run, checkpoint, config, data)
    options = {"limit": limit, "batch_size": batch_size, "dtype": resolve_dtype(dtype, where, config.model.d_model)}
    if both := routing is None and model.rule.routing is not None:
        routing = "threshold"
    result = evaluate(model, split, depths=depths, routing=routing, **options)
    if routing == "topk":
        warnings.warn("routing topk looks at later tokens: this loss leaks them, it is not a result", stacklevel=2)
    losses = finite_losses(result, run)
    added: dict[str, Any] = {"weights": weights or "fp32", **({"extras": result.extras} if result.extras else {})}
    if both:
        added["topk_loss"] = evaluate(model, split, depths=[max(losses)], routing="topk", **options).deepest
    if isinstance(split, TaskSplit):
        added["accuracy_by_depth"] = accuracy_by_depth(model, split, depths=sorted(losses), **options)
    if kv:
        added["sharing"] = sharing_rows(model, config, split, data, kv, cloze, max(losses), **options)
    return {
        "run": str(run),
        "step": read_manifest(checkpoint)["step"],
        "data": {"path": data or config.data.path, "sha256": split.sha256, "tokens": split.n_tokens},
        "windows": result.windows,
        "dtype": dtype_name(options["dtype"]),
        "device": where.type,
        "loss": losses[max(depths) if depths else config.model.blocks.R],
        "loss_by_depth": {str(k): loss for k, loss in losses.items()},
        "depths": _depth_rows(result, model),
        "kv": "full",
        "exit": evaluated_exit(model, split, halting, **options) if halting else None,
        "routing": routing,
        "seed": config.train.seed,
        "commit": commit(),
        "seconds": time.perf_counter() - start,
        "bigram_entropy": bigram_entropy(split) if split.has_bigrams else None,
        **added,
    }


def finite_losses(result: Evaluation, run: Path) -> dict[int, float]:
    if not all(map(math.isfinite, [*result.loss_by_depth.values(), *result.extras.values()])):
        raise ConfigError(f"the loss of {run} is not finite: its weights are broken, use another checkpoint.")
    return result.loss_by_depth


def check_sharing(model: RecurrentDepthModel, kv: Sequence[str], cloze: int, halting: Exit | None) -> None:
    """ConfigError, before anything is computed, for strategies that there are not or not for this method."""
    if halting and kv:
        raise ConfigError("exit is evaluated with keys of every step, kv full: leave --kv out, or --exit.")
    if cloze < 0 or (cloze and not kv):
        raise ConfigError(f"cloze is {cloze}: give a number of items, and --kv with the strategies to compare.")
    for strategy in kv:
        KVCache(model, 1, 1, strategy=strategy)


def sharing_rows(
    model: RecurrentDepthModel, config: RunConfig, split: Split, data: str | None, kv: Sequence[str], cloze: int,
    steps: int, limit: int | None, batch_size: int, dtype: torch.dtype,
) -> dict[str, dict[str, Any]]:  # fmt: skip
    """Strategy -> loss with its standard error over windows and, when asked, cloze accuracy with its own."""
    items, tokenizer = [], get_tokenizer(config.data.tokenizer)
    if cloze:
        documents = find_text(change(config, data={"windows": "document"}), data)
        assert isinstance(documents, DocumentSplit)
        items = make_items(documents, tokenizer, cloze)
    rows: dict[str, dict[str, Any]] = {}
    for strategy in each(kv, "sharing keys and values"):
        loss, error = sharing_loss(model, split, strategy, limit=limit, batch_size=batch_size, dtype=dtype, steps=steps)
        rows[strategy] = {"depth": steps, "loss": loss, "loss_se": error if math.isfinite(error) else None}
        if items:
            accuracy, error = cloze_accuracy(model, items, tokenizer, strategy, dtype=dtype, steps=steps)
            rows[strategy] |= {"cloze": accuracy, "cloze_se": error, "cloze_sha256": dump_items(items)}
    return rows


def _depth_rows(result: Evaluation, model: RecurrentDepthModel) -> dict[str, dict[str, float]]:
    head = cost.head_flops(model.config)
    return {
        str(k): {
            "loss": loss,
            "perplexity": math.exp(min(loss, 700.0)),
            "bits_per_byte": result.bits_per_byte(k),
            "flops_per_token": cost.executed_flops(model, k, model.config.context) + head,
        }
        for k, loss in result.loss_by_depth.items()
    }


def show_sharing(rows: dict[str, dict[str, Any]]) -> None:
    depth = next(iter(rows.values()))["depth"]
    table = Table(title=f"keys and values shared over {depth} steps: second half of each window, token by token")
    with_cloze = any("cloze" in row for row in rows.values())
    for column in ("strategy", "loss (nats)", "+-", *(("cloze accuracy", "+-") if with_cloze else ())):
        table.add_column(column, justify="left" if column == "strategy" else "right")
    for strategy, row in rows.items():
        error = "" if row["loss_se"] is None else f"{row['loss_se']:.4f}"
        cloze = (f"{row['cloze']:.3f}", f"{row['cloze_se']:.3f}") if with_cloze else ()
        table.add_row(strategy, f"{row['loss']:.4f}", error, *cloze)
    console.print(table)


def show_extras(extras: dict[str, float]) -> None:
    """What the method adds: exits by q as a table of their own, the rest one line each."""
    exits = {name.partition("=")[2]: extras[name] for name in extras if name.startswith("loss at q=")}
    for name, mean in extras.items():
        if " at q=" not in name:
            console.print(f"{name.replace('_', ' ')}, mean over the tokens: {mean:.4f}")
    if exits:
        table = Table(title="each token leaves at the first step where the exit distribution has reached q")
        for column in ("q", "mean depth", "loss (nats)"):
            table.add_column(column, justify="right")
        for q, loss in exits.items():
            table.add_row(q, f"{extras[f'depth at q={q}']:.3f}", f"{loss:.4f}")
        console.print(table)


def show_accuracy(accuracy: dict[int, dict[str, float]]) -> None:
    groups = next(iter(accuracy.values()))
    table = Table(title="share of answers that are right, the tokens before them given")
    for column in ("depth", *groups):
        table.add_column(column, justify="right")
    for k, shares in accuracy.items():
        table.add_row(str(k), *(f"{shares[group]:.4f}" for group in groups))
    console.print(table)


def show_evaluation(report: dict[str, Any]) -> None:
    data = report["data"]
    kept = "" if report["weights"] == "fp32" else f", weights {report['weights']}"
    table = Table(
        title=f"{report['run']} at step {report['step']} on {data['path']} ({report['windows']} windows{kept})"
    )
    for column in ("depth", "loss (nats)", "perplexity", "bits per byte", "MFLOPs per token"):
        table.add_column(column, justify="right")
    for k, row in report["depths"].items():
        numbers = f"{row['loss']:.4f}", f"{row['perplexity']:.3f}", f"{row['bits_per_byte']:.4f}"
        table.add_row(k, *numbers, f"{row['flops_per_token'] / 1e6:.2f}")
    console.print(table)
    show_extras(report.get("extras", {}))
    if "accuracy_by_depth" in report:
        show_accuracy(report["accuracy_by_depth"])
    if report["exit"]:
        show_exit(report["exit"], report["loss"])
    if "sharing" in report:
        show_sharing(report["sharing"])
    if report["routing"]:
        console.print("MFLOPs are those of the routers' capacities, which the threshold keeps to only roughly")
    if "topk_loss" in report:
        console.print(f"top-k over the whole sequence (leaks later tokens, not a result): {report['topk_loss']:.4f}")
    if report["bigram_entropy"] is not None:
        console.print(f"bigram entropy of this text: {report['bigram_entropy']:.4f} nats")
