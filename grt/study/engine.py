"""Runs side by side on this machine: each a process that divides the threads with the others, finished ones skipped,
broken ones resumed, those that another process trains waited for; a table that lives while they do."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from rich.live import Live
from rich.table import Table

from grt.config import RunConfig, config_hash
from grt.console import Output, alive, note, working
from grt.presets import change
from grt.runs.folder import is_held
from grt.runs.metrics import read_metrics
from grt.schema import to_dict
from grt.study.results import Results
from grt.study.worker import HELD, run_folder
from grt.train.interrupt import Interrupt, last_word

PACKAGE = Path(__file__).resolve().parents[1]
PAUSE = 0.5  # seconds between two looks at the processes
GRACE = 7.0  # seconds that a process has to save before it is killed: more than it gives itself


@dataclass
class Job:
    """A run on its way. state: waiting, elsewhere (another process trains it), running, stopped, done or failed (then
    `why`, its last words)."""

    config: RunConfig
    state: str = "waiting"
    why: str = ""
    process: subprocess.Popen | None = None
    started: float = 0.0
    log: IO[str] | None = field(default=None, repr=False)


PENDING = ("waiting", "elsewhere")


class Engine:
    """Trains what is not in `results` yet, `jobs` at a time, in the order given; run folders are in `runs`. Those at a
    time divide `threads` among them."""

    def __init__(self, configs: Sequence[RunConfig], results: Results, runs: Path, jobs: int, threads: int) -> None:
        unique = {config_hash(config): config for config in configs}  # experiments that share a run train it once
        self.results, self.runs = results, runs
        done = results.runs
        self.jobs = [Job(c, "done" if hash_ in done else "waiting") for hash_, c in unique.items()]
        self.n = max(1, min(jobs, sum(job.state == "waiting" for job in self.jobs)))
        self.threads = max(1, threads // self.n)
        self.console = Output()

    def run(self, max_seconds: float | None = None) -> int:
        """0 when all are done or the time is over; the first failed run's exit code; 130 or 143 after a signal. Runs
        that are stopped save, and go on with the next call."""
        self.runs.mkdir(parents=True, exist_ok=True)
        self.results.make()
        code = 0
        shown = "elsewhere" if self.console.is_terminal else "line"
        with (
            Interrupt(max_seconds, grace=GRACE + 2) as interrupt,
            self._live() as live,
            working("run", len(self.jobs), status=self._at_work, shown=shown) as progress,
        ):
            while any(job.state in (*PENDING, "running") for job in self.jobs):
                if interrupt.exit_code is not None:
                    self._stop()
                    break
                for job in [job for job in self.jobs if job.state == "running"]:
                    failed = self._look(job)
                    code = code or failed
                for job in [job for job in self.jobs if job.state in PENDING]:
                    if sum(other.state == "running" for other in self.jobs) < self.n:
                        self._begin(job)
                progress.reach(sum(job.state == "done" for job in self.jobs))
                if live:
                    live.update(self.table(now=True))
                time.sleep(PAUSE)
            if live:
                live.update(self.table())
        if interrupt.signal is not None:
            note(f"{last_word(interrupt.signal)}: the same command goes on, with {len(self._left())} runs left")
        return interrupt.exit_code or code

    def _left(self) -> list[Job]:
        return [job for job in self.jobs if job.state != "done"]

    def _at_work(self) -> str:
        """Where the runs are that are trained now, in one line."""
        now = [job for job in self.jobs if job.state == "running"]
        steps = {run_folder(self.runs, job.config).name: self._progress(job) for job in now}
        return ", ".join(f"{name} step {step} loss {loss}" for name, (step, loss, _) in steps.items())

    def _begin(self, job: Job) -> None:
        """Start it, unless another process has finished it since, or trains it."""
        folder = run_folder(self.runs, job.config)
        held = is_held(folder)  # first, since a run is collected before it is let go
        if self.results.look_again(job.config) is not None:
            job.state = "done"
            self._say(f"{folder.name}: done by another process")
        elif not held:
            self._start(job, folder)
        elif job.state != "elsewhere":
            job.state = "elsewhere"
            self._say(f"{folder.name}: another process trains it, waiting for its end")

    def _start(self, job: Job, folder: Path) -> None:
        job.log = (self.runs / f"{folder.name}.log").open("a", encoding="utf-8")
        # -P: modules are not looked for in the current folder, where a user's file may be named as one of them is.
        isolated = [] if Path.cwd() == PACKAGE.parent else ["-P"]
        command = [sys.executable, *isolated, "-m", "grt", "paper", "work", str(self.runs), str(self.results.folder)]
        environment = os.environ | {"OMP_NUM_THREADS": str(self.threads), "MKL_NUM_THREADS": str(self.threads)}
        # A session of its own: Ctrl-C reaches this process alone, which stops the others once.
        job.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=job.log, stderr=job.log, text=True, env=environment,
            start_new_session=True,
        )  # fmt: skip
        assert job.process.stdin
        config = change(job.config, train={"threads": self.threads})
        with contextlib.suppress(BrokenPipeError):  # it died at once; what it said is in its log
            job.process.stdin.write(json.dumps(to_dict(config)) + "\n")
            job.process.stdin.flush()
        job.state, job.started = "running", time.monotonic()
        self._say(f"{folder.name}: started")

    def _look(self, job: Job) -> int:
        assert job.process
        code = job.process.poll()
        if code is None:
            return 0
        self._close(job)
        name = run_folder(self.runs, job.config).name
        if code == 0:
            job.state = "done"
            self._say(f"{name}: done in {time.monotonic() - job.started:.0f} s")
            return 0
        if code == HELD:  # another process was faster
            job.state = "waiting"
            return 0
        job.state, job.why = "failed", self._last_words(name, code)
        self._say(f"{name}: failed, {job.why}")
        return code if code > 0 else 1

    def _last_words(self, name: str, code: int) -> str:
        if code < 0:  # what its log ends with is from before
            return f"killed by {signal.Signals(-code).name}"
        words = (self.runs / f"{name}.log").read_text(encoding="utf-8", errors="replace").strip().splitlines()
        return words[-1] if words else f"exit code {code}"

    def _stop(self) -> None:
        running = [job for job in self.jobs if job.process and job.state == "running"]
        for job in running:
            assert job.process
            job.process.terminate()
        for job in running:
            assert job.process
            try:
                job.process.wait(GRACE)
            except subprocess.TimeoutExpired:
                job.process.kill()
                job.process.wait()
            self._close(job)
            job.state = "done" if job.process.returncode == 0 else "stopped"
            self._say(f"{run_folder(self.runs, job.config).name}: {job.state}")

    def _close(self, job: Job) -> None:
        assert job.process and job.process.stdin and job.log
        with contextlib.suppress(BrokenPipeError):
            job.process.stdin.close()
        job.log.close()

    def _live(self):
        if not self.console.is_terminal:
            return contextlib.nullcontext()
        return Live(self.table(now=True), console=self.console, refresh_per_second=2)

    def _say(self, text: str) -> None:
        if not self.console.is_terminal:
            self.console.print(f"{text} ({len(self._left())} of {len(self.jobs)} left)")
            alive()

    def table(self, now: bool = False) -> Table:
        """Every run with its state, its step and its last loss; `now`: of those that are at work or went wrong, since a
        screen holds no more, and how many there are of each state."""
        states = Counter(job.state for job in self.jobs)
        table = Table(caption=", ".join(f"{n} {state}" for state, n in states.items()))
        shown = [job for job in self.jobs if not now or job.state not in ("done", "waiting")]
        for column in ("run", "seed", "state", "step", "loss", "left"):
            table.add_column(column, justify="left" if column in ("run", "state") else "right")
        for job in shown:
            table.add_row(job.config.name, str(job.config.train.seed), job.why or job.state, *self._progress(job))
        return table

    def _progress(self, job: Job) -> tuple[str, str, str]:
        steps = job.config.train.steps
        if result := self.results.runs.get(config_hash(job.config)):
            return str(steps), f"{result.loss:.4f}", ""
        path = run_folder(self.runs, job.config) / "metrics.jsonl"
        rows = [row for row in read_metrics(path) if row["kind"] == "train"] if path.exists() else []
        if not rows:
            return f"0/{steps}", "", ""
        last = rows[-1]
        left = (steps - last["step"]) * last["seconds"] / last["step"]
        return f"{last['step']}/{steps}", f"{last['loss_lm']:.4f}", f"{left / 60:.0f} min"


def cores() -> int:
    """Those that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
