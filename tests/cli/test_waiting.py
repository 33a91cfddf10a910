"""No command keeps people waiting without a word, and none keeps them after a signal: each runs in a process of its own
that is slow at one place (slow_stand_in.py), where it would take a minute."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from grt.cli import COMMANDS
from grt.cli.bench import BENCHES
from grt.cli.paper import ACTIONS

ROOT = Path(__file__).parents[2]
WATCHED = 14.0  # seconds: the second line of a silent command comes after twelve
START, LATER, END = 5.0, 10.0, 10.0  # seconds of silence that are allowed, and from a signal to the end

# Subcommand -> where it is slow, and how it is called: {run}, {runs}, {texts} are there, {out} is not
SLOW = {
    "prepare": ("grt.data.prepare:write_prepared", "prepare {texts} --out {out}"),
    "train": ("grt.train.loop:build_model", "train grt-nano --data.path {texts} --out {out}"),
    "eval": ("grt.evals.report:evaluate", "eval {run}"),
    "generate": ("grt.cli.report:load_model", "generate {run} --prompt a"),
    "calibrate": ("grt.evals.calibration:calibrate", "calibrate {run} --exit state --mean-depth 3 --out {out}"),
    "info": ("grt.cli.report:build_model", "info grt-nano"),
    "list": ("grt.cli.report:read_metrics", "list {runs}"),
    "compare": ("grt.runs.compare:read_metrics", "compare {run} {run} --out {out}.png"),
    "paper list": ("grt.study.results:Results", "paper list"),
    "paper run": ("grt.study.engine:is_held", "paper run tab_seeds --runs {out} --results {out}-results"),
    "paper build": ("grt.study.results:Results", "paper build tab_hyperparams --results {out}"),
    "paper pack": ("grt.study.results:Results", "paper pack tab_seeds --results {out}"),
    "export": ("grt.hf.exchange:export_hf", "export {run} {out}"),
    "import": ("grt.hf.exchange:import_gpt2", "import gpt2 {out}-theirs --out {out}"),
    "demo": ("grt.train.loop:build_model", "demo --out {out}"),
    "bench training": ("grt.bench.training:measure", "bench training --alternations 1"),
    "bench latency": ("grt.bench.latency:measure", "bench latency --sizes nano --compile off"),
    "bench memory": ("grt.bench.memory:held", "bench memory --size nano"),
    "bench dial": ("grt.bench.dial:evaluate", "bench dial {run} --new 8 --out {out}.png"),
    "bench halting": (
        "grt.bench.halting:calibrated",
        "bench halting {run} --windows 4 --calibration-windows 4 --new 8 --out {out}.png",
    ),
    "bench speculative": ("grt.bench.speculative:measure", "bench speculative {run} --new 8"),
}  # fmt: skip
WITHOUT = {"bench serve": "it needs vLLM, which has an environment of its own"}


def test_each_subcommand_is_here():
    several = {"paper": ACTIONS, "bench": BENCHES}
    names = [f"{name} {action}" for name in several for action in several[name]]
    names += [name for name in COMMANDS if name not in several]
    assert sorted(names) == sorted([*SLOW, *WITHOUT])


class Process:
    """A command, and the seconds since its start at which each of its lines came."""

    def __init__(self, where: str, how: str, arguments: list[str], folder: Path) -> None:
        self.lines: list[tuple[float, str]] = []
        script = Path(__file__).with_name("slow_stand_in.py")
        environment = (
            os.environ
            | {"GRT_PROGRESS": ""}
            | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        )
        self.start = time.monotonic()
        self.process = subprocess.Popen(
            [sys.executable, script, where, "60", how, *arguments], stdout=-1, stderr=subprocess.STDOUT, text=True,
            env=environment, cwd=folder,
        )  # fmt: skip
        self.reader = threading.Thread(target=self._read)
        self.reader.start()

    def _read(self) -> None:
        assert self.process.stdout
        for line in self.process.stdout:
            self.lines.append((time.monotonic() - self.start, line))

    def end_by(self, number: signal.Signals) -> tuple[int, float]:
        """The exit code, and the seconds until it was there."""
        sent = time.monotonic()
        self.process.send_signal(number)
        code = self.process.wait(60)
        return code, time.monotonic() - sent

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self.reader.join()
        assert self.process.stdout
        self.process.stdout.close()


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW)
def test_no_command_is_silent_for_long_or_outlives_a_signal(name, run, texts, tmp_path):
    where, command = SLOW[name]
    how = ("sleep", "library")[list(SLOW).index(name) % 2]
    number, code = ((signal.SIGTERM, 143), (signal.SIGINT, 130))[list(SLOW).index(name) // 2 % 2]
    names = {"run": run, "runs": run.parent, "texts": texts, "out": tmp_path / "out"}
    with contextlib.closing(Process(where, how, [a.format(**names) for a in command.split()], tmp_path)) as process:
        while time.monotonic() - process.start < WATCHED and process.process.poll() is None:
            time.sleep(0.05)
        assert process.process.poll() is None, process.lines
        times = [at for at, _ in process.lines]
        assert times and times[0] < START, process.lines
        pauses = [b - a for a, b in zip(times, [*times[1:], WATCHED], strict=True)]
        assert max(pauses) < LATER, process.lines
        ended, seconds = process.end_by(number)
        assert ended == code and seconds < END, (ended, seconds, process.lines)
    told = process.lines[-1][1]
    assert process.lines[-1][0] > WATCHED and "Traceback" not in "".join(line for _, line in process.lines)
    assert any(word in told for word in ("terminated", "interrupted", "SIGTERM", "SIGINT")), told
