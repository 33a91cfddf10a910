"""`grt`: train, evaluate and use depth-recurrent language models.

Subcommands are thin: each is a dataclass, whose fields are its options, and a function. Nothing here imports torch
before a subcommand needs it, so `grt --help` answers at once. Exit codes: 0; 2 bad input; 3 non-finite loss;
130 Ctrl-C and 143 SIGTERM, both after a saved checkpoint.
"""

import io
import json
import os
import shutil
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from grt.config import VERSION, ConfigError, RunConfig, load
from grt.options import parse, starting_config
from grt.presets import preset

Device = Literal["auto", "cpu", "cuda", "mps"]
Run = Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="RUN")]


@dataclass
class Prepare:
    """Turn text into token shards."""

    source: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="SOURCE")]
    """builtin, stdlib, a .txt file, or a folder of them."""
    out: Path
    """Folder for the shards and their meta.json."""
    tokenizer: str = "bytes"
    """How text becomes tokens."""
    val_fraction: float = 0.02
    """Share of the documents that is kept for validation, chosen by their hash."""


def run_prepare(arguments: list[str]) -> int:
    command = parse(Prepare, arguments, "prepare")
    from grt.data.prepare import prepare

    data = prepare(
        command.source, tokenizer=command.tokenizer, val_fraction=command.val_fraction, out=command.out, progress=True
    )
    print(data.folder)
    return 0


@dataclass
class Train:
    """Train a preset (grt train PRESET --out DIR) or a config (grt train --config FILE --out DIR)."""

    out: Path
    """Folder of the run."""
    run: Annotated[RunConfig, tyro.conf.arg(name="")] = field(default_factory=RunConfig)
    resume: bool = False
    """Go on from the newest sound checkpoint of the folder."""
    max_time: str = ""
    """Save and leave after this long, with exit code 0: 170m, 2h, 90s."""


def run_train(arguments: list[str]) -> int:
    base, arguments = starting_config(arguments)
    command = parse(Train, arguments, "train PRESET", Train(out=tyro.MISSING, run=base))
    return train_and_show(command.run, command.out, command.resume, command.max_time)


def train_and_show(config: RunConfig, out: Path, resume: bool, max_time: str = "") -> int:
    from grt.train.interrupt import parse_duration
    from grt.train.loop import Trainer

    seconds = parse_duration(max_time) if max_time else None
    trainer = Trainer(config, out, resume=resume)
    code = trainer.run(seconds)
    if trainer.state.step < config.train.steps:
        return code
    from grt.report import show_run

    show_run(out)
    return code


@dataclass
class Eval:
    """Loss of a trained model at each depth."""

    run: Run
    """A run's folder, one of its checkpoints, or a model folder."""
    data: Annotated[str | None, tyro.conf.arg(metavar="PATH")] = None
    """A text file or a prepared folder, read whole; without it, the run's own validation split."""
    depth: list[int] = field(default_factory=list)
    """Depths to evaluate; without it, every one from 0 (the prelude alone) to R."""
    windows: Annotated[int | None, tyro.conf.arg(metavar="INT")] = None
    """Read only this many windows."""
    batch_size: int = 16
    """Windows at a time."""
    dtype: Literal["auto", "fp32", "bf16"] = "fp32"
    """Precision of the matrix products; auto: the fastest here."""
    device: Device = "auto"
    """Where to compute."""
    json: bool = False
    """Print one JSON document."""


def run_eval(arguments: list[str]) -> int:
    command = parse(Eval, arguments, "eval")
    from grt.report import evaluation_report, show_evaluation

    report = evaluation_report(
        command.run, command.data, depths=command.depth or None, limit=command.windows, batch_size=command.batch_size,
        dtype=command.dtype, device=command.device,
    )  # fmt: skip
    print(json.dumps(report)) if command.json else show_evaluation(report)
    return 0


@dataclass
class Generate:
    """Continue a text."""

    run: Run
    """A run's folder, one of its checkpoints, or a model folder."""
    prompt: str = ""
    """Text to continue; empty starts a new document."""
    depth: Annotated[int | None, tyro.conf.arg(metavar="INT")] = None
    """Passes through the core; default R."""
    temperature: float = 0.8
    """0 is greedy."""
    top_k: int = 0
    """Sample among the k likeliest tokens; 0: among all."""
    top_p: float = 1.0
    """Sample among the likeliest tokens that hold this much probability."""
    seed: int = 1337
    """Decides what is drawn."""
    max_new_tokens: int = 256
    """Stop after this many tokens, or before end-of-text."""
    device: Device = "auto"
    """Where to compute."""
    json: bool = False
    """Print one JSON document."""


def run_generate(arguments: list[str]) -> int:
    command = parse(Generate, arguments, "generate")
    from grt.report import generation_report

    options = {
        key: getattr(command, key) for key in ("depth", "temperature", "top_k", "top_p", "seed", "max_new_tokens")
    }
    stream = None if command.json else lambda text: print(text, end="", flush=True)
    report = generation_report(command.run, command.prompt, device=command.device, stream=stream, **options)
    print(json.dumps(report) if command.json else "")
    return 0


@dataclass
class Info:
    """Parameters, FLOPs and memory of a preset or a run."""

    what: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="PRESET|RUN")]
    """A preset's name, or a run's folder."""
    json: bool = False
    """Print one JSON document."""


def run_info(arguments: list[str]) -> int:
    command = parse(Info, arguments, "info")
    from grt.report import info_report, show_info

    report = info_report(command.what)
    print(json.dumps(report)) if command.json else show_info(report)
    return 0


@dataclass
class List:
    """Presets, methods, and the runs under a folder."""

    folder: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="FOLDER")] = Path("runs")
    """Where to look for runs."""


def run_list(arguments: list[str]) -> int:
    command = parse(List, arguments, "list")
    from grt.report import show_list

    show_list(command.folder)
    return 0


def run_bench(arguments: list[str]) -> int:
    if arguments and arguments[0] == "training":
        from grt.bench.training import BenchTraining, bench_training, show

        show(bench_training(parse(BenchTraining, arguments[1:], "bench training")))
        return 0
    raise ConfigError("name what to bench: grt bench training.")


@dataclass
class Demo:
    """Train a small GRT on the builtin text, within five minutes on two cores, and show what it learned."""

    out: Path = Path("runs/demo")
    """Folder of the run; an earlier demo in it is replaced."""


def run_demo(arguments: list[str]) -> int:
    command = parse(Demo, arguments, "demo")
    existing = command.out / "config.json"
    if existing.exists() and load(existing).name == "demo":
        shutil.rmtree(command.out)
    return train_and_show(preset("demo"), command.out, resume=False)


COMMANDS: dict[str, tuple[str, Callable[[list[str]], int]]] = {
    "prepare": ("turn text into token shards", run_prepare),
    "train": ("train a preset or a config", run_train),
    "eval": ("loss of a trained model at each depth", run_eval),
    "generate": ("continue a text", run_generate),
    "info": ("parameters, FLOPs and memory of a preset or a run", run_info),
    "list": ("presets, methods, and runs under a folder", run_list),
    "bench": ("measure speed: grt bench training", run_bench),
    "demo": ("train a small GRT within five minutes and show it", run_demo),
}


def usage() -> str:
    lines = "\n".join(f"  {name:<10} {what}" for name, (what, _) in COMMANDS.items())
    return (
        f"usage: grt COMMAND ...\n\nDepth-recurrent language models.\n\n{lines}\n\n"
        "`grt COMMAND --help` shows its options."
    )


def main(arguments: list[str] | None = None) -> int:
    """Run one subcommand; user errors are one line on stderr and exit code 2."""
    arguments = sys.argv[1:] if arguments is None else arguments
    warnings.formatwarning = lambda message, *_: f"warning: {' '.join(str(message).split())}\n"
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal without UTF-8 shows ? where it cannot show a character
    try:
        code = dispatch(arguments)
        sys.stdout.flush()  # here, where a reader that left is noticed in good order
        return code
    except BrokenPipeError:  # as in `grt generate ... | head -c 99`: nobody reads on
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:
        code = exit_code(error)
        if code is None:
            raise
        print(f"grt: {sentence(error)}", file=sys.stderr)
        return code
    except KeyboardInterrupt:
        print("grt: interrupted", file=sys.stderr)
        return 130


def dispatch(arguments: list[str]) -> int:
    name, *rest = arguments or [""]
    if name in ("-h", "--help"):
        print(usage())
        return 0
    if name == "--version":
        print(f"grt {VERSION}")
        return 0
    if name not in COMMANDS:
        import difflib

        if not name or name.startswith("-"):
            raise ConfigError(f"name a command first: {', '.join(COMMANDS)}; `grt --help` says what each does.")
        nearest = difflib.get_close_matches(name, COMMANDS, n=1, cutoff=0.0)[0]
        raise ConfigError(f"unknown command {name!r}: did you mean {nearest}? `grt --help` shows all.")
    return COMMANDS[name][1](rest)


def sentence(error: Exception) -> str:
    """One line that says what is wrong; for an error of the system also with which file, and what to do."""
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        return f"{error.filename}: {error.strerror.lower()}: check the path, its permissions and the space on its disk."
    return " ".join(str(error).split())


def exit_code(error: Exception) -> int | None:
    """2 for what the user can mend, 3 for a non-finite loss, None for a defect of ours (which keeps its traceback)."""
    diagnose: Any = sys.modules.get("grt.train.diagnose")
    if diagnose is not None and isinstance(error, diagnose.NonFiniteError):
        return 3
    return 2 if isinstance(error, ConfigError | OSError) else None
