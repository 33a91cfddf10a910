"""What `grt calibrate` does and says: a threshold found on a validation text, kept in the run's exits.json."""

import json
import os
from pathlib import Path
from typing import Any

from grt.console import Output
from grt.device import resolve_device
from grt.errors import ConfigError
from grt.evals.early_exit import calibrate
from grt.evals.report import known_text
from grt.exits.kept import FILE, home_of, read_exits, result_of, show_exit
from grt.exits.policies import Exit, check_method, parse_exit
from grt.files import replace_file
from grt.runs.checkpoint import find_checkpoint, load_model, read_manifest

console = Output()


def calibration_report(
    run: Path, text: str, *, mean_depth: float | None, loss_increase: float | None, data: str | None = None,
    limit: int | None = None, batch_size: int = 16, steps: int | None = None, device: str = "auto",
    out: Path | None = None,
) -> dict[str, Any]:  # fmt: skip
    """The JSON document of `grt calibrate`; writes the threshold into exits.json, beside those of other policies."""
    checkpoint, config = find_checkpoint(run)
    model, _ = load_model(checkpoint, resolve_device(device))
    policy, threshold = parse_exit(text)
    if threshold is not None:
        raise ConfigError(f"exit {text} has a threshold already: name the policy alone, {policy.name}.")
    check_method(model, policy)
    steps = config.model.blocks.R if steps is None else steps
    model.check_depth(steps, least=1)
    check_target(mean_depth, loss_increase, steps)
    folder = home_of(checkpoint) if out is None else out
    if out is not None and not out.is_file():
        out.mkdir(parents=True, exist_ok=True)
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise ConfigError(f"{folder} cannot be written: give --out a folder that can.")
    kept = read_exits(folder)
    split = known_text(run, checkpoint, config, data)
    found, result, whole = calibrate(
        model, split, policy, steps, mean_depth=mean_depth, loss_increase=loss_increase, limit=limit,
        batch_size=batch_size,
    )  # fmt: skip
    report = result_of(model, Exit.of(model, found, steps), result) | {
        "loss_of_all_steps": whole.loss,
        "loss_increase": result.loss - whole.loss,
        "asked": {"mean_depth": mean_depth, "loss_increase": loss_increase},
        "windows": len(result.nats),
        "text_sha256": split.sha256,
        "step": read_manifest(checkpoint)["step"],
    }
    kept[policy.name] = report
    replace_file(folder / FILE, json.dumps(kept, indent=2) + "\n")
    return {"run": str(run), **report, "kept": str(folder / FILE)}


def check_target(mean_depth: float | None, loss_increase: float | None, steps: int) -> None:
    if (mean_depth is None) == (loss_increase is None):
        raise ConfigError("name what to aim at: either --mean-depth or --loss-increase.")
    if mean_depth is not None and not 1 <= mean_depth <= steps:
        raise ConfigError(f"--mean-depth is {mean_depth:g}: it must lie between 1 and the {steps} steps of a token.")
    if loss_increase is not None and not 0 <= loss_increase < float("inf"):
        raise ConfigError(f"--loss-increase is {loss_increase:g}: it must be at least 0 nats, and finite.")


def show_calibration(report: dict[str, Any], aside: bool) -> None:
    """aside: the threshold was written to a folder that --out named."""
    show_exit(report, report["loss_of_all_steps"])
    name = f"{report['policy']}:{report['threshold']:.6g}"
    console.print(f"on {report['windows']} windows; kept in {report['kept']}")
    taken = "" if aside else f"`--exit {report['policy']}` takes it from the run's folder, "
    console.print(f"{taken}`--exit {name}` names it")
