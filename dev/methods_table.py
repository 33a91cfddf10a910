"""The nano-scale table of all methods in results/methods.

    python dev/methods_table.py collect RUN...    copies what made each run, without weights, and evaluates it
    python dev/methods_table.py build             writes README.md and losses.png from what was collected

bench.json beside them is the JSON line of `grt bench training --methods ... --preset grt-nano --threads 2`.
"""

import json
import shutil
import sys
from pathlib import Path

from grt.config import load
from grt.evals.report import evaluation_report
from grt.runs.compare import Finished
from grt.runs.metrics import read_metrics
from grt.runs.plots import draw_comparison

FOLDER = Path(__file__).resolve().parent.parent / "results" / "methods"
WINDOWS = 256  # of the validation split, from its start
ORDER = (
    "dense",
    "grt",
    "ladder-core",
    "ladder",
    "ladder-noise",
    "ladder-inject",
    "poisson",
    "huginn",
    "rrt",
    "mor",
    "mor-token",
    "ouro",
)


def collect(run: Path) -> None:
    config = load(run / "config.json")
    out = FOLDER / config.name.removesuffix("-nano")
    out.mkdir(parents=True, exist_ok=True)
    shutil.copy(run / "config.json", out / "config.json")
    environment = (run / "env.json").read_text()
    (out / "env.json").write_text(environment.replace(f"--out {run}", f"--out runs/{run.name}"))
    rows = [r for r in read_metrics(run / "metrics.jsonl") if r["kind"] != "train" or r["step"] % 20 in (0, 1)]
    (out / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    report = evaluation_report(run, limit=WINDOWS, batch_size=64) | {"run": config.name}
    (out / "eval.json").write_text(json.dumps(report, indent=1) + "\n")
    print(out)


def table() -> str:
    """README.md, from the collected files alone."""
    found = [name for name in ORDER if (FOLDER / name / "eval.json").exists()]
    bench = json.loads((FOLDER / "bench.json").read_text())
    speed = {row["name"].split()[0]: row for row in bench["rows"]}
    first = load(FOLDER / found[0] / "config.json")
    steps, tokens = first.train.steps, first.train.tokens_per_step
    entropy = json.loads((FOLDER / found[0] / "eval.json").read_text())["bigram_entropy"]
    environment = json.loads((FOLDER / found[0] / "env.json").read_text())
    lines = [
        "# Every method at nano size",
        "",
        f"One recipe (that of `grt-nano`), one seed ({first.train.seed}), {steps:,} steps of {tokens:,} bytes of the "
        f"`{first.data.path}` corpus; loss in nats per byte on the first {WINDOWS} windows of the validation "
        f"split, whose bigram entropy is {entropy:.4f}. Made by `grt train METHOD-nano --train.steps {steps} "
        "--train.threads 1`, on "
        f"{environment['cpu']}, one thread, {environment['dtype']}, torch {environment['torch']}; each folder has the "
        "resolved config, the environment with its commit, the evaluations and every 20th training row. One seed and "
        f"{steps * tokens / 1e6:.1f} M bytes: differences of a few hundredths say nothing.",
        "",
        f"tokens/s and peak memory of a training slot: `grt bench training`, all in turn, {bench['alternations']} "
        f"alternations, {bench['threads']} threads, {bench['dtype']}; at the depths that each method draws.",
        "",
        "| method | layout | parameters | depth 0 | 1 | 2 | 3 | full | training MFLOPs a byte | tokens/s | peak MB |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    notes = []
    for name in found:
        run = Finished(FOLDER / name)
        row, report = run.row(), json.loads((FOLDER / name / "eval.json").read_text())
        losses = report["loss_by_depth"]
        measured = speed.get(name)
        by_depth = [losses.get(k, "") if k in losses and len(losses) > 1 else "" for k in "0123"]
        numbers = [f"{loss:.4f}" if loss != "" else "" for loss in (*by_depth, report["loss"])]
        cost = row["training_flops"] / row["tokens"] / 1e6
        fast = (f"{measured['tokens_per_s']:,.0f}", f"{measured['peak_bytes'] / 1e6:.1f}") if measured else ("", "")
        cells = [f"`{name}`", row["layout"], f"{row['parameters']:,}", *numbers, f"{cost:.1f}", *fast]
        lines.append(f"| {' | '.join(cells)} |")
        if "topk_loss" in report:
            notes.append(f"`{name}` by full-sequence top-k, which leaks later bytes: {report['topk_loss']:.4f}.")
        if extras := report.get("extras"):
            told = ", ".join(f"{key} {value:.3f}" for key, value in extras.items())
            notes.append(f"`{name}`: {told}.")
    return "\n".join([*lines, "", *notes, "", "![validation loss over training bytes](losses.png)", ""])


def build() -> None:
    (FOLDER / "README.md").write_text(table(), encoding="utf-8")
    found = [name for name in ORDER if (FOLDER / name / "eval.json").exists()]
    draw_comparison(
        [Finished(FOLDER / name).curve(name, "tokens") for name in found], "training bytes", FOLDER / "losses.png"
    )


if __name__ == "__main__":
    if sys.argv[1:2] == ["collect"]:
        for folder in sys.argv[2:]:
            collect(Path(folder))
    elif sys.argv[1:] == ["build"]:
        build()
    else:
        sys.exit(__doc__)
