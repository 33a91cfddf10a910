"""What a resumed run takes up: the newest checkpoint that is sound, and how this machine differs from the first one."""

import sys
from pathlib import Path
from typing import Any

import torch

from grt.device import hardware
from grt.runs.checkpoint import CheckpointError, Checkpoints, State
from grt.runs.paths import facts_of
from grt.train.optim import restore_optimizer

# Steps are repeated bit for bit only where these are the same.
DECIDE_BITS = ("torch", "cpu", "threads", "device", "gpu")


def restore(
    checkpoints: Checkpoints, model: torch.nn.Module, optimizer: torch.optim.Optimizer
) -> tuple[State, list[str]]:
    """Load the newest sound checkpoint; its state, and why each newer one was skipped.

    A run that has none yet begins at step 0. Raises CheckpointError where it has some and none is sound: to begin
    at step 0 there would overwrite what may yet be saved.
    """
    skipped: list[str] = []
    for folder in checkpoints.newest_first():
        try:
            weights, moments, state = checkpoints.read(folder, model)
        except CheckpointError as error:
            skipped.append(str(error))
            print(f"skipped a checkpoint: {error}", file=sys.stderr)
            continue
        model.load_state_dict(weights)
        restore_optimizer(model, optimizer, moments, state.step)
        checkpoints.point(state)
        print(f"resuming from {folder}", file=sys.stderr)
        return state, skipped
    if skipped:
        raise CheckpointError(
            f"{skipped[0]} No checkpoint in {checkpoints.folder} can be resumed: put back the config.json or the "
            "checkpoint that was there, or start anew with --out and a new folder."
        )
    print(f"{checkpoints.folder.parent} has no checkpoint yet: starting from step 0", file=sys.stderr)
    return State(), skipped


def changed_environment(out: Path, device: torch.device) -> dict[str, list[Any]]:
    """What of env.json is another now, [then, now], among the things that decide the last bits of a step."""
    then, now = facts_of(out), {"torch": str(torch.__version__), **hardware(device)}
    both = [name for name in DECIDE_BITS if name in then and name in now]
    changed = {name: [then[name], now[name]] for name in both if then[name] != now[name]}
    if changed:
        told = ", ".join(f"{name} {a} then, {b} now" for name, (a, b) in changed.items())
        print(f"warning: {told}: steps from here on may differ in their last bits", file=sys.stderr)
    return changed


def text_of(state: State, out: Path, resume: bool) -> str:
    """sha256 of the training tokens that the run began with; "" where it begins now."""
    if state.text_sha256 or not resume:
        return state.text_sha256
    text = facts_of(out).get("data")  # it was stopped before its first checkpoint
    begun = text.get("train") if isinstance(text, dict) else None
    return begun if isinstance(begun, str) else ""
