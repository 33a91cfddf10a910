"""`grt generate`: a trained model's text."""

import json
import sys
from dataclasses import dataclass, field
from typing import Annotated, Literal

import tyro

from grt.cli.options import Device, Run, parse
from grt.config import Weights
from grt.errors import ConfigError


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
    min_p: float = 0.0
    """Sample among the tokens that have at least this share of the likeliest one's probability."""
    repetition_penalty: float = 1.0
    """Above 1: tokens that are in the text already become less likely."""
    seed: int = 1337
    """Decides what is drawn."""
    max_new_tokens: Annotated[int | None, tyro.conf.arg(metavar="INT")] = None
    """Stop after this many tokens, or before end-of-text; default: as many as the context has room for."""
    stop: Annotated[tyro.conf.UseAppendAction[list[str]], tyro.conf.arg(metavar="STR")] = field(default_factory=list)
    """Stop before this string; may be given several times."""
    kv: str = "full"
    """How the core's steps share keys and values: full, first, last, mean, mod:K or first:all."""
    exit: Annotated[str | None, tyro.conf.arg(metavar="POLICY[:X]")] = None
    """When a token leaves the core, at the latest after --depth passes: state:X, kl:X, entropy:X, top1:N, q:X (Ouro) or
    fixed:K; without X, as grt calibrate found it."""
    threshold: Annotated[float | None, tyro.conf.arg(metavar="X")] = None
    """The X of --exit."""
    budget: Annotated[float | None, tyro.conf.arg(metavar="FLOAT")] = None
    """Also, or alone: no token goes deeper than leaves the mean depth of the generated ones within this."""
    crop: bool = False
    """Go on beyond the context, seeing its last tokens only: no cache, so every token costs a whole pass."""
    compile: bool = False
    """Compile the pass over one token, which takes long once."""
    speculative: bool = False
    """Draft tokens with few steps of the core and verify them together: the same distribution, sooner."""
    draft_depth: Annotated[int | None, tyro.conf.arg(metavar="INT")] = None
    """With --speculative: steps of a draft; default a quarter of the depth."""
    draft_tokens: Annotated[int | None, tyro.conf.arg(metavar="INT")] = None
    """With --speculative: drafts before each verification; default as many as pay (with --compile: 6)."""
    logprobs: bool = False
    """With --json: each token's log-probability under the model, whatever the sampling."""
    dtype: Literal["auto", "fp32", "bf16"] = "fp32"
    """Precision of the weights and of all that is computed; auto: the fastest here."""
    weights: Annotated[Weights | None, tyro.conf.arg(metavar="{fp32,bf16,int8}")] = None
    """What the matrices are kept in, whatever else is computed in; int8 is the fastest to read."""
    device: Device = "auto"
    """Where to compute."""
    json: bool = False
    """Print one JSON document."""


def write(text: str) -> None:
    """A piece of the text, as it comes."""
    from grt.console import alive

    print(text, end="", flush=True)
    alive()


def run_generate(arguments: list[str]) -> int:
    command = parse(Generate, arguments, "generate")
    drafting = command.draft_depth, command.draft_tokens
    if not command.speculative and drafting != (None, None):
        raise ConfigError("--draft-depth and --draft-tokens are for drafts: add --speculative, or leave them out.")
    from grt.cli.report import generation_report
    from grt.decode.sampling import Sampling
    from grt.decode.speculative import Draft
    from grt.exits.kept import Wanted

    sampling = Sampling(
        command.temperature, command.top_k, command.top_p, command.min_p, command.repetition_penalty
    )  # fmt: skip
    report = generation_report(
        command.run, command.prompt, device=command.device, dtype=command.dtype, weights=command.weights,
        show=None if command.json else write,
        stop=command.stop, logprobs=command.logprobs, seed=command.seed, depth=command.depth, sampling=sampling,
        max_new_tokens=command.max_new_tokens, kv=command.kv, crop=command.crop, compiled=command.compile,
        exit=Wanted(command.exit, command.threshold, command.budget),
        draft=Draft(*drafting) if command.speculative else None,
    )  # fmt: skip
    print(json.dumps(report) if command.json else "")
    spoken = report.get("speculative")
    if not command.json and spoken and spoken["verifications"]:
        told = "{accepted} of {drafted} drafts stood, {tokens_per_verification:.1f} tokens a verification"
        print(told.format(**spoken), file=sys.stderr)
    return 0
