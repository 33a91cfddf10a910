"""`grt paper run` beside another process on the same folders: no run is trained twice, none counts as failed."""

import shutil
import subprocess
import sys

import forked_runs
import pytest
from forked_runs import asked, seeded, then
from tiny import ROOT, environment, quick, rows

from grt import cli
from grt.runs.folder import FolderLock, is_held
from grt.study import engine
from grt.study.results import Results
from grt.study.worker import HELD, run_folder, train_and_collect

data, sweep, forked = forked_runs.data, forked_runs.sweep, forked_runs.forked


def test_a_run_that_another_process_trains_is_waited_for(sweep, tmp_path, capsys, forked):
    """And not trained again: seed 1 was elsewhere; seed 2 is trained meanwhile."""
    config = sweep({}, steps=8)
    assert cli.main([*asked(tmp_path, "run"), "--results", str(tmp_path / "elsewhere")]) == 0
    [out] = (tmp_path / "runs" / "nano").glob("tiny-1-*/")
    lock = FolderLock(out)

    def finish():
        shutil.copytree(tmp_path / "elsewhere", tmp_path / "results", dirs_exist_ok=True)
        lock.release()

    capsys.readouterr()
    then(lambda: len(forked) == 2 and forked[1].poll() == 0, finish)
    assert cli.main(asked(tmp_path, "run", seeds="1,2")) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"{out.name}: another process trains it, waiting for its end (2 of 2 left)"
    assert lines[-1] == f"{out.name}: done by another process (0 of 2 left)" and len(lines) == 4
    assert len(forked) == 2
    assert sorted(Results(tmp_path / "results", "nano", [1, 2]).losses(config)) == [1, 2]


def test_a_run_that_another_process_began_just_before(sweep, tmp_path, capsys, forked, monkeypatch):
    """It is no failure, and is trained here where the other one leaves it."""
    out = run_folder(tmp_path / "runs" / "nano", seeded(sweep({}, steps=8)))
    out.mkdir(parents=True)
    lock, looks = FolderLock(out), iter([False])
    monkeypatch.setattr(engine, "is_held", lambda folder: next(looks, None) is None and is_held(folder))
    then(lambda: forked and forked[0].poll() is not None, lock.release)
    assert cli.main(asked(tmp_path, "run")) == 0
    assert [process.poll() for process in forked] == [HELD, 0]
    assert "failed" not in capsys.readouterr().out and len(rows(out, "train")) == 8


def test_a_run_is_held_until_it_is_collected(sweep, tmp_path, monkeypatch):
    config, seen = seeded(sweep({}, steps=2)), []
    monkeypatch.setattr("grt.study.results.collect", lambda out, results, config: seen.append(is_held(out)))
    quick(monkeypatch)
    assert train_and_collect(config, tmp_path, tmp_path / "results") == 0
    assert seen == [True] and not is_held(run_folder(tmp_path, config))


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_two_whole_processes_train_each_run_once(sweep, tmp_path):
    config = sweep({}, {"optim": {"lr": 0.02}}, steps=30)
    command = [sys.executable, "-m", "grt", *asked(tmp_path, "run", seeds="1,2")]
    both = [subprocess.Popen(command, env=environment(), cwd=ROOT, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    told = [process.communicate(timeout=250)[0] for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert "failed" not in "".join(told) and "another process" in "".join(told)
    outs = [path.parent for path in (tmp_path / "runs" / "nano").glob("*/config.json")]
    assert len(outs) == 4
    for out in outs:
        assert [row["step"] for row in rows(out, "train")] == list(range(1, 31))
        assert not [row for row in rows(out, "event") if row["event"] == "resume"]
    assert sorted(Results(tmp_path / "results", "nano", [1, 2]).losses(config)) == [1, 2]
