"""curve.png: the loss of one run or of several, over tokens."""

from pathlib import Path

import numpy as np

from grt.train.log import read_metrics


def smooth(values: list[float], width: int) -> np.ndarray:
    """Running mean over `width` points, shorter at the start."""
    sums = np.cumsum(np.insert(np.asarray(values, dtype=float), 0, 0.0))
    ends = np.arange(1, len(values) + 1)
    starts = np.maximum(0, ends - width)
    return (sums[ends] - sums[starts]) / (ends - starts)


def draw_curve(runs: list[Path], out: Path) -> None:
    """Training loss (a smoothed line) and validation loss at each depth, against tokens."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 5), layout="constrained")
    for run in runs:
        rows = read_metrics(run / "metrics.jsonl")
        train = [row for row in rows if row["kind"] == "train"]
        evals = [row for row in rows if row["kind"] == "eval"]
        label = f"{run.name} " if len(runs) > 1 else ""
        if train:
            losses = smooth([row["loss_lm"] for row in train], max(1, len(train) // 50))
            axes.plot([row["tokens"] for row in train], losses, lw=1, alpha=0.6, label=f"{label}training")
        depths = sorted({int(k) for row in evals for k in row["loss_by_depth"]})
        tokens_per_step = train[0]["tokens"] / train[0]["step"] if train else 1
        for i, depth in enumerate(depths):
            color = plt.get_cmap("viridis")(i / max(1, len(depths) - 1) * 0.9)
            points = [(row["step"] * tokens_per_step, row["loss_by_depth"][str(depth)]) for row in evals]
            name = f"validation, depth {depth}" if len(depths) > 1 else "validation"
            axes.plot(*zip(*points, strict=True), marker="o", ms=3, lw=1, color=color, label=label + name)
    axes.set_xlabel("training tokens")
    axes.set_ylabel("loss (nats per token)")
    axes.grid(alpha=0.3)
    if axes.has_data():
        axes.legend(fontsize=8)
    temporary = out.with_name(f".{out.name}.tmp.png")
    figure.savefig(temporary, dpi=120)
    plt.close(figure)
    temporary.replace(out)
