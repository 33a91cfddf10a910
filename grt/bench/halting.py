"""`grt bench halting`: tokens that leave the loop one by one (grt/model/exit.py) against fixed depths of one model.

Thresholds are calibrated on the first half of some windows of the validation split, all losses are of the second half.
Each policy is set against the fixed depth of equal FLOPs: between two whole depths, the mean of both that costs as
much, which is what giving each text one of them by lot would reach; beyond the last step, that one. The interval is
the middle 95 % of what windows drawn anew give. Time is of decoding with a cache, eager, fed with the text itself.
"""

import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table
from torch import Tensor

from grt.bench.decoding import FEW, Task, Tick, alternate, empty_report, median_row, warm_up
from grt.config import ConfigError, at_least
from grt.data.loader import Split, n_windows
from grt.evals.halting import Halted, calibrate, halted_loss
from grt.infer.decoder import Decoder
from grt.infer.halting import HaltingDecoder
from grt.model import cost
from grt.model.exit import POLICIES, Exit, ExitPolicy, FixedDepth, check_method, parse_exit
from grt.model.precision import resolve_device
from grt.model.recurrent import RecurrentDepthModel
from grt.train.checkpoint import load_model
from grt.train.loop import open_data
from grt.train.plots import figure_of_losses

RESAMPLES = 2000


@dataclass
class Row:
    """One policy on the windows that nothing was calibrated on."""

    policy: ExitPolicy
    result: Halted
    flops: float


class Fed:
    """A contestant that decodes given tokens (B, P + new)."""

    few, compiled = FEW, False

    def __init__(self, name: str, decoder: Decoder, text: Tensor, prompt: int) -> None:
        self.name, self.decoder, self.text, self.prompt = name, decoder, text, prompt

    def generate(self, new: int, tick: Tick) -> Tensor:
        self.decoder.restart(self.text[:, : self.prompt].tolist())
        logits = self.decoder.prefill()
        logits.argmax(-1).cpu()  # waits for the device
        tick()
        for token in self.text[:, self.prompt : self.prompt + new - 1].unbind(1):
            logits = self.decoder.step(token)
        logits.argmax(-1).cpu()
        tick()
        return self.text[:, self.prompt :]


def bench_halting(
    run: Path, exits: Sequence[str] = (), mean_depths: Sequence[float] = (), *, windows: int = 64,
    batches: Sequence[int] = (1,), new: int = 64, alternations: int = 5, device: str = "auto",
    out: Path = Path("halting.png"),
) -> dict[str, Any]:  # fmt: skip
    """The JSON document of the bench, and the plot."""
    at_least("--windows", windows, 4)
    at_least("--alternations", alternations, 1)
    at_least("--batch", min(batches), 1)
    where = resolve_device(device)
    model, config = load_model(run, where)
    R, context = config.model.blocks.R, config.model.context
    if not out.parent.is_dir():
        raise ConfigError(f"--out {out} cannot be written: make the folder {out.parent} first.")
    if new == 1 or not 0 <= new < context:
        raise ConfigError(f"--new is {new}: give 2 to {context - 1}, which leaves a prompt, or 0 to take no time.")
    wanted = policies_of(model, exits)
    targets = [*mean_depths] or [R / 4, R / 3, R / 2, 2 * R / 3]
    for target in targets:
        if not 1 <= target <= R:
            raise ConfigError(f"--mean-depths has {target:g}: give numbers from 1 to the {R} steps of a token.")
    split = open_data(config, quiet=True).split("val", config.data.windows)
    n = n_windows(split, context, windows)
    if max(4, 2 * max(batches)) > n:
        raise ConfigError(f"{n} windows are too few to calibrate and decode {max(batches)} rows: read more --windows.")
    fixed = [measured(model, split, FixedDepth(k), n) for k in range(1, R + 1)]
    rows = fixed + [measured(model, split, p, n) for p in calibrated(model, split, wanted, targets, n // 2)]
    report = empty_report("halting", where, torch.float32)
    report |= {"run": str(run), "windows": n - n // 2, "calibration_windows": n // 2, "new": new, "plot": str(out)}
    report["rows"] = [row_of(row, fixed) for row in rows]
    for batch in dict.fromkeys(batches) if new else ():
        add_times(model, split, rows, Task("cached", batch, context - new, new), alternations, n, report)
    draw(report["rows"], out)
    return report


def policies_of(model: RecurrentDepthModel, exits: Sequence[str]) -> list[tuple[type[ExitPolicy], float | None]]:
    """Each with its threshold, None where it is to be calibrated."""
    every = [name for name, p in POLICIES.items() if p is not FixedDepth and (model.rule.learned_exit or not p.learned)]
    wanted = [parse_exit(text) for text in exits or every]
    for policy, threshold in wanted:
        check_method(model, policy)
        if threshold is not None:
            Exit.of(model, policy(threshold))
    return wanted


def calibrated(
    model: RecurrentDepthModel, split: Split, wanted: Sequence[tuple[type[ExitPolicy], float | None]],
    targets: Sequence[float], n: int,
) -> list[ExitPolicy]:  # fmt: skip
    found: list[ExitPolicy] = []
    for policy, threshold in wanted:
        if threshold is not None:
            found.append(policy(threshold))
            continue
        for target in targets:
            found.append(calibrate(model, split, policy, model.config.blocks.R, mean_depth=target, limit=n)[0])
    return list(dict.fromkeys(found))


def measured(model: RecurrentDepthModel, split: Split, policy: ExitPolicy, n: int) -> Row:
    result = halted_loss(model, split, Exit.of(model, policy), limit=n).of(slice(n // 2, None))
    return Row(policy, result, cost.halting_flops(model, result.shares, model.config.context, policy.reads_out))


def row_of(row: Row, fixed: Sequence[Row]) -> dict[str, Any]:
    full = fixed[-1]
    entry = {
        "name": str(row.policy), "policy": row.policy.name, "threshold": row.policy.threshold,
        "mean_depth": row.result.mean_depth, "depth_shares": {str(k): s for k, s in row.result.shares.items()},
        "loss": row.result.loss, "loss_increase": row.result.loss - full.result.loss, "flops_per_token": row.flops,
        "predicted_speedup": full.flops / row.flops,
    }  # fmt: skip
    return entry if row in fixed else entry | {"against_fixed": against_fixed(row, fixed)}


def against_fixed(row: Row, fixed: Sequence[Row]) -> dict[str, Any]:
    """Loss of a policy less that of the fixed depth of equal FLOPs, and its interval."""
    depth, nats = len(fixed) * 1.0, fixed[-1].result.nats
    for k, (a, b) in enumerate(itertools.pairwise(fixed), 1):
        if row.flops <= b.flops:
            share = max(row.flops - a.flops, 0) / (b.flops - a.flops)
            depth, nats = k + share, torch.lerp(a.result.nats, b.result.nats, share)
            break
    difference = row.result.nats - nats
    low, high = bootstrap(difference)
    verdict = "better" if high < 0 else "worse" if low > 0 else "undecided"
    return {"depth": depth, "loss": nats.mean().item(), "difference": difference.mean().item(),
            "interval": [low, high], "verdict": verdict}  # fmt: skip


def bootstrap(differences: Tensor) -> tuple[float, float]:
    """The middle 95 % of the means of windows (W,) drawn anew with replacement."""
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randint(len(differences), (RESAMPLES, len(differences)), generator=generator)
    low, high = differences[drawn].mean(1).quantile(torch.tensor([0.025, 0.975], dtype=differences.dtype)).tolist()
    return low, high


def add_times(
    model: RecurrentDepthModel, split: Split, rows: Sequence[Row], task: Task, alternations: int, n: int,
    report: dict[str, Any],
) -> None:  # fmt: skip
    """Time of a decoding step, one token of each row, and the speed-up against all steps."""
    starts = [split.tile(i, model.config.context) for i in range(n // 2, n // 2 + task.batch)]
    text = torch.stack([torch.from_numpy(split.window(start, model.config.context)[0]) for start in starts])
    text, contestants = text.to(model.device), []
    for row in rows:
        prompts = text[:, : task.prompt].tolist()
        if isinstance(row.policy, FixedDepth):
            decoder = Decoder(model, prompts, task.new, depth=int(row.policy.threshold))
        else:
            decoder = HaltingDecoder(model, prompts, task.new, Exit.of(model, row.policy))
        contestants.append(Fed(str(row.policy), decoder, text, task.prompt))
    for contestant in contestants:
        warm_up(contestant, task.new)
    times = alternate(contestants, task.new, alternations)
    full = times[str(FixedDepth(model.config.blocks.R))]
    for entry in report["rows"]:
        own = times[entry["name"]]
        speedups = sorted(a.per_token / b.per_token for a, b in zip(full, own, strict=True))
        median = median_row(entry["name"], task.batch, own)
        entry.setdefault("speed", {})[str(task.batch)] = {
            "ms_per_token": median["ms_per_token"], "spread": median["spread"],
            "speedup": speedups[len(speedups) // 2], "speedup_spread": [speedups[0], speedups[-1]],
        }  # fmt: skip


def draw(rows: list[dict[str, Any]], out: Path) -> None:
    with figure_of_losses("MFLOPs per token, head and every read-out included", out) as axes:
        for policy in dict.fromkeys(row["policy"] for row in rows):
            own = sorted((row["flops_per_token"] / 1e6, row["loss"]) for row in rows if row["policy"] == policy)
            style = "-" if policy == FixedDepth.name else "--"
            axes.plot(*zip(*own, strict=True), style, marker="o", ms=4, lw=1.3, label=policy)


def show(report: dict[str, Any]) -> None:
    """A table for people, then the report as one JSON line."""
    console = Console(highlight=False, soft_wrap=True)
    on = f"on {report['device']} ({report['threads']} threads)"
    table = Table(title=f"{report['run']}: leaving one by one, {report['windows']} windows, {on}", box=box.SIMPLE)
    batches = list(report["rows"][0].get("speed", {}))
    columns = ["exit", "mean depth", "loss", "against all", "MFLOPs", "predicted"]
    columns += [f"{what}, batch {batch}" for batch in batches for what in ("ms/token", "speed-up")]
    for column in (*columns, "less fixed depth of equal cost [95 %]"):
        table.add_column(column, justify="left" if column == "exit" else "right")
    for row in report["rows"]:
        cells = [row["name"], f"{row['mean_depth']:.2f}", f"{row['loss']:.4f}", f"{row['loss_increase']:+.4f}",
                 f"{row['flops_per_token'] / 1e6:.2f}", f"{row['predicted_speedup']:.2f}"]  # fmt: skip
        for batch in batches:
            speed = row["speed"][batch]
            cells += [f"{speed['ms_per_token']:.2f}", f"{speed['speedup']:.2f}"]
        if against := row.get("against_fixed"):
            low, high = against["interval"]
            difference = f"{against['difference']:+.4f} [{low:+.4f}, {high:+.4f}]"
            cells.append(f"depth {against['depth']:.2f}: {difference} {against['verdict']}")
        table.add_row(*cells)
    console.print(table)
    console.print(f"drawn in {report['plot']}")
    print(json.dumps(report))
