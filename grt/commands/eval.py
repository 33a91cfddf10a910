"""`grt eval`: what each depth is worth."""

import json
from dataclasses import dataclass, field
from typing import Annotated, Literal

import tyro

from grt.options import Device, Run, parse


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
    routing: Literal["threshold", "topk"] | None = None
    """Who goes on where a router decides (MoR): scores above the threshold (without it, with the loss of topk beside
    it), or the best of the window, which looks at later tokens."""
    kv: list[str] = field(default_factory=list)
    """Ways of sharing keys and values over the steps (full, first, last, mean, mod:K, first:all): the loss under each,
    of the second half of each window, token by token after the first."""
    cloze: int = 0
    """With --kv: also the accuracy on this many cloze items (2000 is the usual number)."""
    exit: Annotated[str | None, tyro.conf.arg(metavar="POLICY[:X]")] = None
    """Also the loss where each token leaves on its own: state:X, kl:X, entropy:X, top1:N, q:X (Ouro) or fixed:K;
    without X, as grt calibrate found it."""
    threshold: Annotated[float | None, tyro.conf.arg(metavar="X")] = None
    """The X of --exit."""
    budget: Annotated[float | None, tyro.conf.arg(metavar="FLOAT")] = None
    """Also, or alone: no token of a window goes deeper than leaves the mean depth so far within this."""
    dtype: Literal["auto", "fp32", "bf16"] = "fp32"
    """Precision of the matrix products; auto: the fastest here."""
    device: Device = "auto"
    """Where to compute."""
    json: bool = False
    """Print one JSON document."""


def run_eval(arguments: list[str]) -> int:
    command = parse(Eval, arguments, "eval")
    from grt.eval_report import evaluation_report, show_evaluation
    from grt.exits import Wanted

    report = evaluation_report(
        command.run, command.data, depths=command.depth or None, limit=command.windows, batch_size=command.batch_size,
        dtype=command.dtype, device=command.device, routing=command.routing, kv=command.kv, cloze=command.cloze,
        exit=Wanted(command.exit, command.threshold, command.budget),
    )  # fmt: skip
    print(json.dumps(report)) if command.json else show_evaluation(report)
    return 0
