"""`grt bench halting`: tokens that leave the loop one by one (grt/exits/policies.py) against fixed depths of one model.

Thresholds are calibrated on the first windows of the validation split, all losses are of those behind them.
Each policy is set against the fixed depth of equal FLOPs: between two whole depths, the mean of both that costs as
much, which is what giving each text one of them by lot would reach; beyond the last step, that one. The interval is
the middle 95 % of what windows drawn anew give, for one comparison: of twenty, chance alone calls one better or worse.
Time is of decoding with a cache, eager, fed with the text itself.
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

from grt.bench.decoding import FEW, Task, Tick, add_ratio, empty_report, median_row, take_turns, warm_up
from grt.data.loader import Split, n_windows
from grt.decode.decoder import Decoder
from grt.decode.early_exit import HaltingDecoder
from grt.device import resolve_device
from grt.errors import ConfigError
from grt.evals.early_exit import Halted, calibrate, halted_loss
from grt.exits.policies import POLICIES, Exit, ExitPolicy, FixedDepth, check_method, parse_exit
from grt.model import cost
from grt.model.loop import RecurrentDepthModel
from grt.runs.checkpoint import load_model
from grt.runs.plots import figure_of_losses
from grt.schema import at_least
from grt.train.loop import open_data

RESAMPLES = 2000
SHARES = (1 / 4, 1 / 3, 1 / 2, 2 / 3)  # of all steps: the mean depths that thresholds are calibrated for


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
    calibration_windows: int = 32, batches: Sequence[int] = (1,), new: int = 64, alternations: int = 5,
    device: str = "auto", out: Path = Path("halting.png"),
) -> dict[str, Any]:  # fmt: skip
    """The JSON document of the bench, and the plot."""
    at_least("--windows", windows, 2)
    at_least("--calibration-windows", calibration_windows, 1)
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
    targets = [*mean_depths] or [max(share * R, 1) for share in SHARES]
    for target in targets:
        if not 1 <= target <= R:
            raise ConfigError(f"--mean-depths has {target:g}: give numbers from 1 to the {R} steps of a token.")
    split = open_data(config, quiet=True).split("val", config.data.windows)
    held_out = slice(calibration_windows, n_windows(split, context, calibration_windows + windows))
    if held_out.stop - held_out.start < max(2, *batches):
        raise ConfigError(
            f"{held_out.stop} windows are too few to calibrate on {calibration_windows} and to measure on others: give "
            "fewer --calibration-windows, a smaller --batch, or more --windows."
        )
    fixed = [measured(model, split, FixedDepth(k), held_out) for k in range(1, R + 1)]
    found = calibrated(model, split, wanted, targets, calibration_windows)
    rows = fixed + [measured(model, split, policy, held_out) for policy in found]
    report = empty_report("halting", where, torch.float32)
    report |= {"run": str(run), "windows": held_out.stop - held_out.start, "calibration_windows": calibration_windows}
    report |= {"new": new, "plot": str(out), "steps": R, "alternations": alternations}
    report["rows"] = [row_of(row, fixed) for row in rows]
    for batch in dict.fromkeys(batches) if new else ():
        task = Task("cached", batch, context - new, new)
        add_times(model, text_of(split, context, held_out.start, batch), rows, task, alternations, report)
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


def measured(model: RecurrentDepthModel, split: Split, policy: ExitPolicy, windows: slice) -> Row:
    result = halted_loss(model, split, Exit.of(model, policy), limit=windows.stop).of(windows)
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


def text_of(split: Split, context: int, first: int, n: int) -> Tensor:
    """Tokens (n, T) of the windows from `first` on."""
    return torch.stack([torch.from_numpy(split.window(split.tile(first + i, context), context)[0]) for i in range(n)])


def add_times(
    model: RecurrentDepthModel, text: Tensor, rows: Sequence[Row], task: Task, alternations: int, report: dict[str, Any]
) -> None:
    """Time of a decoding step, one token of each row of text (B, T), and the speed-up against all steps."""
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
    times = take_turns(contestants, task.new, alternations)
    full = times[str(FixedDepth(model.config.blocks.R))]
    for entry in report["rows"]:
        own = times[entry["name"]]
        add_ratio(report, f"ms per token, {entry['name']} / all steps, batch {task.batch}", own, full)
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
    """Tables for people, then the report as one JSON line."""
    console = Console(highlight=False, soft_wrap=True)
    console.print(loss_table(report))
    for batch in report["rows"][0].get("speed", {}):
        console.print(time_table(report, batch))
    console.print(f"drawn in {report['plot']}")
    print(json.dumps(report))


def short(row: dict[str, Any]) -> str:
    return f"{row['policy']}:{row['threshold']:.4g}"


def table_of(title: str, columns: Sequence[str]) -> Table:
    table = Table(title=title, box=box.SIMPLE, padding=0)  # 80 columns have to do
    for column in columns:
        table.add_column(column, justify="left" if column == "exit" else "right", no_wrap=True)
    return table


def loss_table(report: dict[str, Any]) -> Table:
    columns = ("exit", "depth", "loss", "MFLOPs", "equal", "less its loss [95 %]", "alone")
    table = table_of(
        f"{report['run']}: loss on {report['windows']} windows, against the fixed depth of equal FLOPs", columns
    )
    for row in report["rows"]:
        cells = [short(row), f"{row['mean_depth']:.2f}", f"{row['loss']:.4f}", f"{row['flops_per_token'] / 1e6:.2f}"]
        if against := row.get("against_fixed"):
            low, high = against["interval"]
            cells += [f"{against['depth']:.2f}", f"{against['difference']:+.4f} [{low:.4f}, {high:.4f}]"]
            cells += [against["verdict"]]
        table.add_row(*cells)
    return table


def time_table(report: dict[str, Any], batch: str) -> Table:
    on = f"{report['device']} ({report['threads']} threads)"
    columns = ("exit", "ms/token", "range", "speed-up", "range", "by FLOPs", "by steps")
    table = table_of(f"decoding, batch {batch}, on {on}", columns)
    for row in report["rows"]:
        speed = row["speed"][batch]
        (low, high), (least, most) = speed["spread"], speed["speedup_spread"]
        table.add_row(
            short(row), f"{speed['ms_per_token']:.2f}", f"{low:.2f}-{high:.2f}", f"{speed['speedup']:.2f}",
            f"{least:.2f}-{most:.2f}", f"{row['predicted_speedup']:.2f}", f"{report['steps'] / row['mean_depth']:.2f}",
        )  # fmt: skip
    return table
