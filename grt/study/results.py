"""results/SCALE/runs: what finished runs left behind, without weights, found by the hash of their config.

A run's folder holds config.json, env.json, metrics.jsonl (every 20th training step) and result.json: the loss at each
depth on the first 256 validation windows, and what the run cost. It appears whole or not at all. `grt paper pack`
moves the folders of a study into one archive, STUDY.zip, from where they are read as well.
"""

import io
import json
import os
import re
import secrets
import shutil
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.resources.abc import Traversable
from pathlib import Path
from statistics import fmean
from typing import Any

from grt.config import RunConfig, config_hash, dump, load
from grt.data.tasks import PREFIX
from grt.errors import ConfigError
from grt.files import replace_file, write_file
from grt.presets import change

WINDOWS = 256
LOGGED = 20  # every such training step is kept
LARGEST = 1e300  # what is beyond cannot be printed as a float
BROKEN = (zipfile.BadZipFile, zlib.error, EOFError)  # what reading a damaged archive raises
MACHINE = ("cpu", "threads", "torch")  # what tables tell of env.json


def check_numbers(named: Mapping[str, Any]) -> None:
    """ValueError for a value that is no finite number."""
    for name, value in named.items():
        if type(value) not in (int, float) or not abs(value) < LARGEST:
            raise ValueError(f"{name} is {value!r}, no finite number")


@dataclass(frozen=True)
class Result:
    """A finished run. `evaluation`: as `grt eval --json`; `cost`: as a row of `grt compare --json`; `environment`: its
    env.json."""

    folder: Traversable  # on the disk or in an archive
    config: RunConfig
    evaluation: dict[str, Any]
    cost: dict[str, Any]
    environment: dict[str, Any]

    def check(self) -> None:
        """KeyError, TypeError, AttributeError or ValueError where something is missing that tables are made of."""
        numbers = {name: self.cost[name] for name in ("parameters", "seconds", "training_flops")}
        numbers |= {"loss": self.loss, "flops_per_token": self.inference_flops}
        numbers |= {f"the loss at depth {k}": loss for k, loss in self.by_depth.items()}
        for k, shares in self.accuracy.items():
            numbers |= {f"accuracy at depth {k} of {group}": share for group, share in shares.items()}
        check_numbers(numbers)
        depths = range(self.config.model.blocks.R + 1)
        if sorted(self.by_depth) != list(depths):
            raise ValueError(f"loss_by_depth is not of the depths 0 to {depths[-1]}")
        if self.config.data.path.startswith(PREFIX) and not all(self.accuracy.get(k) for k in depths):
            raise ValueError(f"accuracy_by_depth is not of the depths 0 to {depths[-1]}")
        if not isinstance(self.evaluation["data"]["sha256"], str):
            raise ValueError("data.sha256 is no text")

    @property
    def document(self) -> dict[str, Any]:
        """What result.json holds."""
        return {"evaluation": self.evaluation, "cost": self.cost}

    @property
    def loss(self) -> float:
        """Nats per token at full depth."""
        return self.evaluation["loss"]

    @property
    def by_depth(self) -> dict[int, float]:
        return {int(k): loss for k, loss in self.evaluation["loss_by_depth"].items()}

    @cached_property
    def gate_mean(self) -> float | None:
        """Of the state, the share that a step's gates kept when training last looked, mean over steps; None without."""
        from grt.runs.metrics import read_metrics

        path = self.folder / "metrics.jsonl"
        rows = [row.get("gate_mean") for row in read_metrics(path)] if path.is_file() else []
        means = [row for row in rows if isinstance(row, list) and row and all(isinstance(g, float) for g in row)]
        return fmean(means[-1]) if means else None

    @property
    def inference_flops(self) -> float:
        """Executed FLOPs per token at full depth, the head included."""
        depths = self.evaluation["depths"]
        return depths[max(depths, key=int)]["flops_per_token"]

    @property
    def accuracy(self) -> dict[int, dict[str, float]]:
        """Of a depth task: depth -> what is counted -> share that is right."""
        return {int(k): shares for k, shares in self.evaluation.get("accuracy_by_depth", {}).items()}


def read(folder: Traversable) -> Result:
    """The run that was collected there. ConfigError names the file that is damaged."""
    remedy = "remove its folder and run it again"
    if isinstance(folder, zipfile.Path):
        remedy = "restore the archive, or remove it and run its runs again"
    try:
        config = load(folder / "config.json")
    except BROKEN as error:
        raise ConfigError(f"{folder / 'config.json'} is damaged ({error}): {remedy}.") from None
    except ConfigError as error:
        what = re.split(r"\.$|: (?:give|restore) ", str(error))[0]  # its own remedy is for other files
        raise ConfigError(f"{what}: {remedy}.") from None
    path = folder / "env.json"
    try:
        environment = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(environment, dict):
            raise TypeError("it holds no fields")
        json.dumps(environment, ensure_ascii=False).encode()  # text that no file can hold
        if missing := [name for name in MACHINE if name not in environment]:
            raise KeyError(missing[0])
        path = folder / "result.json"
        document = json.loads(path.read_text(encoding="utf-8"))
        result = Result(folder, config, document["evaluation"], document["cost"], environment)
        result.check()
    except KeyError as error:
        raise ConfigError(f"{path} is damaged (it has no {error}): {remedy}.") from None
    except (ValueError, TypeError, AttributeError, RecursionError, *BROKEN) as error:
        raise ConfigError(f"{path} is damaged ({error}): {remedy}.") from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror}): {remedy}.") from None
    return result


class Results:
    """Those of one scale under a results folder, under these seeds. ConfigError where that folder is a file."""

    def __init__(self, root: Path, scale: str, seeds: Sequence[int]) -> None:
        self.folder, self.scale, self.seeds = root / scale, scale, tuple(seeds)
        for folder in (root, self.folder, self.folder / "runs"):
            if folder.exists() and not folder.is_dir():
                raise ConfigError(f"--results: {folder} is a file: give a folder.")

    @cached_property
    def runs(self) -> dict[str, Result]:
        """Hash -> finished run. ConfigError names a file that is damaged."""
        return self._read([*self.loose("*"), *self._packed()])

    def loose(self, pattern: str) -> list[Path]:
        """Folders of runs that are in no archive."""
        paths = sorted((self.folder / "runs").glob(f"{pattern}/result.json"))
        return [path.parent for path in paths if not path.parent.name.startswith(".")]

    def _packed(self) -> list[zipfile.Path]:
        found = []
        for archive in sorted((self.folder / "runs").glob("*.zip")):
            try:
                found += sorted(zipfile.Path(archive).iterdir(), key=str)
            except (OSError, *BROKEN) as error:
                raise ConfigError(f"{archive} cannot be read ({error}): restore it.") from None
        return found

    def _read(self, folders: Sequence[Traversable]) -> dict[str, Result]:
        found: dict[str, Result] = {}
        for result in map(read, folders):
            other = found.setdefault(config_hash(result.config), result)
            moving = isinstance(other.folder, Path) != isinstance(result.folder, Path)  # by a pack that was killed
            if other is not result and not (moving and other.document == result.document):
                raise ConfigError(f"{other.folder} and {result.folder} are the same run: remove one of them.")
        return found

    def pack(self, study: str, configs: Sequence[RunConfig]) -> int:
        """Move the folders of these runs, where they have any, into the archive of a study; how many there were."""
        hashes = {config_hash(config) for config in configs}
        folders = [folder for folder in self.loose("*") if config_hash(read(folder).config) in hashes]
        if not folders:
            return 0
        archive = self.folder / "runs" / f"{study}.zip"
        members = {}
        if archive.exists():
            with zipfile.ZipFile(archive) as old:
                members = {name: old.read(name) for name in old.namelist()}
        members |= {f"{folder.name}/{path.name}": path.read_bytes() for folder in folders for path in folder.iterdir()}
        packed = io.BytesIO()
        with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as new:
            for name in sorted(members):
                new.writestr(zipfile.ZipInfo(name), members[name], zipfile.ZIP_DEFLATED)  # no times: the same bytes
        replace_file(archive, packed.getvalue())
        for folder in folders:
            shutil.rmtree(folder)
        return len(folders)

    def make(self) -> None:
        """The folder of finished runs, before something is trained for it. ConfigError where it cannot be written."""
        folder = self.folder / "runs"
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK):
            raise ConfigError(f"--results: {folder} cannot be written: give another folder, or mend its permissions.")

    def look_again(self, config: RunConfig) -> Result | None:
        """`get`, with what other processes have collected meanwhile."""
        self.runs.update(self._read(self.loose(f"*-{config_hash(config)[:8]}")))
        return self.get(config)

    def get(self, config: RunConfig) -> Result | None:
        return self.runs.get(config_hash(config))

    def by_seed(self, config: RunConfig) -> dict[int, Result]:
        """The finished runs of a config under the seeds that were asked for."""
        found = {seed: self.get(change(config, train={"seed": seed})) for seed in self.seeds}
        return {seed: result for seed, result in found.items() if result is not None}

    def losses(self, config: RunConfig, depth: int | None = None) -> dict[int, float]:
        """Seed -> loss at a depth, the full one unless told."""
        runs = self.by_seed(config).items()
        return {seed: run.loss if depth is None else run.by_depth[depth] for seed, run in runs}


def collect(run: Path, results: Path, config: RunConfig | None = None) -> Path:
    """Evaluate a finished run and copy what made it into `results`/runs; returns that folder.

    config: as the study has it, by which tables look for the run; the run's own where it was trained without one.
    """
    from grt.evals.report import evaluation_report
    from grt.runs.compare import Finished
    from grt.runs.metrics import read_metrics

    config = config or load(run / "config.json")
    environment = json.loads((run / "env.json").read_text(encoding="utf-8"))
    environment["command"] = f"grt train --config config.json --out runs/{run.name}"
    name = f"{config.name}-{config.train.seed}-{config_hash(config)[:8]}"
    report = evaluation_report(run, limit=WINDOWS, batch_size=64, dtype=environment["dtype"])
    cost = Finished(run).row()
    report["run"] = cost["run"] = name
    report["data"]["path"] = config.data.path
    for ephemeral in ("commit", "seconds"):  # the run's own are in env.json and in its cost
        report.pop(ephemeral)
    rows = [r for r in read_metrics(run / "metrics.jsonl") if r["kind"] != "train" or r["step"] % LOGGED in (0, 1)]
    files = {
        "config.json": dump(config),
        "env.json": json.dumps(environment, indent=1) + "\n",
        "metrics.jsonl": "".join(json.dumps(row) + "\n" for row in rows),
        "result.json": json.dumps({"evaluation": report, "cost": cost}, indent=1) + "\n",
    }
    return _write(results / "runs" / name, files)


def _write(folder: Path, files: dict[str, str]) -> Path:
    temporary = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}")
    temporary.mkdir(parents=True)
    try:
        for name, text in files.items():
            write_file(temporary / name, text.encode())
        if folder.exists():  # another process was faster, or result.json was lost
            shutil.rmtree(folder)
        os.rename(temporary, folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return folder
