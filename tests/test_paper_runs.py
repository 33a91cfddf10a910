"""`grt paper run`: side by side, once, resumed after a kill, stopped in good order; failures that stop nothing else.

But for the slow ones, the runs are forked processes (forked_runs.py).
"""

import io
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import forked_runs
import pytest
from forked_runs import Forked, asked, seeded, then, trained, until
from rich.console import Console
from tiny import ROOT, environment, result, rows

from grt import cli
from grt.config import config_hash
from grt.presets import change
from grt.runs.folder import FolderLock, is_held
from grt.schema import to_dict
from grt.study.engine import Engine
from grt.study.results import Results
from grt.study.worker import run_folder
from grt.train.interrupt import Interrupt

data, sweep, forked = forked_runs.data, forked_runs.sweep, forked_runs.forked


def test_a_sweep_is_trained_once_and_built_alike(sweep, tmp_path, capsys, forked):
    config = sweep({"optim": {"lr": 0.01}}, {"optim": {"lr": 0.02}}, {"optim": {"lr": 0.01}}, {"optim": {"lr": 0.03}},
                   steps=8)  # fmt: skip
    assert cli.main(asked(tmp_path, "run", "--jobs", "2", "--threads", "2")) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(forked) == 3 and [process.beside for process in forked[:2]] == [0, 1]
    assert forked[2].beside <= 1  # the two before may end within one look
    assert len([x for x in lines if x.endswith(": started (3 of 3 left)")]) == 2
    assert lines[-1].endswith(" s (0 of 3 left)")
    folders = sorted((tmp_path / "results" / "nano" / "runs").iterdir())
    names = {"config.json", "env.json", "metrics.jsonl", "result.json"}
    assert len(folders) == 3 and all({p.name for p in folder.iterdir()} == names for folder in folders)
    found = Results(tmp_path / "results", "nano", [1])
    losses = [found.losses(change(config, optim={"lr": lr}))[1] for lr in (0.01, 0.02, 0.03)]
    assert len(set(losses)) == 3 and all(0 < loss < 6 for loss in losses)
    assert json.loads((folders[0] / "env.json").read_text())["command"].startswith("grt train --config config.json")

    assert cli.main(asked(tmp_path, "run", "--jobs", "2")) == 0
    assert len(forked) == 3 and capsys.readouterr().out.endswith("sweep.py are done: nothing to train.\n")
    built = []
    for _ in range(2):
        assert cli.main(asked(tmp_path, "build")) == 0
        paths = [Path(line) for line in capsys.readouterr().out.splitlines()]
        assert [path.name for path in paths] == ["sweep.md", "sweep.csv", "sweep.tex"]
        built.append([path.read_bytes() for path in paths])
    assert built[0] == built[1]
    assert all(f"| 0.0{i} | 1 | {loss:.4f} |" in built[0][0].decode() for i, loss in enumerate(losses, 1))


def test_a_killed_run_goes_on_to_the_same_end(sweep, tmp_path, capsys, forked):
    config = seeded(sweep({}, steps=60, checkpoint_every=10, eval_every=1000))
    (tmp_path / "whole").mkdir()
    for name in ("config.json", "sweep.py"):
        (tmp_path / "whole" / name).write_text((tmp_path / name).read_text())
    assert cli.main(asked(tmp_path / "whole", "run", "--threads", "1")) == 0
    out = run_folder(tmp_path / "runs" / "nano", config)
    then(lambda: trained(out, 15), lambda: forked[1].kill())  # noqa: PLW0108 - it is not there yet
    assert cli.main(asked(tmp_path, "run", "--threads", "1")) == 1
    assert f"{out.name}: failed, killed by SIGKILL (1 of 1 left)" in capsys.readouterr().out
    assert not trained(out, 60) and not list(tmp_path.glob("results/nano/runs/*"))
    assert cli.main(asked(tmp_path, "run", "--threads", "1")) == 0
    assert any(row["event"] == "resume" for row in rows(out, "event"))
    whole = run_folder(tmp_path / "whole" / "runs" / "nano", config)
    assert result(out, 60) == result(whole, 60)
    a, b = (Results(folder / "results", "nano", [1]).get(config) for folder in (tmp_path, tmp_path / "whole"))
    assert a is not None and b is not None and a.evaluation == b.evaluation
    assert {k: v for k, v in a.cost.items() if k != "seconds"} == {k: v for k, v in b.cost.items() if k != "seconds"}


def test_time_is_over(sweep, tmp_path, capsys, monkeypatch):
    out = run_folder(tmp_path / "runs" / "nano", seeded(sweep({}, steps=10**6, checkpoint_every=10**6)))

    def out_of_time(self) -> bool:
        return self.deadline - time.monotonic() <= 7200 and trained(out, 3)

    monkeypatch.setattr(Interrupt, "out_of_time", property(out_of_time))
    assert cli.main(asked(tmp_path, "run", "--max-time", "2h", seeds="1,2")) == 0
    stopped_and_saved(out, capsys.readouterr().out.splitlines())


def test_a_signal_to_all(sweep, tmp_path, capsys):
    out = run_folder(tmp_path / "runs" / "nano", seeded(sweep({}, steps=10**6, checkpoint_every=10**6)))
    then(lambda: trained(out, 3), lambda: os.kill(os.getpid(), signal.SIGTERM))
    assert cli.main(asked(tmp_path, "run", seeds="1,2")) == 143
    stopped_and_saved(out, capsys.readouterr().out.splitlines())


def stopped_and_saved(out: Path, lines: list[str]) -> None:
    """The first of two runs; the second was not begun."""
    assert lines == [f"{out.name}: started (2 of 2 left)", f"{out.name}: stopped (2 of 2 left)"]
    saved(out)
    assert [path.name for path in out.parent.iterdir() if path.is_dir()] == [out.name]


def saved(out: Path) -> None:
    last = rows(out, "event")[-1]
    assert (last["event"], last["signal"]) == ("signal", "SIGTERM")
    assert (out / "checkpoints" / "latest").read_text().strip() == f"step-{rows(out, 'train')[-1]['step']:08d}"
    FolderLock(out).release()  # nobody holds it any more


def test_a_run_whose_parent_is_gone_saves_and_leaves(sweep, tmp_path):
    config = seeded(sweep({}, steps=10**6, checkpoint_every=10**6))
    out = run_folder(tmp_path, config)
    with (tmp_path / "log").open("w") as log:
        command = [sys.executable, "-m", "grt", "paper", "work", str(tmp_path), str(tmp_path / "results")]
        process = Forked(
            command, stdin=subprocess.PIPE, stdout=log, stderr=log, text=True, env={}, start_new_session=True
        )
    process.stdin.write(json.dumps(to_dict(config)) + "\n")
    process.stdin.flush()
    until(lambda: trained(out, 3))
    process.terminate()  # of all at once, as when a machine is shut down
    process.stdin.close()  # as the system does for a process that was killed
    process.terminate()
    assert process.wait(60) == 143
    saved(out)


def test_failures_are_told_and_others_go_on(sweep, tmp_path, capsys, forked):
    """Text that is not there, a loss that is not finite, and a run that is well; later, only the failed ones again."""
    nowhere = {"data": {"path": str(tmp_path / "nowhere")}}
    wild = {"optim": {"lr": 1e30, "grad_clip": 1e30, "warmup_steps": 0}}
    config = sweep(nowhere, wild, {}, steps=8)
    for begun in (3, 5):
        assert cli.main(asked(tmp_path, "run")) == 2  # the first one's
        out = capsys.readouterr().out
        failed = [line.partition(": failed, ")[2] for line in out.splitlines() if ": failed, " in line]
        assert len(failed) == 2 and len(forked) == begun
        assert failed[0].startswith(f"grt: No file or folder {tmp_path / 'nowhere'}")
        assert failed[1].startswith("grt: the loss is not finite at step 2 ") and failed[1].endswith("left)")
    assert list(Results(tmp_path / "results", "nano", [1]).losses(config)) == [1]
    assert [process.poll() for process in forked] == [2, 3, 0, 2, 3]


def test_runs_divide_the_threads_as_many_as_there_are(sweep, tmp_path, monkeypatch):
    configs = [seeded(sweep({}), seed) for seed in (1, 2, 3)]
    results = Results(tmp_path, "nano", [1])
    for done, jobs, expected in [(0, 8, (3, 2)), (2, 8, (1, 6)), (3, 8, (1, 6)), (0, 2, (2, 3)), (0, 1, (1, 6))]:
        results.__dict__["runs"] = {config_hash(c): None for c in configs[:done]}
        found = Engine(configs, results, tmp_path, jobs, 6)
        assert (found.n, found.threads) == expected


def test_what_cannot_be_written_is_said_before_anything_is_trained(sweep, tmp_path, capsys, forked):
    sweep({})
    (tmp_path / "results" / "nano").mkdir(parents=True)
    (tmp_path / "results" / "nano" / "runs").write_text("")
    assert cli.main(asked(tmp_path, "run")) == 2
    assert capsys.readouterr().err == f"grt: --results: {tmp_path}/results/nano/runs is a file: give a folder.\n"
    (tmp_path / "results" / "nano" / "runs").unlink()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("grt.study.results.os.access", lambda path, how: False)  # root may write everywhere
        assert cli.main(asked(tmp_path, "run")) == 2
    assert "results/nano/runs cannot be written: give another folder, or mend its per" in capsys.readouterr().err
    assert not forked


def test_a_run_that_cannot_go_on_says_what_always_helps(sweep, tmp_path, capsys, forked):
    config = seeded(sweep({}, steps=8))
    assert cli.main(asked(tmp_path, "run")) == 0
    out = run_folder(tmp_path / "runs" / "nano", config)
    shutil.rmtree(tmp_path / "results")
    (out / "config.json").write_text("{")
    capsys.readouterr()
    assert cli.main(asked(tmp_path, "run")) == 2
    assert f" Or remove {out} and call grt paper run again. (1 of 1 left)" in capsys.readouterr().out
    shutil.rmtree(out)
    assert cli.main(asked(tmp_path, "run")) == 0


def test_what_a_log_held_before_is_not_the_reason(sweep, tmp_path, data):
    config = seeded(sweep({}))
    found = Engine([config], Results(tmp_path, "nano", [1]), tmp_path, 1, 1)
    name = run_folder(tmp_path, config).name
    (tmp_path / f"{name}.log").write_text("grt: an old complaint\n")
    assert found._last_words(name, -signal.SIGSEGV) == "killed by SIGSEGV"
    assert found._last_words(name, 2) == "grt: an old complaint"
    (tmp_path / f"{name}.log").write_text("")
    assert found._last_words(name, 7) == "exit code 7"


def test_the_table_while_it_runs(sweep, tmp_path):
    configs = [seeded(sweep({}), seed) for seed in (1, 2, 3)]
    found = Engine(configs, Results(tmp_path, "nano", [1]), tmp_path, 1, 1)
    found.jobs[0].state = "running"
    found.jobs[1].state, found.jobs[1].why = "failed", "grt: something"
    shown = Console(width=100, record=True, file=io.StringIO())
    shown.print(found.table(now=True))
    now = shown.export_text()
    assert "running" in now and "something" in now and now.count("tiny") == 2
    assert "1 running, 1 failed, 1 waiting" in now
    out = run_folder(tmp_path, configs[0])
    out.mkdir()
    row = {"kind": "train", "step": 20, "tokens": 1, "loss": 3.25, "loss_lm": 3.25, "seconds": 240.0, "depth": [1]}
    (out / "metrics.jsonl").write_text(json.dumps(row) + '\n{"kind": "tr')
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(found.table())
    lines = [line.replace("│", " ").split() for line in console.export_text().splitlines()]
    assert ["tiny", "1", "running", "20/30", "3.2500", "2", "min"] in lines
    assert ["tiny", "2", "grt:", "something", "0/30"] in lines and ["tiny", "3", "waiting", "0/30"] in lines


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGKILL, -9), (signal.SIGTERM, 143), (signal.SIGINT, 130)], ids=str
)
def test_whole_processes_end_with_the_one_that_started_them(sweep, tmp_path, number, code):
    """And the same call goes on with them."""
    config = sweep({}, steps=10**6, checkpoint_every=10**6, eval_every=10**6)
    command = [sys.executable, "-m", "grt", *asked(tmp_path, "run", "--jobs", "2", "--threads", "2", seeds="1,2")]
    outs = [run_folder(tmp_path / "runs" / "nano", seeded(config, seed)) for seed in (1, 2)]
    for time_round in (1, 2):
        with subprocess.Popen(command, env=environment(), cwd=ROOT, stdout=subprocess.DEVNULL) as process:
            steps = [len(rows(out, "train")) + 3 if out.exists() else 3 for out in outs]
            until(lambda steps=steps: all(map(trained, outs, steps)), 100)
            process.send_signal(number)
            assert process.wait(60) == code
        until(lambda r=time_round: all(told(out) == r for out in outs), 60)
        for out in outs:
            until(lambda out=out: not is_held(out))
            saved(out)
            assert len([row for row in rows(out, "event") if row["event"] == "resume"]) == time_round - 1


def told(out: Path) -> int:
    return sum(row["event"] == "signal" for row in rows(out, "event"))


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_whole_processes_train_and_skip(sweep, tmp_path):
    """In a folder where a file of the user's has a name of the standard library's."""
    sweep({}, {"optim": {"lr": 0.02}}, steps=8)
    (tmp_path / "random.py").write_text("raise RuntimeError('not what you want')\n")
    for lines in (4, 1):
        command = [sys.executable, "-P", "-m", "grt", *asked(tmp_path, "run", "--jobs", "2")]
        here = environment() | {"PYTHONPATH": str(ROOT)}
        found = subprocess.run(command, env=here, cwd=tmp_path, capture_output=True, text=True, check=True)
        assert len(found.stdout.splitlines()) == lines and found.stderr == ""
