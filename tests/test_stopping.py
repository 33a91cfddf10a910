"""Ways to start and to end a run: whose folder it is, signals, time limits, losses that are not finite, the display."""

import io
import json
import math
import os
import pty
import re
import select
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from rich.console import Console
from tiny import ROOT, environment, finish, grt, quick, result, rows, run_until, start, tiny, write_text

import grt.train.folder as folder_module
import grt.train.log as log_module
from grt.cli import main
from grt.config import VERSION, ConfigError, dump
from grt.data.prepare import prepare
from grt.evals.loss import Evaluation
from grt.presets import change
from grt.train.checkpoint import load_model
from grt.train.diagnose import NonFiniteError
from grt.train.folder import command_line
from grt.train.interrupt import Interrupt, parse_duration
from grt.train.log import Display
from grt.train.loop import Trainer


@pytest.fixture(autouse=True)
def fast(monkeypatch):
    quick(monkeypatch)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_text(tmp_path_factory.mktemp("data"))


@pytest.fixture
def config(data):
    return tiny(data)


@pytest.fixture
def endless(config):
    return change(config, train={"steps": 10**6, "checkpoint_every": 10**6, "eval_every": 10**6})


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


# Losses and gradients that are not finite


def snapshot(out: Path) -> dict[str, bytes]:
    return {str(p.relative_to(out)): p.read_bytes() for p in (out / "checkpoints").rglob("*") if p.is_file()}


def poison_weights(trainer: Trainer) -> None:
    trainer.model.get_parameter("core.0.mlp.up.weight").data[3, 2] = math.nan


def poison_output(trainer: Trainer) -> None:
    trainer.model.get_submodule("coda.0.attn.out").register_forward_hook(lambda m, i, output: output / 0)


def poison_rule(trainer: Trainer) -> None:
    read = trainer.model.rule.read
    trainer.model.rule.read = lambda h, h_pre, ctx: read(h, h_pre, ctx) + (math.inf if ctx.step == 0 else 0)


def poison_gradient(trainer: Trainer) -> None:
    trainer.model.rule.proj.weight.register_hook(lambda gradient: gradient * math.nan)


def poison_backward(trainer: Trainer) -> None:
    """All gradients of what ran before are spoilt with it."""
    up = trainer.model.get_submodule("coda.0.mlp.up")
    up.register_forward_hook(lambda m, i, output: output.register_hook(lambda g: g * math.nan) and None)


@pytest.mark.parametrize(
    ("poison", "what", "module"),
    [
        (poison_weights, "loss", "core.0.mlp.up.weight (its weights)"),
        (poison_output, "loss", "coda.0.attn.out"),
        (poison_rule, "loss", "rule (input of step 1)"),
        (poison_gradient, "gradient", "rule.proj.weight (its gradient)"),
        (poison_backward, "gradient", "coda.0.mlp.up.bias (its gradient)"),
    ],
)
def test_a_loss_that_is_not_finite_stops_the_run(config, tmp_path, poison, what, module):
    out = tmp_path / "run"
    run_until(config, out, 7)
    before = snapshot(out)
    trainer = Trainer(config, out, resume=True)  # at step 5
    weights = trainer.model.ln_f.weight.detach().clone()
    poison(trainer)
    with pytest.raises(NonFiniteError) as caught:
        trainer.run()
    row = rows(out, "event")[-1]
    drawn = [trainer.sampler(1337, 5, slot).steps for slot in (0, 1)]
    depth, named = (drawn[:1], f"depth {drawn[0]}") if what == "loss" else (drawn, "depths {}, {}".format(*drawn))
    assert row == {"kind": "event", "step": 5, "event": "nonfinite", "what": what, "depth": depth, "module": module}
    assert str(caught.value).startswith(f"the {what} is not finite at step 6 ({named}), first in {module}: ")
    assert "\n" not in str(caught.value) and str(caught.value).endswith("in a new folder.")
    assert [row["step"] for row in rows(out, "train")] == [1, 2, 3, 4, 5]
    assert torch.equal(trainer.model.ln_f.weight, weights)  # the step was not taken
    assert snapshot(out) == before
    load_model(out)


def test_the_slot_that_failed_is_the_one_that_is_named(config, tmp_path):
    """Poisoned in the second slot only, whose depth (3) is not that of the first (2)."""
    trainer = run_until(config, tmp_path / "run", 1)
    step = next(s for s in range(1, 30) if [trainer.sampler(1337, s, a).steps for a in (0, 1)] == [2, 3])
    trainer = run_until(config, tmp_path / "other", step)
    trainer.log = log_module.MetricsLog(tmp_path / "more.jsonl")
    transform = trainer.model.rule.transform
    trainer.model.rule.transform = lambda u, core, ctx: transform(u, core, ctx) * (math.nan if ctx.step == 2 else 1)
    with pytest.raises(NonFiniteError, match=rf"at step {step + 1} \(depth 3\), first in rule \(state of step 3\)"):
        Trainer.optimizer_step(trainer)
    trainer.log.close()


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_validation_loss_that_is_not_finite_stops_the_run(config, tmp_path, monkeypatch, bad):
    out = tmp_path / "run"
    run_until(config, out, 6)
    before = snapshot(out)
    losses = {0: 5.0, 1: 3.0, 2: bad, 3: 2.0}
    monkeypatch.setattr("grt.train.loop.evaluate", lambda *a, **k: Evaluation(losses, 1, 16, 1.0))
    with pytest.raises(NonFiniteError, match=r"the validation loss is not finite at step 10 \(depth 2\)"):
        finish(config, out, resume=True)
    assert rows(out, "event")[-1]["event"] == "nonfinite" and snapshot(out) == before


def test_the_command_ends_with_3(config, tmp_path):
    (tmp_path / "config.json").write_text(dump(config))
    out = tmp_path / "run"
    done = grt("train", "--config", tmp_path / "config.json", "--out", out, "--optim.lr", "1e30")
    assert done.returncode == 3, done.stderr
    assert done.stderr.startswith("grt: the loss is not finite at step 2 (depth ") and done.stderr.count("\n") == 1
    assert rows(out, "event")[-1]["event"] == "nonfinite" and not (out / "checkpoints").exists()


# The folder


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
    (package / "train").mkdir(parents=True)
    (package / "train/folder.py").write_text("x = 1\n")
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
    (package / "train/folder.py").write_text("x = 2\n")
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


# The display


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
