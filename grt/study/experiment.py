"""An experiment: which runs a table or figure needs, what the paper prints, and how the table is built from results.

It is a Python file with `RUNS(scale, seeds)`, which returns configs, and `build(results)`, which returns a Report; one
of the paper's (EXPERIMENTS), or a user's own, given by its path.
"""

import importlib
import importlib.util
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

from grt.config import RunConfig, config_hash
from grt.errors import ConfigError, did_you_mean
from grt.schema import to_dict
from grt.study.compare import NOT_RUN
from grt.study.report import Report, Table
from grt.study.results import Results

# name -> what it is, in the order in which `all` runs them: what decides a recipe first
EXPERIMENTS = {
    "learning_rates": "learning rate of every method, and GRT's gate bias, at nano scale",
    "tab_main": "tab:main, the compared methods at equal tokens",
    "tab_seeds": "tab:seeds, dense and GRT over seeds",
    "ablation_ladder": "fig:ablation_ladder, tab:ablation_ladder_2k: one component a row",
    "fixed_depth": "sampled against fixed depth in training",
    "depth_tasks": "p-hop induction and addition, accuracy at every depth, at nano scale",
    "equal_flops": "dense, GRT and Poisson at equal training FLOPs",
    "prose": "the six models on prose, at nano scale",
    "tab_method_comparison": "what each method does, found by running it",
    "tab_hyperparams": "the paper's configurations beside the presets",
    "fig_kvcache_bar": "fig:kvcache_bar, sharing keys and values on the committed grt-nano",
    "study": "all of it on two pages (README.md)",
}
NAME = re.compile(r"[^\W_][\w .,+=@()-]{0,63}")
RULE = "up to 64 letters, digits and ' _.,+=@()-', a letter or digit first"


def is_name(text: str) -> bool:
    """Can it name a file or a folder?"""
    return bool(NAME.fullmatch(text)) and len(text.encode()) <= 200


@dataclass(frozen=True)
class Experiment:
    name: str
    runs: Callable[[str, Sequence[int]], list[RunConfig]]
    build: Callable[[Results], Report]
    file: str
    needs: str = ""  # a path without which its runs cannot be trained


def experiments(name: str) -> list[Experiment]:
    """The one of that name or path, or `all` of the paper's. ConfigError where there is none."""
    if name == "all":
        return [experiments(known)[0] for known in EXPERIMENTS]
    if name in EXPERIMENTS:
        return [_of_module(name, importlib.import_module(f"grt.experiments.{name}"))]
    if name.endswith(".py"):
        return [_of_file(Path(name))]
    if not name:
        known = ", ".join(EXPERIMENTS)
        raise ConfigError(f"no experiment is named: give one of {known}, or all, or a file with RUNS(scale, seeds).")
    known = "`grt paper list` shows all names; `all` and a file with RUNS(scale, seeds) will do too."
    raise ConfigError(f"no experiment {name!r}: {did_you_mean(name, EXPERIMENTS, known)}")


def _of_file(path: Path) -> Experiment:
    if not path.is_file():
        raise ConfigError(f"{path} does not exist: give a Python file with RUNS(scale, seeds).")
    spec = importlib.util.spec_from_file_location(f"experiment_{path.stem}", path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look for their module
    with mending(path):
        spec.loader.exec_module(module)
    if not callable(getattr(module, "RUNS", None)):
        raise ConfigError(f"{path} has no RUNS: define RUNS(scale, seeds), which returns a list of RunConfig.")
    found = _of_module(path.stem, module)
    if not is_name(found.file) or found.file in (*EXPERIMENTS, "README"):
        raise ConfigError(
            f"{path} would write {found.file}.md, which is another's or no file's name: rename it, or give it FILE = "
            "'NAME'."
        )
    return replace(found, runs=mending(path)(found.runs), build=lambda results: _built(path, found, results))


@contextmanager
def mending(path: Path, fails: str = "cannot be run") -> Iterator[None]:
    """What goes wrong in a user's file is the user's to mend: ConfigError with its line."""
    try:
        yield
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:
        file = os.path.abspath(path)  # as its frames name it
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
        if isinstance(error, SyntaxError) and error.filename == file:
            lines.append(error.lineno)
        where = f"{path}, line {lines[-1]}" if lines else str(path)
        raise ConfigError(f"{where} {fails} ({type(error).__name__}: {error}): mend it.") from error


def _built(path: Path, experiment: Experiment, results: Results) -> Report:
    """The report of a user's file, whose tables are text and whose figures are drawn under `mending`."""
    with mending(path):
        report = experiment.build(results)
    if not isinstance(report, Report):
        kind = type(report).__name__
        raise ConfigError(f"build(results) of {path} returns {kind}: return a Report (grt.study.report).")
    with mending(path, "builds a report that is not all text"):
        for text in report.files(experiment.file).values():
            text.encode()
    for name in (*(table.name for table in report.tables), *report.figures):
        if not is_name(name):
            raise ConfigError(
                f"build(results) of {path} names a table or figure {name!r}: it names a file, give it {RULE}."
            )
    figures = {name: _drawn(path, name, draw) for name, draw in report.figures.items()}
    return replace(report, figures=figures)


def _drawn(path: Path, name: str, draw: Callable[[Any], None]) -> Callable[[Any], None]:
    def drawn(axes: Any) -> None:
        with mending(path, f"cannot draw {name}"):
            draw(axes)
            axes.figure.draw_without_rendering()  # finds what saving would stumble over, as a $ in a label

    return drawn


def _of_module(name: str, module: ModuleType) -> Experiment:
    where = module.__file__ or name

    def runs(scale: str, seeds: Sequence[int]) -> list[RunConfig]:
        """Each once, in the order given."""
        return list({config_hash(config): config for config in _checked(where, module.RUNS(scale, seeds))}.values())

    build = getattr(module, "build", None) or (lambda results: plain(name, runs(results.scale, results.seeds), results))
    return Experiment(name, runs, build, getattr(module, "FILE", name), getattr(module, "NEEDS", ""))


def _checked(where: str, configs: Any) -> Sequence[RunConfig]:
    """What RUNS of a file returned. ConfigError where that is no list of configs, or one cannot name a folder."""
    if not isinstance(configs, list | tuple):
        raise ConfigError(
            f"RUNS(scale, seeds) of {where} returns {type(configs).__name__}: return a list of RunConfig."
        )
    for config in configs:
        if not isinstance(config, RunConfig):
            kind = type(config).__name__
            raise ConfigError(f"RUNS(scale, seeds) of {where} returns a list with {kind}: return a list of RunConfig.")
        if not is_name(config.name):
            raise ConfigError(
                f"RUNS(scale, seeds) of {where} names a run {config.name!r}: as it names a folder, give it {RULE}."
            )
    return configs


def plain(name: str, configs: Sequence[RunConfig], results: Results) -> Report:
    """The table of an experiment that defines none: a row a run, with every setting in which its runs differ."""
    settings = [_settings(to_dict(config)) for config in configs]
    shown = ("model.layout", "optim.lr", "train.seed")
    differ = [key for key in dict.fromkeys(k for s in settings for k in s) if len({s.get(key) for s in settings}) > 1]
    keys = [*shown, *(key for key in differ if key not in (*shown, "name"))]
    rows = []
    for config, found in zip(configs, settings, strict=True):
        run = results.get(config)
        cells = (NOT_RUN, "", "") if run is None else (
            f"{run.loss:.4f}", f"{run.cost['training_flops']:.3e}", f"{run.cost['seconds']:.0f}")  # fmt: skip
        rows.append((config.name, *(found.get(key, "") for key in keys), *cells))
    columns = ("run", *keys, "loss", "training FLOPs", "seconds")
    return Report(name, [Table(name, "Validation loss at full depth, nats per token.", columns, rows)])


def _settings(nested: dict[str, Any], prefix: str = "") -> dict[str, str]:
    """section.field -> its value as text."""
    flat: dict[str, str] = {}
    for key, value in nested.items():
        inner = _settings(value, f"{prefix}{key}.") if isinstance(value, dict) else None
        flat |= {f"{prefix}{key}": f"{value:g}" if isinstance(value, float) else str(value)} if inner is None else inner
    return flat
