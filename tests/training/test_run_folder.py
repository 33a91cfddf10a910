"""Whose folder a run is, what it holds, and that one process at a time trains in it."""

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from tiny import ROOT, finish, run_until, start

import grt.runs.folder as folder_module
from grt.config import VERSION, dump
from grt.data.prepare import prepare
from grt.errors import ConfigError
from grt.presets import change
from grt.runs.folder import command_line
from grt.train.loop import Trainer


def contents(folder: Path) -> dict[Path, bytes]:
    return {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def ours(config, out: Path) -> None:
    run_until(config, out, 1)


def of_another_seed(config, out: Path) -> None:
    run_until(change(config, train={"seed": 1}), out, 1)


def holding(name: str, text: str):
    def fill(config, out: Path) -> None:
        out.mkdir()
        (out / name).write_text(text)

    return fill


@pytest.mark.parametrize(
    ("prepare_folder", "resume", "says"),
    [
        (ours, False, "already holds this run: add --resume"),
        (of_another_seed, False, "train.seed 1 there, 1337 here"),
        (of_another_seed, True, "train.seed 1 there, 1337 here"),
        (holding("thesis.tex", "x"), False, "is not empty and holds no run"),
        (holding("thesis.tex", "x"), True, "is not empty and holds no run"),
        (holding("config.json", "{"), True, "config.json is not JSON"),
        (lambda config, out: out.write_text("x"), False, "is a file: give --out a folder"),
        (lambda config, out: out.mkdir(), True, "holds no run to resume"),
        (lambda config, out: None, True, "holds no run to resume"),
    ],
)
def test_a_folder_that_is_not_ours_is_left_alone(config, tmp_path, prepare_folder, resume, says):
    out = tmp_path / "run"
    prepare_folder(config, out)
    before = contents(tmp_path)
    with pytest.raises(ConfigError) as caught:
        Trainer(config, out, resume=resume)
    assert says in str(caught.value) and str(out) in str(caught.value)
    assert contents(tmp_path) == before


def test_a_folder_that_cannot_be_made(config, tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(ConfigError, match=r"cannot be made \(Not a directory\)"):
        Trainer(config, tmp_path / "file/run")


def test_settings_of_watching_may_change_and_the_rest_may_not(config, tmp_path):
    run_until(config, tmp_path / "run", 1)
    watching = {"eval_every": 1, "eval_windows": 2, "checkpoint_every": 1, "keep": 9, "device": "auto", "threads": 1}
    run_until(change(config, train=watching), tmp_path / "run", 1, resume=True)
    for section, fields in {
        "model": {"state_noise": 0.2},
        "data": {"val_fraction": 0.1},
        "train": {"steps": 31},
    }.items():
        with pytest.raises(ConfigError, match=f"{section}.{next(iter(fields))}"):
            Trainer(change(config, **{section: fields}), tmp_path / "run", resume=True)


def test_env_json(config, tmp_path):
    trainer = run_until(config, tmp_path / "run", 1)
    env = json.loads((tmp_path / "run/env.json").read_text())
    assert env["grt"] == VERSION and env["torch"] == torch.__version__ and env["python"] == sys.version.split()[0]
    assert env["device"] == "cpu" and env["dtype"] == "fp32" and env["threads"] == 1 and env["cores"] == os.cpu_count()
    assert env["peak_flops"] == 1e12 and env["peak_source"] == "a constant" and env["cpu"]
    assert env["command"] == command_line()
    assert env["commit"] is None or re.fullmatch("[0-9a-f]{40}(-dirty)?", env["commit"])
    splits = trainer.data.meta["splits"]
    assert env["data"] == {
        "corpus_sha256": trainer.data.meta["corpus_sha256"],
        "train": splits["train"]["sha256"],
        "val": splits["val"]["sha256"],
    }
    assert (tmp_path / "run/config.json").read_text() == dump(config)


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        (["/opt/bin/grt", "train", "a b"], "grt train 'a b'"),
        ([str(ROOT / "grt/__main__.py"), "train"], "grt train"),
        (["my run.py", "--fast"], "'my run.py' --fast"),
        (["/x/other/__main__.py"], "/x/other/__main__.py"),
    ],
)
def test_the_command_is_what_was_typed(monkeypatch, argv, told):
    monkeypatch.setattr(sys, "argv", argv)
    assert command_line() == told


def test_commit_is_that_of_the_packages_own_checkout(tmp_path, monkeypatch):
    def git(*arguments: str) -> str:
        author = ["-c", "user.name=a", "-c", "user.email=a@b"]
        return subprocess.run(
            ["git", *author, "-C", tmp_path, *arguments], capture_output=True, text=True, check=True
        ).stdout.strip()

    package = tmp_path / "site/grt"
    (package / folder_module.THIS_FILE).parent.mkdir(parents=True)
    (package / folder_module.THIS_FILE).write_text("x = 1\n")
    (tmp_path / "theirs.txt").write_text("theirs")
    monkeypatch.setattr(folder_module, "PACKAGE", package)
    assert folder_module.commit() is None
    git("init", "-q")
    git("add", "theirs.txt")
    git("commit", "-qm", "one")
    assert folder_module.commit() is None  # installed in somebody else's checkout
    git("add", ".")
    git("commit", "-qm", "two")
    assert folder_module.commit() == git("rev-parse", "HEAD")
    (tmp_path / "theirs.txt").write_text("not ours")
    assert folder_module.commit() == git("rev-parse", "HEAD")
    (package / folder_module.THIS_FILE).write_text("x = 2\n")
    assert folder_module.commit() == git("rev-parse", "HEAD") + "-dirty"


def hold(config, out: Path, mark: Path) -> int:
    """In a child: a run that holds its folder and does nothing."""
    trainer = Trainer(config, out)
    mark.touch()
    time.sleep(60)
    return trainer.run()


def test_a_folder_has_one_process_that_trains(config, tmp_path):
    out, mark = tmp_path / "run", tmp_path / "mark"
    process = start(hold, config, out, mark)
    end = time.monotonic() + 60
    while not mark.exists():
        assert time.monotonic() < end
        time.sleep(0.02)
    before = contents(out)
    with pytest.raises(ConfigError, match="is being trained by another process: "):
        Trainer(config, out, resume=True)
    assert contents(out) == before
    process.kill()
    process.join(20)
    finish(change(config, train={"eval_every": 30}), out, resume=True)


def test_the_folder_is_free_after_each_way_to_end(config, tmp_path):
    out = tmp_path / "run"
    with pytest.raises(ConfigError, match="vocab"):
        Trainer(change(config, model={"vocab_size": 200}), out)
    crashed = run_until(config, out, 1)
    closed = Trainer(config, out, resume=True)
    with pytest.raises(ConfigError, match="is being trained by another process"):
        Trainer(config, out, resume=True)
    closed.close()
    dropped = Trainer(config, out, resume=True)
    dropped.log.close()
    del dropped
    run_until(config, out, 2, resume=True)
    assert crashed.state.step == 1


def test_text_that_is_too_short_claims_no_folder(config, tmp_path):
    (tmp_path / "short.txt").write_text("too short\n" * 4)
    folder = prepare(tmp_path / "short.txt", out=tmp_path / "short").folder
    with pytest.raises(ConfigError, match=r"val split in .* a window needs 17"):
        Trainer(change(config, data={"path": str(folder)}), tmp_path / "run")
    assert not (tmp_path / "run/config.json").exists()


def test_a_vocabulary_that_is_too_small(config, tmp_path):
    with pytest.raises(ConfigError, match="set --model.vocab-size 257"):
        Trainer(change(config, model={"vocab_size": 200}), tmp_path / "run")
