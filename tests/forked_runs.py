"""What tests of `grt paper run` share: a sweep of tiny runs, and processes forked for them from one that has torch."""

import multiprocessing.connection
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from tiny import start, tiny, write_text

from grt import cli
from grt.config import dump
from grt.presets import change
from grt.study import engine

SWEEP = """
from pathlib import Path
from grt.config import load
from grt.presets import change

def RUNS(scale, seeds):
    config = load(Path(__file__).with_name("config.json"))
    return [change(config, **{"train": {"seed": seed}, **sections}) for seed in seeds for sections in SECTIONS]
"""


class Forked:
    """Stands in for subprocess.Popen: the same command line, in a process forked from one that has torch."""

    begun: list["Forked"] = []

    def __init__(self, command, *, stdin, stdout, stderr, text, env, start_new_session):
        assert command[:3] == [sys.executable, "-m", "grt"] and stdin == subprocess.PIPE and start_new_session
        reader, writer = multiprocessing.Pipe(duplex=False)
        self.process = start(command_line, reader, command[3:], stderr=Path(stdout.name))
        reader.close()
        self.stdin = os.fdopen(os.dup(writer.fileno()), "w")
        writer.close()
        self.pid, self.terminate, self.kill = self.process.pid, self.process.terminate, self.process.kill
        self.asked = threading.Lock()  # such a process says only once how it ended; who asks too takes it for lost
        self.beside = sum(other.poll() is None for other in self.begun)
        self.begun.append(self)

    def poll(self):
        with self.asked:
            return self.process.exitcode

    returncode = property(poll)

    def wait(self, timeout=None):
        multiprocessing.connection.wait([self.process.sentinel], timeout)
        return self.poll()


def command_line(reader, arguments: list[str]) -> int:
    sys.stdin = os.fdopen(os.dup(reader.fileno()))
    return cli.main(arguments)


@pytest.fixture(autouse=True)
def forked(monkeypatch):
    """The processes that were begun."""
    popen = SimpleNamespace(Popen=Forked, PIPE=subprocess.PIPE, TimeoutExpired=subprocess.TimeoutExpired)
    monkeypatch.setattr(engine, "subprocess", popen)
    monkeypatch.setattr(engine, "PAUSE", 0.02)
    monkeypatch.setattr(Forked, "begun", [])
    yield Forked.begun
    for process in Forked.begun:
        if process.poll() is None:
            process.kill()


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_text(tmp_path_factory.mktemp("data"))


@pytest.fixture
def sweep(data, tmp_path):
    """Writes an experiment file, of the tiny config with these sections changed; returns that config."""

    def write(*changed: dict, **train) -> None:
        config = tiny(data, train=train)
        (tmp_path / "config.json").write_text(dump(config))
        (tmp_path / "sweep.py").write_text(f"SECTIONS = {changed!r}\n{SWEEP}")
        return config

    return write


def asked(folder: Path, action: str, *more: str, seeds: str = "1") -> list[str]:
    runs = ["--runs", str(folder / "runs")] if action == "run" else []
    where = ["--results", str(folder / "results"), "--seeds", seeds]
    return ["paper", action, str(folder / "sweep.py"), *where, *runs, *more]


def seeded(config, seed: int = 1, **sections: dict):
    return change(config, **{"train": {"seed": seed}, **sections})


def until(condition, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come about"
        time.sleep(0.01)


def trained(out: Path, steps: int) -> bool:
    """So many steps were logged."""
    path = out / "metrics.jsonl"
    return path.exists() and path.read_text().count('"kind": "train"') >= steps


def then(condition, action) -> None:
    """Watch from another thread, and act once."""
    threading.Thread(target=lambda: (until(condition), action()), daemon=True).start()
