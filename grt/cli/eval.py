"""`grt eval`: what each depth is worth."""

import json
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from grt.cli.options import Device, Run, parse
from grt.config import Weights
from grt.errors import ConfigError

# Options that mean nothing beside --tasks, and those that mean nothing without it.
OF_THE_LOSS = ("data", "windows", "routing", "cloze")
OF_TASKS = ("data_dir", "limit", "cache")


@dataclass
class Eval:
    """Loss of a trained model at each depth; with --tasks, what it scores on benchmarks."""

    run: Run
    """A run's folder, one of its checkpoints, or a model folder."""
    data: Annotated[str | None, tyro.conf.arg(metavar="PATH")] = None
    """Text as in grt prepare, or a prepared folder, read whole; without it, the run's own validation split."""
    depth: Annotated[list[int], tyro.conf.arg(aliases=("--depths",))] = field(default_factory=list)
    """Depths to evaluate; without it, every one from 0 (the prelude alone) to R, and for --tasks R alone."""
    windows: Annotated[int | None, tyro.conf.arg(metavar="INT")] = None
    """Read only this many windows."""
    batch_size: int | Literal["auto"] = "auto"
    """Windows or requests at a time; auto: 16 windows, or as many requests as make 4,096 tokens."""
    routing: Literal["threshold", "topk"] | None = None
    """Who goes on where a router decides (MoR): scores above the threshold (without it, with the loss of topk beside
    it), or the best of the window, which looks at later tokens."""
    kv: list[str] = field(default_factory=list)
    """Ways of sharing keys and values over the steps (full, first, last, mean, mod:K, first:all): the loss under each,
    of the second half of each window, token by token after the first; or of each task's answers."""
    cloze: int = 0
    """With --kv: also the accuracy on this many cloze items (2000 is the usual number)."""
    exit: Annotated[str | None, tyro.conf.arg(metavar="POLICY[:X]")] = None
    """Also the loss (with --tasks, the scores alone) where each token leaves on its own: state:X, kl:X, entropy:X,
    top1:N, q:X (Ouro) or fixed:K; without X, as grt calibrate found it."""
    threshold: Annotated[float | None, tyro.conf.arg(metavar="X")] = None
    """The X of --exit."""
    budget: Annotated[float | None, tyro.conf.arg(metavar="FLOAT")] = None
    """Also, or alone: no token of a window goes deeper than leaves the mean depth so far within this."""
    tasks: Annotated[str | None, tyro.conf.arg(metavar="NAME,NAME")] = None
    """In place of the loss: tasks of lm-evaluation-harness, zero-shot, as in arc_easy,piqa."""
    data_dir: Annotated[Path | None, tyro.conf.arg(metavar="DIR")] = None
    """With --tasks: a folder that has each task's items as NAME.jsonl; without it, they come from the hub."""
    limit: Annotated[int | None, tyro.conf.arg(metavar="INT")] = None
    """With --tasks: only the first items of each."""
    cache: Annotated[Path | None, tyro.conf.arg(metavar="DIR")] = None
    """With --tasks: where scores are kept, so that a run that was stopped goes on; without it, RUN/scores."""
    dtype: Literal["auto", "fp32", "bf16"] = "fp32"
    """Precision of the matrix products; auto: the fastest here."""
    weights: Annotated[Weights | None, tyro.conf.arg(metavar="{fp32,bf16,int8}")] = None
    """What the matrices are kept in, to see what less costs; without it fp32."""
    device: Device = "auto"
    """Where to compute."""
    json: bool = False
    """Print one JSON document."""


def run_eval(arguments: list[str]) -> int:
    command = parse(Eval, arguments, "eval")
    check_together(command)
    report, show = task_evaluation(command) if command.tasks is not None else loss_evaluation(command)
    print(json.dumps(report)) if command.json else show(report)
    return 0


def check_together(command: Eval) -> None:
    """ConfigError for an option that would have no effect."""
    for option in fields(Eval):
        foreign, remedy = (OF_TASKS, "add --tasks") if command.tasks is None else (OF_THE_LOSS, "leave it out")
        given = option.default is not MISSING and getattr(command, option.name) != option.default
        if option.name in foreign and given:
            name = "--" + option.name.replace("_", "-")
            raise ConfigError(f"{name} does nothing with{'out' if foreign is OF_TASKS else ''} --tasks: {remedy}.")


def loss_evaluation(command: Eval) -> tuple[dict[str, Any], Any]:
    from grt.evals.report import evaluation_report, show_evaluation
    from grt.exits.kept import Wanted

    report = evaluation_report(
        command.run, command.data, depths=command.depth or None, limit=command.windows,
        batch_size=16 if command.batch_size == "auto" else command.batch_size, dtype=command.dtype,
        device=command.device, routing=command.routing, kv=command.kv, cloze=command.cloze,
        weights=command.weights, exit=Wanted(command.exit, command.threshold, command.budget),
    )  # fmt: skip
    return report, show_evaluation


def task_evaluation(command: Eval) -> tuple[dict[str, Any], Any]:
    from grt.evals.task_report import show_tasks, task_report
    from grt.exits.kept import Wanted

    names = [name.strip() for name in (command.tasks or "").split(",") if name.strip()]
    if not names:
        raise ConfigError("--tasks has no value: name at least one, as in --tasks arc_easy,piqa.")
    report = task_report(
        command.run, names, data_dir=command.data_dir, depths=command.depth, kv=command.kv, limit=command.limit,
        batch_size=None if command.batch_size == "auto" else command.batch_size, dtype=command.dtype,
        device=command.device, cache=command.cache, exit=Wanted(command.exit, command.threshold, command.budget),
        weights=command.weights,
    )  # fmt: skip
    return report, show_tasks
