"""Signals and time limits: a run that is told to end saves and says how to go on."""

import json
import os
import pty
import select
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from tiny import ROOT, environment, finish, result, rows, run_until, start

from grt.cli import main
from grt.config import dump
from grt.errors import ConfigError
from grt.evals.loss import evaluate
from grt.presets import change
from grt.runs.checkpoint import load_model
from grt.runs.compare import comparison_report
from grt.train import interrupt, loop
from grt.train.interrupt import Interrupt, parse_duration
from grt.train.loop import Trainer


def run_for(config, out: Path, seconds: float, resume: bool = False) -> int:
    return Trainer(config, out, resume=resume).run(seconds)


def newest(out: Path) -> int:
    return int((out / "checkpoints/latest").read_text().strip().removeprefix("step-"))


# Signals


def wait_for_steps(out: Path, n: int) -> None:
    end = time.monotonic() + 60
    while not (out / "metrics.jsonl").exists() or len(rows(out, "train")) < n:
        assert time.monotonic() < end, "no step was logged"
        time.sleep(0.02)


def check_saved_at_the_signal(config, out: Path, name: str) -> None:
    last = rows(out, "train")[-1]["step"]
    assert newest(out) == last >= 3
    assert [(row["step"], row["event"]) for row in rows(out, "event")] == [(last, "save"), (last, "signal")]
    assert rows(out, "event")[-1]["signal"] == name
    load_model(out)
    assert run_for(config, out, resume=True, seconds=0) == 0
    assert [row["step"] for row in rows(out, "train")] == list(range(1, last + 2))


def test_sigterm_ends_the_command_with_143(endless, tmp_path):
    (tmp_path / "config.json").write_text(dump(endless))
    out = tmp_path / "run"
    command = [sys.executable, "-m", "grt", "train", "--config", tmp_path / "config.json", "--out", out]
    with subprocess.Popen(command, stdout=-1, stderr=-1, text=True, env=environment(), cwd=ROOT) as process:
        wait_for_steps(out, 3)
        process.terminate()
        told, errors = process.communicate(timeout=60)
    assert process.returncode == 143 and errors == ""
    assert f"SIGTERM: saved step {newest(out)}; go on with --resume" in told
    check_saved_at_the_signal(endless, out, "SIGTERM")


def command(arguments: list[str]) -> int:
    """In a child: the command line, with the usual handler of Ctrl-C (a shell's background jobs ignore it)."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    return main(arguments)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGHUP, 129)])
def test_ctrl_c_and_a_hangup_end_the_command_after_saving(endless, tmp_path, number, code):
    (tmp_path / "config.json").write_text(dump(endless))
    out = tmp_path / "run"
    process = start(command, ["train", f"--config={tmp_path / 'config.json'}", f"--out={out}"])
    wait_for_steps(out, 3)
    os.kill(process.pid, number)
    process.join(60)
    assert process.exitcode == code
    check_saved_at_the_signal(endless, out, number.name)


def test_a_closed_window_still_saves(endless, tmp_path):
    """On a terminal, whose other end is closed: from then on each line that is written fails."""
    (tmp_path / "config.json").write_text(dump(endless))
    out = tmp_path / "run"
    ours, theirs = pty.openpty()
    arguments = [sys.executable, "-m", "grt", "train", "--config", tmp_path / "config.json", "--out", out]
    with subprocess.Popen(
        arguments, stdin=theirs, stdout=theirs, stderr=theirs, env=environment(), cwd=ROOT, start_new_session=True
    ) as process:
        os.close(theirs)
        reader = threading.Thread(target=drain, args=(ours, out))
        reader.start()
        wait_for_steps(out, 3)
        (out / ".closing").touch()
        reader.join()
        os.close(ours)
        time.sleep(0.3)
        process.send_signal(signal.SIGHUP)
        assert process.wait(60) == 129
    (out / ".closing").unlink()
    check_saved_at_the_signal(endless, out, "SIGHUP")


def drain(terminal: int, out: Path) -> None:
    """Read what is shown, or it would block the one who shows it."""
    while not (out / ".closing").exists():
        if select.select([terminal], [], [], 0.05)[0]:
            os.read(terminal, 4096)


def test_nohup_is_respected(config, tmp_path):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Interrupt() as entered:
            os.kill(os.getpid(), signal.SIGHUP)
            assert entered.exit_code is None
    finally:
        signal.signal(signal.SIGHUP, before)


def all_rows(out: Path) -> list[dict]:
    """What must not depend on signals: steps, validations and monitors, but for times."""
    kept = [row for kind in ("train", "eval", "monitor") for row in rows(out, kind)]
    return [{k: v for k, v in row.items() if k not in ("seconds", "tokens_per_s", "mfu")} for row in kept]


@pytest.mark.parametrize("window", [1, 2, 8])
@pytest.mark.parametrize("step", [10, 30])
def test_a_signal_breaks_off_a_validation_and_the_resumed_run_repeats_it(config, tmp_path, monkeypatch, step, window):
    """Also that of the last step. No row is written; what follows equals the run that nothing interrupted."""
    config = change(config, train={"batch_size": 1, "tokens_per_step": 32})
    finish(config, tmp_path / "straight")
    out, real, seen = tmp_path / "run", loop.evaluate, []

    def evaluate(model, split, *, between, **options):
        def then_signal() -> None:
            seen.append(trainer.state.step)
            if seen.count(step) == window:
                os.kill(os.getpid(), signal.SIGTERM)
            between()

        return real(model, split, between=then_signal, **options)

    monkeypatch.setattr(loop, "evaluate", evaluate)
    trainer = Trainer(config, out)
    assert trainer.run() == 143
    assert seen.count(step) == window and seen[-1] == step  # not a window more
    assert newest(out) == rows(out, "train")[-1]["step"] == step
    assert step not in [row["step"] for row in rows(out, "eval") + rows(out, "monitor")]
    monkeypatch.setattr(loop, "evaluate", real)
    finish(config, out, resume=True)
    assert result(out) == result(tmp_path / "straight") and all_rows(out) == all_rows(tmp_path / "straight")
    best = [(folder / "checkpoints" / "best").read_text() for folder in (out, tmp_path / "straight")]
    assert best[0] == best[1]


def test_a_signal_before_a_validation_that_is_due_does_not_wait_for_it(config, tmp_path, monkeypatch):
    finish(config, tmp_path / "straight")
    out = tmp_path / "run"
    with monkeypatch.context() as patch:
        stop_after(10, patch)
        assert Trainer(config, out).run() == 143
    assert newest(out) == 10 and rows(out, "eval") == []
    trainer = Trainer(config, out, resume=True)  # and is killed when the validation is done, before it saves
    monkeypatch.setattr(trainer, "optimizer_step", lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        trainer.run()
    assert [row["step"] for row in rows(out, "eval")] == [10]
    trainer = finish(config, out, resume=True)
    assert result(out) == result(tmp_path / "straight") and all_rows(out) == all_rows(tmp_path / "straight")
    assert trainer.state.best_step == rows(out, "eval")[-1]["step"]


def test_a_signal_ends_a_step_between_its_slots(config, tmp_path, monkeypatch):
    """The step is thrown away, and repeated by the resumed run."""
    finish(config, tmp_path / "straight")
    out, real, slots = tmp_path / "run", Trainer.slot_loss, []

    def slot_loss(trainer: Trainer, step: int, slot: int, *args, **options):
        if (step, slot) == (12, 0):
            os.kill(os.getpid(), signal.SIGTERM)
        slots.append((step, slot))
        return real(trainer, step, slot, *args, **options)

    monkeypatch.setattr(Trainer, "slot_loss", slot_loss)
    assert Trainer(config, out).run() == 143
    assert slots[-1] == (12, 0) and newest(out) == 12
    monkeypatch.setattr(Trainer, "slot_loss", real)
    finish(config, out, resume=True)
    assert result(out) == result(tmp_path / "straight") and all_rows(out) == all_rows(tmp_path / "straight")


def deaf(arguments: list[str], mark: Path, grace: float) -> int:
    """In a child: the command line, whose first slot of the fourth step is one call of a library that takes long, in
    which Python does not get to handle a signal."""
    real = Trainer.slot_loss
    interrupt.GRACE = grace

    def slot_loss(trainer: Trainer, step: int, slot: int, *args, **options):
        if step == 3:
            mark.touch()
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})  # another thread gets it
            time.sleep(60)
        return real(trainer, step, slot, *args, **options)

    Trainer.slot_loss = slot_loss
    return command(arguments)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_pass_that_takes_too_long_is_not_waited_for(endless, tmp_path, number, code):
    (tmp_path / "config.json").write_text(dump(endless))
    out, mark, told = tmp_path / "run", tmp_path / "mark", tmp_path / "told"
    process = start(deaf, ["train", f"--config={tmp_path / 'config.json'}", f"--out={out}"], mark, 0.3, stderr=told)
    until(mark.exists)
    began = time.monotonic()
    os.kill(process.pid, number)
    process.join(30)
    assert process.exitcode == code and time.monotonic() - began < 5
    assert told.read_text().splitlines()[-1] == (
        f"{number.name}: saved step 3; go on with --resume (grt train --resume --out {out})"
    )
    check_saved_at_the_signal(endless, out, number.name)


def until(condition) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def stuck(arguments: list[str], mark: Path) -> int:
    """In a child: the command line, whose third step never ends."""
    real = Trainer.optimizer_step

    def optimizer_step(trainer: Trainer) -> dict:
        if trainer.state.step == 2:
            mark.touch()
            end = time.monotonic() + 60
            while time.monotonic() < end:
                time.sleep(0.05)
        return real(trainer)

    Trainer.optimizer_step = optimizer_step
    return command(arguments)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, -signal.SIGTERM), (signal.SIGINT, 130)])
def test_a_second_signal_kills(endless, tmp_path, number, code):
    (tmp_path / "config.json").write_text(dump(endless))
    out, mark = tmp_path / "run", tmp_path / "mark"
    process = start(stuck, ["train", f"--config={tmp_path / 'config.json'}", f"--out={out}"], mark)
    end = time.monotonic() + 60
    while not mark.exists():
        assert time.monotonic() < end
        time.sleep(0.02)
    os.kill(process.pid, number)
    process.join(0.5)
    assert process.exitcode is None  # the first one waits for the end of the step
    os.kill(process.pid, number)
    process.join(20)
    assert process.exitcode == code
    assert not (out / "checkpoints").exists()


def test_a_run_gives_the_handlers_back(config, tmp_path):
    caught = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = [signal.getsignal(number) for number in caught]
    run_until(config, tmp_path / "run", 1)
    assert [signal.getsignal(number) for number in caught] == before


# Time limits


def test_max_time_saves_and_leaves_with_0(config, tmp_path):
    finish(config, tmp_path / "straight")
    out = tmp_path / "run"
    assert run_for(config, out, seconds=0) == 0
    assert newest(out) == 1 and rows(out, "event")[-1]["signal"] == "max-time"
    assert run_for(config, out, resume=True, seconds=0) == 0
    assert newest(out) == 2
    assert run_for(config, out, resume=True, seconds=10**4) == 0
    assert result(out) == result(tmp_path / "straight")


def stop_after(step: int, monkeypatch) -> None:
    """SIGTERM comes during that step of every run."""
    real = Trainer.optimizer_step

    def optimizer_step(trainer: Trainer) -> dict:
        row = real(trainer)
        if trainer.state.step == step:
            os.kill(os.getpid(), signal.SIGTERM)
        return row

    monkeypatch.setattr(Trainer, "optimizer_step", optimizer_step)


@pytest.mark.parametrize("how", ["max-time", "signal"])
def test_a_run_that_stops_before_its_first_validation_validates_once(config, tmp_path, how, monkeypatch):
    finish(config, tmp_path / "straight")
    out, seconds = tmp_path / "run", 0 if how == "max-time" else 10**4
    with monkeypatch.context() as patch:
        if how == "signal":
            stop_after(2, patch)
        assert run_for(config, out, seconds) == (0 if how == "max-time" else 143)
    (row,) = rows(out, "eval")
    step = newest(out)
    assert row["step"] == step < 10 and row["early"] is True
    model, _ = load_model(out)
    other = Trainer(config, tmp_path / "other")
    split = other.val_split
    limit = {"limit": config.train.eval_windows, "batch_size": config.train.batch_size}
    assert row["loss"] == evaluate(model, split, **limit).loss_by_depth[3]
    other.close()
    (compared,) = comparison_report([out], "tokens", tmp_path / "c.png")["rows"]
    assert compared["loss"] == row["loss"]
    assert json.loads((out / f"checkpoints/step-{step:08d}/state.json").read_text())["best_loss"] is None
    assert run_for(config, out, resume=True, seconds=10**4) == 0
    assert result(out) == result(tmp_path / "straight")
    assert rows(out, "eval") == rows(tmp_path / "straight", "eval")


def test_a_validation_that_takes_long_is_given_up_at_a_signal(config, tmp_path, monkeypatch):
    monkeypatch.setattr(loop, "EARLY", 0.0)
    stop_after(2, monkeypatch)
    assert run_for(config, tmp_path / "run", 10**4) == 143
    assert rows(tmp_path / "run", "eval") == [] and newest(tmp_path / "run") == 2


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("170m", 10200), ("2h", 7200), ("90s", 90), ("1h30m", 5400), ("1h1m1s", 3661), ("45", 45), ("0.5h", 1800)],
)
def test_durations(text, seconds):
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", " ", "2x", "-1h", "1m2h", "h", "1 h", "nan"])
def test_no_durations(config, tmp_path, capsys, text):
    with pytest.raises(ConfigError, match="--max-time is"):
        parse_duration(text)
    (tmp_path / "config.json").write_text(dump(config))
    if text.strip():
        arguments = ["train", f"--config={tmp_path / 'config.json'}", f"--out={tmp_path / 'run'}", f"--max-time={text}"]
        assert main(arguments) == 2 and "--max-time" in capsys.readouterr().err
        assert not (tmp_path / "run").exists()  # or the corrected command would find a run there
