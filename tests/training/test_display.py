"""What training shows while it goes on."""

import io
import sys
import time

import pytest
from tiny import finish, rows, run_until

from grt import console
from grt.train.loop import Trainer


@pytest.fixture(autouse=True)
def progress(monkeypatch):
    monkeypatch.delenv("GRT_PROGRESS")


def test_without_a_terminal_there_are_plain_lines(config, tmp_path, capsys):
    finish(config, tmp_path / "run")
    told = capsys.readouterr().out
    lines = [line for line in told.splitlines() if not line.startswith("warning: ")]
    assert "\x1b" not in told and "\r" not in told
    assert lines[0].startswith("tiny: grt 1+1x3+1, 15,616 parameters, fp32 on cpu (1 threads); peak 1,000 GFLOP/s")
    assert "tokens to train on" in lines[1] and "bigram entropy" in lines[1]
    assert [line.split("  ")[0] for line in lines[2:]] == ["step 10", "step 20", "step 30/30", "step 30"]
    losses = rows(tmp_path / "run", "eval")[0]["loss_by_depth"]
    by_depth = "  ".join(f"{k}: {loss:.4f}" for k, loss in losses.items())
    bits = rows(tmp_path / "run", "eval")[0]["bits_per_byte"]
    assert lines[2] == f"step 10  validation loss {losses['3']:.4f}  bits per byte {bits:.4f}  by depth  {by_depth}"


def test_steps_are_told_now_and_then(config, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(console, "FIRST", 0.05)
    monkeypatch.setattr(console, "PAUSE", 0.2)
    real = Trainer.optimizer_step

    def optimizer_step(trainer: Trainer) -> dict:
        time.sleep(0.05)
        return real(trainer)

    monkeypatch.setattr(Trainer, "optimizer_step", optimizer_step)
    finish(config, tmp_path / "run")
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("step ")]
    told = [line for line in lines if " loss " in line]
    assert len(told) >= 3 and len(lines) <= 30
    done = [int(line.removeprefix("step ").partition("/")[0]) for line in told]
    assert done == sorted(done)
    assert all("/30" in line and " tokens/s  MFU " in line and "  left " in line for line in told)


class Screen(io.StringIO):
    """What a terminal would be sent."""

    def isatty(self) -> bool:
        return True


@pytest.fixture
def terminal(monkeypatch):
    """Called in a test: puts one in the place of both streams."""

    def open_screen() -> Screen:
        screen = Screen()
        monkeypatch.setenv("TERM", "xterm")
        monkeypatch.setenv("COLUMNS", "150")
        monkeypatch.setattr(sys, "stdout", screen)
        monkeypatch.setattr(sys, "stderr", screen)
        return screen

    return open_screen


def test_a_terminal_gets_a_progress_bar(config, tmp_path, terminal):
    screen = terminal()
    finish(config, tmp_path / "run")
    told = screen.getvalue()
    assert "\x1b[" in told and "30/30" in told and "tokens/s" in told and "MFU" in told
    assert "step 29/30" not in told and "step 20  validation loss" in told
    assert told.count("\x1b[?25l") == told.count("\x1b[?25h") == 1  # the cursor comes back


def test_the_cursor_comes_back_after_a_crash(config, tmp_path, terminal):
    screen = terminal()
    run_until(config, tmp_path / "run", 3)
    assert screen.getvalue().count("\x1b[?25h") == 1


def test_a_resumed_bar_starts_where_the_run_stands(config, tmp_path, terminal):
    run_until(config, tmp_path / "run", 5)
    screen = terminal()
    run_until(config, tmp_path / "run", 5, resume=True)
    assert "5/30" in screen.getvalue() and " 0/30" not in screen.getvalue()


def test_a_file_of_output_has_no_bars(config, tmp_path, terminal, monkeypatch):
    """`grt train ... > log` in a terminal: results go to the file, the bar to the terminal."""
    screen, log = terminal(), io.StringIO()
    monkeypatch.setattr(sys, "stdout", log)
    finish(config, tmp_path / "run")
    assert "step 20  validation loss" in log.getvalue() and "\x1b" not in log.getvalue()
    assert "30/30" in screen.getvalue() and "validation loss" not in screen.getvalue()
