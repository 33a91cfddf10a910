"""Exits of a run: the threshold that `grt calibrate` found for a policy is kept in the run's exits.json, and taken from
there where `--exit` names the policy alone. And what `grt eval --exit` says."""

import json
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.table import Table

from grt.console import Output
from grt.data.loader import Split
from grt.errors import ConfigError
from grt.evals.early_exit import Halted, halted_loss
from grt.exits.policies import Exit, asked_exit
from grt.model import cost
from grt.model.loop import RecurrentDepthModel
from grt.runs.checkpoint import find_checkpoint, read_manifest

FILE = "exits.json"


class Wanted(NamedTuple):
    """What --exit, --threshold and --budget ask for."""

    text: str | None = None
    threshold: float | None = None
    budget: float | None = None


NOBODY = Wanted()
console = Output()


def home_of(checkpoint: Path) -> Path:
    """The folder of the run that a checkpoint is of, or the model folder itself."""
    return checkpoint.parents[1] if checkpoint.parent.name == "checkpoints" else checkpoint


def read_exits(folder: Path) -> dict[str, dict[str, Any]]:
    """Policy -> what calibration kept; empty where there is no file."""
    path = folder / FILE
    try:
        kept = json.loads(path.read_text(encoding="utf-8"))
        if not all(isinstance(entry["threshold"], float) and isinstance(entry["step"], int) for entry in kept.values()):
            raise ValueError
        return kept
    except FileNotFoundError:
        return {}
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ConfigError(f"{path} is damaged: remove it, and find thresholds anew by grt calibrate.") from None


def find_exit(run: Path, model: RecurrentDepthModel, wanted: Wanted, steps: int | None = None) -> Exit | None:
    """None where nothing is asked for. steps: the most that a token takes, default R."""
    return asked_exit(model, *wanted, steps, lambda name: kept_threshold(run, name))


def kept_threshold(run: Path, name: str) -> float:
    checkpoint, _ = find_checkpoint(run)
    kept = read_exits(home_of(checkpoint)).get(name)
    if kept is None:
        raise ConfigError(
            f"exit {name} has no threshold: give one as {name}:NUMBER, or find one by "
            f"`grt calibrate RUN --exit {name} --mean-depth 3`."
        )
    step = read_manifest(checkpoint)["step"]
    if kept["step"] != step:
        warnings.warn(
            f"the threshold of exit {name} was found at step {kept['step']}, this is step {step}: calibrate it again",
            stacklevel=2,
        )
    return kept["threshold"]


def result_of(model: RecurrentDepthModel, exit: Exit, result: Halted) -> dict[str, Any]:
    return {
        "policy": exit.policy.name,
        "threshold": exit.policy.threshold,
        "budget": exit.budget,
        "steps": exit.steps,
        "loss": result.loss,
        "mean_depth": result.mean_depth,
        "depth_shares": {str(k): share for k, share in result.shares.items()},
        "reads_out": exit.policy.reads_out,
        "flops_per_token": cost.halting_flops(
            model, result.shares, model.config.context, exit.policy.reads_out
        ),
    }  # fmt: skip


def evaluated_exit(
    model: RecurrentDepthModel, split: Split, exit: Exit, limit: int | None, batch_size: int, dtype: torch.dtype
) -> dict[str, Any]:
    """The `exit` part of `grt eval`'s document."""
    return result_of(model, exit, halted_loss(model, split, exit, limit=limit, batch_size=batch_size, dtype=dtype))


def show_exit(entry: dict[str, Any], loss: float) -> None:
    budget = "" if entry["budget"] is None else f", budget {entry['budget']:g}"
    table = Table(title=f"each token leaves on its own: {entry['policy']}:{entry['threshold']:.6g}{budget}")
    for column in ("mean depth", "loss (nats)", "more than all steps", "MFLOPs per token"):
        table.add_column(column, justify="right")
    flops = f"{entry['flops_per_token'] / 1e6:.2f}"
    table.add_row(f"{entry['mean_depth']:.3f}", f"{entry['loss']:.4f}", f"{entry['loss'] - loss:+.4f}", flops)
    console.print(table)
    console.print("tokens by steps: " + ", ".join(f"{k}: {share:.1%}" for k, share in entry["depth_shares"].items()))
    if entry["reads_out"]:
        console.print("MFLOPs include coda and head after each step, which this policy looks at")
