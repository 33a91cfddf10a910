"""Checkpoints that survive kill -9, a full disk and a flipped bit.

    RUN/checkpoints/step-00000300/{model.safetensors, optimizer.safetensors, state.json, manifest.json}
    RUN/checkpoints/latest, best          (text: a folder's name)

A checkpoint is written to a temporary folder, fsynced and renamed, so its name appears only when it is whole; the
manifest holds the sha256 of every file. Weights are safetensors, the rest JSON: nothing is ever unpickled.
Rows of padding (model.vocab_multiple) are zero, and so are their moments: neither is saved, and a checkpoint can be
read with any padding.
A model folder (models/grt-nano) is a checkpoint without optimizer, beside its config.json.
"""

import contextlib
import hashlib
import json
import os
import re
import shutil
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
import zstandard
from torch import Tensor

from grt.config import RunConfig, config_hash, load
from grt.errors import ConfigError
from grt.files import replace_file, sha256, sync_folder, write_file
from grt.methods import build_model
from grt.model.loop import RecurrentDepthModel
from grt.runs.folder import cannot_write
from grt.runs.paths import located
from grt.train.optim import MOMENTS, learning, optimizer_tensors

FORMAT = 1
WEIGHTS = ("model.safetensors", "model.safetensors.zst")
FOR_RESUME = {"model.safetensors", "optimizer.safetensors", "state.json"}


class CheckpointError(ConfigError):
    """A checkpoint that cannot be used: one sentence that names the file."""


@dataclass
class State:
    """What a checkpoint keeps beside weights and moments (state.json)."""

    step: int = 0
    seconds: float = 0.0
    best_loss: float | None = None
    best_step: int | None = None
    dtype: str = ""
    peak: float = 0.0
    peak_source: str = ""
    text_sha256: str = ""


def read_state(path: Path, step: int) -> State:
    try:
        state = State(**json.loads(path.read_bytes()))
        if state.step != step or not all(isinstance(getattr(state, f.name), f.type) for f in fields(State)):  # type: ignore[arg-type]
            raise ValueError
        return state
    except (OSError, ValueError, TypeError, RecursionError):
        raise CheckpointError(f"{path} is damaged: use another checkpoint.") from None


def step_name(step: int) -> str:
    return f"step-{step:08d}"


def write_folder(folder: Path, files: dict[str, bytes], hash_: str, step: int) -> None:
    """Write `files` and their manifest as one folder that appears whole or not at all."""
    temporary = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        for name, data in files.items():
            write_file(temporary / name, data)
        entries = {n: {"sha256": hashlib.sha256(d).hexdigest(), "bytes": len(d)} for n, d in files.items()}
        manifest = {"format": FORMAT, "config_hash": hash_, "step": step, "files": entries}
        write_file(temporary / "manifest.json", (json.dumps(manifest, indent=1) + "\n").encode())
        sync_folder(temporary)
        shutil.rmtree(folder, ignore_errors=True)
        os.replace(temporary, folder)
        sync_folder(folder.parent)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def read_manifest(folder: Path) -> dict[str, Any]:
    path = folder / "manifest.json"
    try:
        manifest = json.loads(path.read_bytes())
        entries, kinds = manifest["files"], (type(manifest["step"]), type(manifest["config_hash"]))
        if manifest["format"] != FORMAT or kinds != (int, str) or not any(name in entries for name in WEIGHTS):
            raise ValueError
        for name, entry in entries.items():
            if not re.fullmatch(r"[\w.-]{1,100}", name) or entry.keys() != {"sha256", "bytes"}:
                raise ValueError
        return manifest
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing: this is not a whole checkpoint, use another.") from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error.strerror}): use another checkpoint.") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise CheckpointError(f"{path} is damaged: use another checkpoint.") from None


def verify(folder: Path, hash_: str) -> dict[str, Any]:
    """The manifest of a sound checkpoint of the config with this hash (CheckpointError names what is wrong)."""
    manifest = read_manifest(folder)
    for name, entry in manifest["files"].items():
        path = folder / name
        try:
            size, digest = path.stat().st_size, sha256(path)
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read ({error.strerror}): use another checkpoint.") from None
        if size != entry["bytes"]:
            raise CheckpointError(f"{path} has {size} bytes, not {entry['bytes']}: use another checkpoint.")
        if digest != entry["sha256"]:
            raise CheckpointError(f"{path} does not match the sha256 in its manifest: use another checkpoint.")
    if folder.name.startswith("step-") and folder.name != step_name(manifest["step"]):
        raise CheckpointError(f"{folder / 'manifest.json'} is of another step than its folder: use another checkpoint.")
    if manifest["config_hash"] != hash_:
        raise CheckpointError(f"{folder / 'manifest.json'} is of another config than the run's: use another folder.")
    return manifest


def read_tensors(path: Path, expected: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a .safetensors or .safetensors.zst file, with exactly the expected names and shapes."""
    try:
        data = path.read_bytes()
        if path.suffix == ".zst":
            data = zstandard.ZstdDecompressor().decompress(data)
        tensors = safetensors.torch.load(data)
    except (OSError, safetensors.SafetensorError, zstandard.ZstdError, KeyError, MemoryError) as error:
        raise CheckpointError(f"{path} cannot be read ({error}): use another checkpoint.") from None
    for what, names in (("lacks", expected.keys() - tensors), ("has unknown", tensors.keys() - expected.keys())):
        if names:
            raise CheckpointError(f"{path} {what} tensor {min(names)}: it belongs to another model.")
    for name, tensor in tensors.items():
        if tensor.shape != expected[name].shape:
            shapes = f"{tuple(tensor.shape)}, the model wants {tuple(expected[name].shape)}"
            raise CheckpointError(f"{path}: tensor {name} has shape {shapes}: it belongs to another model.")
    return tensors


class Checkpoints:
    """The checkpoints of one run."""

    def __init__(self, run: Path, hash_: str, keep: int) -> None:
        self.folder, self.hash, self.keep = run / "checkpoints", hash_, keep

    def save(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, state: State) -> None:
        """Write the checkpoint of state.step, point `latest` and `best`, and drop those that are not kept."""
        files = {
            "model.safetensors": safetensors.torch.save({k: v.cpu() for k, v in model.state_dict().items()}),
            "optimizer.safetensors": safetensors.torch.save(optimizer_tensors(model, optimizer)),
            "state.json": (json.dumps(vars(state)) + "\n").encode(),
        }
        folder = self.folder / step_name(state.step)
        try:
            write_folder(folder, files, self.hash, state.step)
            self.point(state)
            self.rotate(state.step)
        except OSError as error:
            raise CheckpointError(cannot_write(error.filename or folder, error, self.folder.parent)) from None

    def point(self, state: State) -> None:
        """Let `latest` and `best` name what this state knows; a kill may have come between a checkpoint and them."""
        for name, step in (("latest", state.step), ("best", state.best_step)):
            if step is not None and (self.folder / step_name(step)).is_dir() and self.pointer(name) != step_name(step):
                replace_file(self.folder / name, step_name(step) + "\n")

    def read(self, folder: Path, model: torch.nn.Module) -> tuple[dict[str, Tensor], dict[str, Tensor], State]:
        """Weights, moments and state to resume from: all of them checked (CheckpointError) before any is used."""
        manifest = verify(folder, self.hash)
        if absent := FOR_RESUME - manifest["files"].keys():
            raise CheckpointError(f"{folder / 'manifest.json'} lists no {min(absent)}: use another checkpoint.")
        weights = read_tensors(folder / "model.safetensors", model.state_dict())
        saved = model.state_dict()
        expected = {f"{name}.{key}": saved[name] for name, _ in learning(model) for key in MOMENTS}
        moments = read_tensors(folder / "optimizer.safetensors", expected)
        return weights, moments, read_state(folder / "state.json", manifest["step"])

    def rotate(self, step: int) -> None:
        """Of the checkpoints up to `step`, keep the newest and the best; a damaged one that a resume went back behind
        is newer, and must not count."""
        for leftover in self.folder.glob(".*.tmp"):  # of a writer that was killed
            shutil.rmtree(leftover, ignore_errors=True)
            with contextlib.suppress(OSError):
                leftover.unlink()
        best = self.pointer("best")
        done = [folder for folder in self.newest_first() if folder.name <= step_name(step)]
        for folder in done[self.keep :]:
            if folder.name != best:
                shutil.rmtree(folder)

    def pointer(self, name: str) -> str | None:
        try:
            text = (self.folder / name).read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError):
            return None
        return text if re.fullmatch(r"step-\d{8,20}", text) else None

    def newest_first(self) -> list[Path]:
        return sorted((p for p in self.folder.glob("step-*") if p.is_dir()), reverse=True)

    def newest_sound(self) -> tuple[Path | None, list[str]]:
        """The newest checkpoint that verifies, and why each newer one does not."""
        skipped = []
        for folder in self.newest_first():
            try:
                verify(folder, self.hash)
                return folder, skipped
            except CheckpointError as error:
                skipped.append(str(error))
        return None, skipped


def weights_file(folder: Path) -> Path:
    """The weights that a manifest lists: plain safetensors, or compressed."""
    return folder / next(name for name in WEIGHTS if name in read_manifest(folder)["files"])


def find_checkpoint(path: Path) -> tuple[Path, RunConfig]:
    """The checkpoint that a path stands for, and its config: the newest sound one of a run (a warning names those it
    passed over), a checkpoint, one of a run's pointers (checkpoints/best), or a model folder."""
    if not path.exists():
        raise CheckpointError(f"{path} does not exist: give a run's folder, one of its checkpoints or a model folder.")
    path = path.resolve()
    if path.is_file() and path.name in ("latest", "best"):
        path = path.parent / path.read_text(encoding="utf-8").strip()
    if (path / "manifest.json").exists():
        in_run = path.parent.name == "checkpoints" and path.name.startswith("step-")
        home = path.parents[1] if in_run else path
        config = load(home / "config.json")
        verify(path, config_hash(config))
        return path, located(config, home)
    config = load(path / "config.json")
    folder, skipped = Checkpoints(path, config_hash(config), keep=1).newest_sound()
    if folder is None:
        raise CheckpointError(skipped[0] if skipped else f"{path} holds no checkpoint yet: train it first.")
    for reason in skipped:
        warnings.warn(f"passed over a checkpoint: {reason}", stacklevel=3)
    return folder, located(config, path)


def load_model(path: str | Path, device: str | torch.device = "cpu") -> tuple[RecurrentDepthModel, RunConfig]:
    """The trained model of a run, checkpoint or model folder, in fp32 and evaluation mode, with its config.

    Raises CheckpointError (a ValueError) naming the file when something is missing, damaged or of another config.
    """
    folder, config = find_checkpoint(Path(path))
    with torch.random.fork_rng(devices=[]):
        model = build_model(config.model)
    tensors = read_tensors(weights_file(folder), model.state_dict())
    model.load_state_dict({name: tensor.float() for name, tensor in tensors.items()})
    return model.to(device).eval(), config
