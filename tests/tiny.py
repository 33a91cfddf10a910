"""What the tests of training share: a tiny run on generated text, and ways to stop or kill it."""

import multiprocessing
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from grt.config import DataConfig, ModelConfig, OptimConfig, RunConfig, TrainConfig
from grt.data.prepare import prepare
from grt.presets import change
from grt.runs.metrics import read_metrics
from grt.train.loop import Trainer

ROOT = Path(__file__).resolve().parent.parent
DETERMINED = ("step", "tokens", "loss", "loss_lm", "aux", "lr", "grad_norm", "depth")  # the rest is time and memory


def write_text(folder: Path) -> Path:
    """A prepared folder of 100 KB of words that follow one another by a rule, so that a tiny model can learn."""
    rng = random.Random(0)
    words = ["".join(rng.choices("abcdefghij", k=rng.randint(2, 6))) for _ in range(40)]
    text, word = [], 0
    for _ in range(20_000):
        text.append(words[word])
        word = (3 * word + rng.randint(0, 3)) % len(words)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "text.txt").write_text(" ".join(text), encoding="utf-8")
    return prepare(folder / "text.txt", out=folder / "prepared").folder


def tiny(data: Path, **sections: dict) -> RunConfig:
    """GRT 1+1x3+1 of width 16, two slots a step, noise and drawn depth on, 30 steps; sections as in presets.change."""
    config = RunConfig(
        name="tiny",
        model=ModelConfig(method="grt", layout="1+1x3+1", d_model=16, n_heads=2, context=16, vocab_size=257),
        data=DataConfig(path=str(data)),
        optim=OptimConfig(lr=1e-2, warmup_steps=5),
        train=TrainConfig(
            steps=30, tokens_per_step=2 * 4 * 16, batch_size=4, dtype="fp32", device="cpu", threads=1,
            eval_every=10, eval_windows=8, checkpoint_every=5,
        ),
    )  # fmt: skip
    return change(config, **sections)


def quick(patch: pytest.MonkeyPatch, curve: bool = False) -> None:
    """Leave out what takes seconds and decides nothing: the timed matrix product, and (unless asked) the curve."""
    patch.setattr("grt.train.loop.peak_flops", lambda device, dtype: (1e12, "a constant"))
    if not curve:
        patch.setattr("grt.train.loop.draw_curve", lambda runs, out: None)


class Stop(Exception):
    """Raised in place of the next step: a crash that leaves everything as it is."""


def run_until(config: RunConfig, out: Path, step: int, resume: bool = False) -> Trainer:
    """Train until `step` steps are done (and what follows them is), then crash."""
    trainer = Trainer(config, out, resume=resume)
    real = trainer.optimizer_step

    def optimizer_step() -> dict:
        if trainer.state.step >= step:
            raise Stop
        return real()

    trainer.optimizer_step = optimizer_step
    with pytest.raises(Stop):
        trainer.run()
    return trainer


def finish(config: RunConfig, out: Path, resume: bool = False) -> Trainer:
    trainer = Trainer(config, out, resume=resume)
    assert trainer.run() == 0
    return trainer


def rows(out: Path, kind: str) -> list[dict]:
    return [row for row in read_metrics(out / "metrics.jsonl") if row["kind"] == kind]


def result(out: Path, step: int = 30) -> tuple[list[tuple], bytes]:
    """What must not depend on how a run was interrupted: every logged step, and the final weights to the bit."""
    steps = [tuple(repr(row[key]) for key in DETERMINED) for row in rows(out, "train")]
    return steps, (out / f"checkpoints/step-{step:08d}/model.safetensors").read_bytes()


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "error::UserWarning"}


def grt(*arguments: object, **options) -> subprocess.CompletedProcess:
    """The command line in a process of its own."""
    command = [sys.executable, "-m", "grt", *map(str, arguments)]
    return subprocess.run(
        command, capture_output=True, text=True, env=environment(), cwd=ROOT, timeout=90, check=False, **options
    )


# A process that can be killed costs seconds when it imports torch itself: these are forked from one that has.
forkserver = multiprocessing.get_context("forkserver")
# torch._dynamo takes seconds more, and the first optimizer imports it.
forkserver.set_forkserver_preload(["grt.train.loop", "grt.cli", "torch._dynamo", "grt.study.results", "tiny"])


def start(function, *arguments: object, stderr: Path | None = None) -> multiprocessing.Process:
    process = forkserver.Process(target=_child, args=(function, arguments, stderr))
    process.start()
    return process


def _child(function, arguments: tuple, stderr: Path | None) -> None:
    with pytest.MonkeyPatch.context() as patch:
        quick(patch)
        sink = os.open(stderr or os.devnull, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(sink, 2)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        sys.exit(function(*arguments))


def train_child(config: RunConfig, out: Path, resume: bool = False) -> int:
    return Trainer(config, out, resume=resume).run()


def kill_at_step(config: RunConfig, out: Path, step: int, resume: bool = False) -> None:
    """Train in a process that kill -9 ends in the middle of step `step` + 1, half of its line logged."""
    process = start(_kill_at_step, config, out, step, resume)
    process.join(60)
    assert process.exitcode == -signal.SIGKILL


def _kill_at_step(config: RunConfig, out: Path, step: int, resume: bool) -> None:
    trainer = Trainer(config, out, resume=resume)
    write = trainer.log.write

    def half(kind: str, now: int, **values) -> None:
        if kind == "train" and now > step:
            trainer.log.file.write('{"kind": "train", "st')
            trainer.log.file.flush()
            os.kill(os.getpid(), signal.SIGKILL)
        write(kind, now, **values)

    trainer.log.write = half
    trainer.run()
