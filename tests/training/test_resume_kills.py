"""A kill at any moment while a checkpoint is written, and at random ones."""

import os
import random
import shutil
import signal
import time
from pathlib import Path

import pytest
from tiny import finish, result, rows, run_until, start, train_child

from grt import files
from grt.presets import change
from grt.runs import checkpoint
from grt.runs.checkpoint import load_model
from grt.train.loop import Trainer


class Fuse:
    """kill -9 at the n-th of the moments of a save: before and after each change of the disk, and within each file."""

    def __init__(self, moment: int | None) -> None:
        self.moment, self.passed, self.lit = moment, 0, False

    def tick(self) -> None:
        if self.lit:
            if self.passed == self.moment:
                os.kill(os.getpid(), signal.SIGKILL)
            self.passed += 1

    def install(self) -> None:
        def write_file(path: Path, data: bytes) -> None:
            for part in (data[: len(data) // 2], data):
                path.write_bytes(part)
                self.tick()

        def replace(source, target) -> None:
            self.tick()
            os.rename(source, target)
            self.tick()

        def rmtree(folder: Path, ignore_errors: bool = False) -> None:
            for path in sorted(folder.iterdir() if folder.is_dir() else []):
                path.unlink()
                self.tick()
            real_rmtree(folder, ignore_errors)

        real_rmtree = shutil.rmtree
        for module in (files, checkpoint):
            module.write_file = write_file
            module.os = Names(os, replace=replace)
        checkpoint.shutil = Names(shutil, rmtree=rmtree)


class Names:
    """A module with some names replaced, for the one module that looks at it."""

    def __init__(self, module, **changed) -> None:
        self.module = module
        vars(self).update(changed)

    def __getattr__(self, name: str):
        return getattr(self.module, name)


def resume_with_fuse(config, out: Path, moment: int | None, at: int, count: Path) -> int:
    fuse = Fuse(moment)
    fuse.install()
    trainer = Trainer(config, out, resume=True)
    save = trainer.save

    def watched() -> None:
        fuse.lit = trainer.state.step == at
        save()

    trainer.save = watched
    code = trainer.run()
    count.write_text(str(fuse.passed))
    return code


def moments_of_a_save(config, base: Path, at: int, folder: Path) -> int:
    out = folder / "count"
    shutil.copytree(base, out)
    process = start(resume_with_fuse, config, out, None, at, folder / "moments")
    process.join(60)
    assert process.exitcode == 0
    return int((folder / "moments").read_text())


def check_kill_within_save(config, base: Path, out: Path, moment: int, at: int, expected) -> None:
    shutil.copytree(base, out)
    process = start(resume_with_fuse, config, out, moment, at, out / "never")
    process.join(60)
    assert process.exitcode == -signal.SIGKILL
    for name in ("latest", "best"):
        assert (out / "checkpoints" / (out / "checkpoints" / name).read_text().strip()).is_dir()
    load_model(out)
    finish(config, out, resume=True)
    assert result(out, 12) == expected, moment
    best = min(rows(out, "eval"), key=lambda row: row["loss"])["step"]
    assert (out / "checkpoints/best").read_text() == f"step-{best:08d}\n"
    assert (out / "checkpoints/latest").read_text() == "step-00000012\n"
    assert not list((out / "checkpoints").glob(".*"))


@pytest.fixture
def before_a_save(config, tmp_path):
    """A run of 12 steps that stands just before the save of step 10, its best so far: (config, folder, result)."""
    config = change(config, train={"steps": 12, "checkpoint_every": 5, "eval_every": 5, "keep": 1})
    finish(config, tmp_path / "straight")
    run_until(config, tmp_path / "base", 9)
    return config, tmp_path / "base", result(tmp_path / "straight", 12)


def test_kill_at_some_moments_of_a_save(before_a_save, tmp_path):
    config, base, expected = before_a_save
    n = moments_of_a_save(config, base, 10, tmp_path)
    assert n >= 20  # four files and two pointers, half and whole, three renames, one rotation
    for moment in (0, n // 2, n - 2):
        check_kill_within_save(config, base, tmp_path / f"run{moment}", moment, 10, expected)


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_kill_at_every_moment_of_a_save(before_a_save, tmp_path):
    config, base, expected = before_a_save
    for moment in range(moments_of_a_save(config, base, 10, tmp_path)):
        check_kill_within_save(config, base, tmp_path / f"run{moment}", moment, 10, expected)


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_kill_at_20_random_instants(config, straight, tmp_path):
    config = change(config, train={"checkpoint_every": 1, "eval_every": 4})
    for name in ("first", "timed"):  # the first one also starts the server that the others are forked from
        begun = time.monotonic()
        process = start(train_child, config, tmp_path / name)
        process.join(60)
        assert process.exitcode == 0
    seconds, rng, killed, out = time.monotonic() - begun, random.Random(0), 0, tmp_path / "run"
    while killed < 20:  # one in each twentieth of a run; one that ended before shows what a run takes now
        begun = time.monotonic()
        process = start(train_child, config, out)
        process.join(seconds * (killed + rng.random()) / 20)
        if process.exitcode is None:
            process.kill()
            process.join(60)
        if process.exitcode == -signal.SIGKILL:
            killed += 1
        else:
            assert process.exitcode == 0
            seconds = 0.95 * (time.monotonic() - begun)
        if (out / "checkpoints/latest").exists():
            load_model(out)
        finish(config, out, resume=(out / "config.json").exists())
        assert result(out) == straight
        assert not list((out / "checkpoints").glob(".*"))
        shutil.rmtree(out)
