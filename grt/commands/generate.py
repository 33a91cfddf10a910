"""`grt generate`: a trained model's text."""

import json
from dataclasses import dataclass
from typing import Annotated

import tyro

from grt.options import Device, Run, parse


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
