"""What training shows while it goes on."""

import io

import pytest
from rich.console import Console
from tiny import finish, rows, run_until

import grt.console as log_module
from grt.console import Display


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


def test_plain_lines_come_now_and_then(capsys, monkeypatch):
    now = 100.0
    monkeypatch.setattr(log_module.time, "monotonic", lambda: now)
    display = Display(steps=100, done=20)
    for step in range(21, 101):
        now += 4.0
        display.update(step, 1.5, 1000.0, 0.25)
    display.close()
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[0] for line in lines] == [f"step {step}/100" for step in range(24, 101, 4)]
    assert lines[0] == "step 24/100  loss 1.5000  1,000 tokens/s  MFU 25.0%  left 304 s"


@pytest.fixture
def terminal(monkeypatch):
    """What a terminal would be sent."""
    screen = io.StringIO()
    monkeypatch.setattr(
        log_module, "Output", lambda: Console(file=screen, force_terminal=True, width=150, highlight=False)
    )
    return screen


def test_a_terminal_gets_a_progress_bar(config, tmp_path, terminal):
    finish(config, tmp_path / "run")
    told = terminal.getvalue()
    assert "\x1b[" in told and "30/30" in told and "tokens/s" in told and "MFU" in told
    assert "step 30/30  loss" not in told and "step 20  validation loss" in told
    assert told.count("\x1b[?25l") == told.count("\x1b[?25h") == 1  # the cursor comes back


def test_the_cursor_comes_back_after_a_crash(config, tmp_path, terminal):
    run_until(config, tmp_path / "run", 3)
    assert terminal.getvalue().count("\x1b[?25h") == 1


def test_a_resumed_bar_starts_where_the_run_stands(config, tmp_path, terminal):
    run_until(config, tmp_path / "run", 5)
    terminal.truncate(0)
    run_until(config, tmp_path / "run", 5, resume=True)
    assert "5/30" in terminal.getvalue() and " 0/30" not in terminal.getvalue()
