"""`grt compare`: what several runs cost and reached, as rows of a table and as curves over a common axis.

Everything comes from a folder's config.json and metrics.jsonl, so a committed model folder will do, although its log
holds only some of the training steps: a step that was not logged drew the depths that the sampler draws again.
"""

from itertools import accumulate
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from rich.table import Table

from grt.config import RunConfig, load
from grt.console import Output
from grt.data.tokenizer import get_tokenizer
from grt.errors import ConfigError
from grt.methods import build_model, depth_sampler
from grt.model.cost import parameters, training_flops
from grt.model.depth import Depth
from grt.runs.metrics import read_metrics
from grt.runs.paths import facts_of
from grt.runs.plots import Curve, draw_comparison

Axis = Literal["tokens", "flops", "seconds"]
LOSSES = {"loss": "loss (nats per token)", "bits_per_byte": "bits per byte"}
LABELS = {"tokens": "training tokens", "flops": "training FLOPs", "seconds": "seconds of training"}


class Finished:
    """The log of a run with what its steps cost."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.config = folder, load(folder / "config.json")
        if not (folder / "metrics.jsonl").is_file():
            raise ConfigError(f"{folder / 'metrics.jsonl'} does not exist: give a run's folder or a model folder.")
        rows = read_metrics(folder / "metrics.jsonl")
        self.train = [row for row in rows if row["kind"] == "train"]
        self.evals = [row for row in rows if row["kind"] == "eval"]
        if not self.evals:
            raise ConfigError(f"{folder / 'metrics.jsonl'} holds no validation yet: train the run further.")
        with torch.device("meta"):
            self.model = build_model(self.config.model)
        self.steps = max(row["step"] for row in self.train + self.evals)
        self.flops = self._flops_after_step()

    def _flops_after_step(self) -> list[float]:
        """Training FLOPs up to each step: forward and backward pass as executed at the drawn depths, with the head."""
        config: RunConfig = self.config
        logged = {row["step"]: row["depth"] for row in self.train}
        draw = depth_sampler(config.model, config.train.depth)
        at_depth: dict[int, float] = {}
        per_step = []
        for step in range(1, self.steps + 1):
            slots = range(config.n_slots)
            depths = logged.get(step) or [draw(config.train.seed, step - 1, slot).steps for slot in slots]
            for depth in set(depths) - at_depth.keys():
                at_depth[depth] = training_flops(
                    self.model, Depth(depth, draw.grad_steps), config.model.context, config.train.stage
                )
            per_step.append(config.train.tokens_per_step * sum(at_depth[d] for d in depths) / len(depths))
        return list(accumulate(per_step, initial=0.0))

    def seconds(self, step: int) -> float | None:
        """Of training, validation left out; between two logged steps, in proportion."""
        if not self.train:
            return None
        steps, seconds = ([0.0, *(float(row[key]) for row in self.train)] for key in ("step", "seconds"))
        return float(np.interp(step, steps, seconds))

    def x(self, step: int, axis: Axis) -> float:
        if axis == "flops":
            return self.flops[step]
        if axis == "tokens":
            return float(step * self.config.train.tokens_per_step)
        seconds = self.seconds(step)
        if seconds is None:
            raise ConfigError(f"{self.folder / 'metrics.jsonl'} logs no time of training: leave --x seconds out.")
        return seconds

    def curve(self, label: str, axis: Axis, y: str = "loss") -> Curve:
        """y: of LOSSES. Of training text no row says how many bytes its tokens had: without it in bits per byte."""
        train = self.train if y == "loss" else []
        return Curve(
            label,
            [self.x(row["step"], axis) for row in self.evals],
            [row[y] for row in self.evals],
            [self.x(row["step"], axis) for row in train],
            [row["loss_lm"] for row in train],
        )

    def row(self) -> dict[str, Any]:
        last, best = self.evals[-1], min(self.evals, key=lambda row: row["loss"])
        model = self.config.model
        return {
            "run": str(self.folder),
            "name": self.config.name,
            "method": model.method_name,
            "layout": model.layout,
            "parameters": parameters(self.model)["total"],
            "tokens": self.steps * self.config.train.tokens_per_step,
            "training_flops": self.flops[self.steps],
            "seconds": self.seconds(self.steps),
            "loss": last["loss"],
            "bits_per_byte": last["bits_per_byte"],
            "best_loss": best["loss"],
            "best_step": best["step"],
            "validation_text": self._data("val"),
            "corpus_sha256": self._data("corpus_sha256"),
        }

    def _data(self, of: str) -> str | None:
        """sha256 of the validation tokens (val) or of all the text (corpus_sha256), where env.json has it."""
        data = facts_of(self.folder).get("data")
        return data.get(of) if isinstance(data, dict) else None

    @property
    def tokenizer(self) -> str:
        """What tells it from others: its sha256 where env.json has it."""
        facts = facts_of(self.folder).get("tokenizer")
        known = facts.get("sha256") if isinstance(facts, dict) else None
        return known if isinstance(known, str) else get_tokenizer(self.config.data.tokenizer).sha256


def comparison_report(folders: list[Path], axis: Axis, out: Path) -> dict[str, Any]:
    """The JSON document of `grt compare`, whose plot is drawn into `out`."""
    if not folders:
        raise ConfigError("no run is named: give one or more folders of runs.")
    if out.suffix not in (".png", ".pdf", ".svg"):
        raise ConfigError(f"--out {out} is no picture: end its name in .png, .pdf or .svg.")
    runs = [Finished(folder) for folder in folders]
    names = [run.folder.resolve().name for run in runs]
    labels = [name if names.count(name) == 1 else str(run.folder) for name, run in zip(names, runs, strict=True)]
    y = "loss" if len({run.tokenizer for run in runs}) == 1 else "bits_per_byte"  # nats of other tokens are others
    curves = [run.curve(label, axis, y) for label, run in zip(labels, runs, strict=True)]
    draw_comparison(curves, LABELS[axis], LOSSES[y], out)
    return {"x": axis, "y": y, "plot": str(out), "rows": [run.row() for run in runs]}


def show_comparison(report: dict[str, Any]) -> None:
    console, table = Output(), Table()
    for column in ("run", "name", "method", "layout", "parameters", "tokens", "training FLOPs", "seconds",
                   "last validation loss", "bits per byte", "best step"):  # fmt: skip
        table.add_column(column, justify="left" if column in ("run", "name", "method", "layout") else "right")
    for row in report["rows"]:
        table.add_row(
            row["run"], row["name"], row["method"], row["layout"], f"{row['parameters']:,}", f"{row['tokens']:,}",
            f"{row['training_flops']:.3e}", "" if row["seconds"] is None else f"{row['seconds']:,.0f}",
            f"{row['loss']:.4f}", f"{row['bits_per_byte']:.4f}", f"{row['best_step']:,} ({row['best_loss']:.4f})",
        )  # fmt: skip
    console.print(table)
    if report["y"] != "loss":
        console.print("the runs have different tokenizers: bits per byte compare, and are drawn; losses do not")
    text = "validation_text" if report["y"] == "loss" else "corpus_sha256"
    if len({row[text] for row in report["rows"]} - {None}) > 1:
        console.print("the runs were validated on different texts: their losses do not compare")
    console.print(f"plot: {report['plot']}")
