"""Damage to files, and how checkpoints are refused that have some."""

import hashlib
import json
from pathlib import Path

import pytest

from grt.errors import ConfigError
from grt.runs.checkpoint import load_model
from grt.train.loop import Trainer

FILES = ("model.safetensors", "optimizer.safetensors", "state.json", "manifest.json")
OLD, NEW = "step-00000005", "step-00000010"


def seal(folder: Path, **changed) -> None:
    """Make the manifest true again of what lies in the folder, so that no hash gives the damage away."""
    manifest = json.loads((folder / "manifest.json").read_text())
    for name in manifest["files"]:
        content = (folder / name).read_bytes()
        manifest["files"][name] = {"sha256": hashlib.sha256(content).hexdigest(), "bytes": len(content)}
    (folder / "manifest.json").write_text(json.dumps({**manifest, **changed}))


def refused(path: Path, *named: object) -> str:
    """The one sentence with which load_model refuses `path`."""
    with pytest.raises(ConfigError) as caught:
        load_model(path)
    message = str(caught.value)
    assert "\n" not in message and message.endswith(".") and len(message) < 600
    for name in named:
        assert str(name) in message, message
    return message


def resumes_from(config, run: Path, step: int, *named: object, capsys) -> None:
    capsys.readouterr()
    trainer = Trainer(config, run, resume=True)
    trainer.log.close()
    told = capsys.readouterr().err
    assert trainer.state.step == step, told
    for name in named:
        assert f"skipped a checkpoint: {name}" in told


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def remove(path: Path) -> None:
    path.unlink()


def longer(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"}")


def folder_instead(path: Path) -> None:
    path.unlink()
    path.mkdir()
