"""The subcommands of `grt`: each a dataclass, whose fields are its options, and a thin function.
Nothing here imports torch before a subcommand needs it, so `grt --help` answers at once."""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import tyro

from grt.config import RunConfig, config_hash, load
from grt.options import parse, starting_config
from grt.presets import change, preset

Device = Literal["auto", "cpu", "cuda", "mps"]
Run = Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="RUN")]


@dataclass
class Prepare:
    """Turn text into token shards."""

    source: Annotated[tyro.conf.Positional[tuple[str, ...]], tyro.conf.arg(metavar="SOURCE")]
    """Files, folders or patterns (.txt, .md, .py, .jsonl, .parquet, each also .gz or .zst), nanoGPT's .bin, or builtin,
    stdlib, shakespeare, hf:DATASET, url:ADDRESS#sha256=SUM."""
    out: Path
    """Folder for the shards and their meta.json."""
    tokenizer: str = "bytes"
    """How text becomes tokens: bytes, gpt2, or hf: and a tokenizer.json, its folder or a name on the hub."""
    field: str = "text"
    """Field of the rows of .jsonl and .parquet files and of datasets that holds the text."""
    val_fraction: float = 0.02
    """Share of the documents that is kept for validation, chosen by their hash."""
    workers: int = 0
    """Processes that encode; 0: one a core. The shards do not depend on it."""


def run_prepare(arguments: list[str]) -> int:
    command = parse(Prepare, arguments, "prepare")
    from grt.data.prepare import prepare

    data = prepare(
        command.source, tokenizer=command.tokenizer, val_fraction=command.val_fraction, field=command.field,
        out=command.out.resolve(), workers=command.workers, progress=True,
    )  # fmt: skip
    print(data.folder)
    return 0


@dataclass
class Train:
    """Train a preset (grt train PRESET --out DIR) or a config (grt train --config FILE --out DIR)."""

    out: Path
    """Folder of the run."""
    run: Annotated[RunConfig, tyro.conf.arg(name="")] = field(default_factory=RunConfig)
    init_from: Annotated[str | None, tyro.conf.arg(metavar="RUN")] = None
    """A run, checkpoint or model folder whose weights to start from: short for --train.init-from."""
    device: Annotated[Device | None, tyro.conf.arg(metavar="{auto,cpu,cuda,mps}")] = None
    """Where to train: short for --train.device."""
    resume: bool = False
    """Go on from the newest sound checkpoint of the folder."""
    max_time: str = ""
    """Save and leave after this long, with exit code 0: 170m, 2h, 90s."""


def run_train(arguments: list[str]) -> int:
    base, arguments = starting_config(arguments)
    command = parse(Train, arguments, "train PRESET", Train(out=tyro.MISSING, run=base))
    from grt.data.corpus import RESERVED

    text = command.run.data.path
    kept = command.resume and text == base.data.path  # as the run to resume wrote it
    if not kept and text not in RESERVED and Path(text).exists():  # found from wherever the run is evaluated or resumed
        command.run = change(command.run, data={"path": str(Path(text).resolve())})
    given = {"init_from": command.init_from, "device": command.device}
    config = change(command.run, train={name: value for name, value in given.items() if value is not None})
    return train_and_show(config, command.out, command.resume, command.max_time)


def train_and_show(config: RunConfig, out: Path, resume: bool, max_time: str = "") -> int:
    from grt.train.interrupt import parse_duration
    from grt.train.loop import Trainer

    seconds = parse_duration(max_time) if max_time else None
    trainer = Trainer(config, out, resume=resume)
    code = trainer.run(seconds)
    if trainer.state.step < config.train.steps:
        return code
    from grt.report import show_run

    show_run(out, config.train.device)
    return code


@dataclass
class Eval:
    """Loss of a trained model at each depth."""

    run: Run
    """A run's folder, one of its checkpoints, or a model folder."""
    data: Annotated[str | None, tyro.conf.arg(metavar="PATH")] = None
    """Text as in grt prepare, or a prepared folder, read whole; without it, the run's own validation split."""
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


@dataclass
class Compare:
    """Put runs side by side: what each cost and reached, in one table and one plot."""

    runs: Annotated[tyro.conf.Positional[list[Path]], tyro.conf.arg(metavar="RUN...")]
    """Folders of runs, or model folders."""
    x: Literal["tokens", "flops", "seconds"] = "tokens"
    """What the plot's losses are drawn over."""
    out: Path = Path("compare.png")
    """The plot: .png, .pdf or .svg."""
    json: bool = False
    """Print one JSON document."""


def run_compare(arguments: list[str]) -> int:
    command = parse(Compare, arguments, "compare")
    from grt.train.compare import comparison_report, show_comparison

    report = comparison_report(command.runs, command.x, command.out)
    print(json.dumps(report)) if command.json else show_comparison(report)
    return 0


@dataclass
class Bench:
    """Measure speed, ours and a peer in turn: a table, then one JSON line."""

    what: tyro.conf.Positional[Literal["training"]]
    """training: a step of a recurrent model against dense of equal block executions, or of our dense against peers."""
    peers: list[Literal["dense", "nanogpt", "transformers"]] = field(default_factory=lambda: ["dense"])
    """dense: the recurrent model against dense; nanogpt, transformers: our dense GPT-2 against theirs."""
    nanogpt: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """model.py of a checkout of karpathy/nanoGPT, for the peer nanogpt."""
    layout: str = "1+1x10+1"
    """The recurrent model's layout."""
    alternations: int = 10
    """Turns that count; one more warms up."""
    dtype: Literal["auto", "fp32", "bf16"] = "bf16"
    """Precision of the matrix products; auto: the fastest here."""
    device: Device = "auto"
    """Where to compute."""
    threads: int = 0
    """CPU threads; 0: as many as torch takes by itself."""


def run_bench(arguments: list[str]) -> int:
    command = parse(Bench, arguments, "bench")
    import torch

    from grt.bench.training import bench_training, show

    if command.threads:
        torch.set_num_threads(command.threads)
    report = bench_training(
        command.layout, command.alternations, peers=command.peers, nanogpt=command.nanogpt, dtype=command.dtype,
        device=command.device,
    )  # fmt: skip
    show(report)
    return 0


@dataclass
class Demo:
    """Train a small GRT on the builtin text, within five minutes on two cores, and show what it learned."""

    out: Path = Path("runs/demo")
    """Folder of the run; an earlier demo in it is replaced."""
    device: Device = "auto"
    """Where to train."""


def run_demo(arguments: list[str]) -> int:
    command = parse(Demo, arguments, "demo")
    config = change(preset("demo"), train={"device": command.device})
    existing = command.out / "config.json"
    if existing.exists() and config_hash(load(existing)) == config_hash(config):
        # Training repeats it bit for bit; what the user put beside it stays.
        shutil.rmtree(command.out / "checkpoints", ignore_errors=True)
        for name in ("config.json", "env.json", "metrics.jsonl", "curve.png", "sample.txt"):
            (command.out / name).unlink(missing_ok=True)
    return train_and_show(config, command.out, resume=False)


COMMANDS: dict[str, tuple[str, Callable[[list[str]], int]]] = {
    "prepare": ("turn text into token shards", run_prepare),
    "train": ("train a preset or a config", run_train),
    "eval": ("loss of a trained model at each depth", run_eval),
    "generate": ("continue a text", run_generate),
    "info": ("parameters, FLOPs and memory of a preset or a run", run_info),
    "list": ("presets, methods, and runs under a folder", run_list),
    "compare": ("put runs side by side: cost and loss", run_compare),
    "bench": ("measure speed, ours and a peer in turn", run_bench),
    "demo": ("train a small GRT within five minutes and show it", run_demo),
}
