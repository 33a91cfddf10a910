"""curve.png: the loss of one run or of several, over tokens; compare.png: of several over any axis."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from grt.runs.metrics import read_metrics


def smooth(values: list[float], width: int) -> np.ndarray:
    """Running mean over `width` points, shorter at the start."""
    sums = np.cumsum(np.insert(np.asarray(values, dtype=float), 0, 0.0))
    ends = np.arange(1, len(values) + 1)
    starts = np.maximum(0, ends - width)
    return (sums[ends] - sums[starts]) / (ends - starts)


@contextmanager
def figure_of_losses(x_label: str, out: Path, y_label: str = "loss (nats per token)") -> Iterator[Any]:
    """Axes to draw losses on; the figure appears under its name when it is whole."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 5), layout="constrained")
    temporary = out.with_name(f".{out.name}.tmp.png")
    try:
        yield axes
        axes.set_xlabel(x_label)
        axes.set_ylabel(y_label)
        axes.grid(alpha=0.3)
        if axes.has_data():
            axes.legend(fontsize=8)
        figure.savefig(temporary, dpi=120, format=out.suffix.lstrip(".") or "png")
        temporary.replace(out)
    finally:  # a training run goes on after a picture that failed
        plt.close(figure)
        temporary.unlink(missing_ok=True)


@dataclass
class Curve:
    """One run's losses: at `eval_x`, the validations at full depth; at `train_x`, the logged training steps."""

    label: str
    eval_x: list[float]
    eval_loss: list[float]
    train_x: list[float]
    train_loss: list[float]


def draw_comparison(curves: Sequence[Curve], x_label: str, y_label: str, out: Path) -> None:
    """Validation loss of each run (marked) and its training loss (a faint smoothed line)."""
    with figure_of_losses(x_label, out, y_label) as axes:
        for i, curve in enumerate(curves):
            color = f"C{i}"
            axes.plot(curve.eval_x, curve.eval_loss, marker="o", ms=3, lw=1.3, color=color, label=curve.label)
            if curve.train_x:
                losses = smooth(curve.train_loss, max(1, len(curve.train_loss) // 50))
                axes.plot(curve.train_x, losses, lw=0.8, alpha=0.35, color=color)


def draw_curve(runs: list[Path], out: Path) -> None:
    """Training loss (a smoothed line) and validation loss at each depth, against tokens."""
    with figure_of_losses("training tokens", out) as axes:
        for run in runs:
            _draw_run(axes, run, f"{run.name} " if len(runs) > 1 else "")


def _draw_run(axes: Any, run: Path, label: str) -> None:
    from matplotlib import pyplot as plt

    rows = read_metrics(run / "metrics.jsonl")
    train = [row for row in rows if row["kind"] == "train"]
    evals = [row for row in rows if row["kind"] == "eval"]
    if train:
        losses = smooth([row["loss_lm"] for row in train], max(1, len(train) // 50))
        axes.plot([row["tokens"] for row in train], losses, lw=1, alpha=0.6, label=f"{label}training")
    depths = sorted({int(k) for row in evals for k in row["loss_by_depth"]})
    tokens_per_step = train[0]["tokens"] / train[0]["step"] if train else 1
    for i, depth in enumerate(depths):
        color = plt.get_cmap("viridis")(i / max(1, len(depths) - 1) * 0.9)
        logged = [row for row in evals if str(depth) in row["loss_by_depth"]]
        points = [(row["step"] * tokens_per_step, row["loss_by_depth"][str(depth)]) for row in logged]
        name = f"validation, depth {depth}" if len(depths) > 1 else "validation"
        axes.plot(*zip(*points, strict=True), marker="o", ms=3, lw=1, color=color, label=label + name)
