"""Signals and time limits: a run that is told to end saves and says how to go on."""

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
from grt.runs.checkpoint import load_model
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
        with Interrupt() as interrupt:
            os.kill(os.getpid(), signal.SIGHUP)
            assert interrupt.exit_code is None
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_signal_during_a_validation_ends_the_run_after_it(config, tmp_path, monkeypatch):
    def validate(trainer: Trainer, display) -> bool:
        os.kill(os.getpid(), signal.SIGTERM)
        return real(trainer, display)

    real = Trainer.validate
    monkeypatch.setattr(Trainer, "validate", validate)
    assert Trainer(config, tmp_path / "run").run() == 143
    assert newest(tmp_path / "run") == rows(tmp_path / "run", "eval")[-1]["step"] == 10
    assert len(rows(tmp_path / "run", "train")) == 10


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
