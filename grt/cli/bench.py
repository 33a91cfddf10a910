"""`grt bench`: speed and memory, always beside something to compare with on the same machine."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from grt.cli.options import Device, Run, parse
from grt.config import Weights
from grt.errors import ConfigError
from grt.presets import preset
from grt.schema import at_least


@dataclass
class Training:
    """Speed of training, ours and a peer in turn: a table, then one JSON line."""

    peers: list[Literal["dense", "nanogpt", "transformers"]] = field(default_factory=lambda: ["dense"])
    """dense: the recurrent model against dense; nanogpt, transformers: our dense GPT-2 against theirs."""
    nanogpt: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """model.py of a checkout of karpathy/nanoGPT, for the peer nanogpt."""
    methods: list[str] = field(default_factory=lambda: ["grt"])
    """The recurrent models: keys of grt.methods.METHODS."""
    layout: str = "1+1x10+1"
    """Their layout."""
    preset: str = ""
    """Layout, width, context and sequences a slot of this preset instead."""
    alternations: int = 10
    """Turns that count; one more warms up."""
    dtype: Literal["auto", "fp32", "bf16"] = "auto"
    """Precision of the matrix products; auto: the fastest here."""
    device: Device = "auto"
    """Where to compute."""
    threads: int = 0
    """CPU threads; 0: as many as torch takes by itself."""


@dataclass
class Latency:
    """Time per generated token, GRT, dense and transformers' GPT-2 in turn: a table, then one JSON line."""

    sizes: list[Literal["nano", "small", "medium", "large"]] = field(default_factory=list)
    """GRT and dense of equal block executions; without it small, medium and large (paper on a CPU: small)."""
    protocol: list[Literal["cached", "paper"]] = field(default_factory=lambda: ["cached", "paper"])
    """cached: a prompt, then each token through a KV cache; paper: a forward pass over a context for each token."""
    batch: list[int] = field(default_factory=lambda: [1, 4])
    """Rows at a time."""
    prompt: Annotated[int | None, tyro.conf.arg(metavar="INT")] = None
    """Tokens of the prompt, where it is cached; without it, what new leaves of the context: 896."""
    new: Annotated[int | None, tyro.conf.arg(metavar="INT")] = None
    """Tokens to generate; without it 128 (paper on a CPU: 4)."""
    dtype: Literal["auto", "fp32", "bf16"] = "auto"
    """Of weights, caches and products; auto: the fastest here."""
    weights: Annotated[Weights | None, tyro.conf.arg(metavar="{fp32,bf16,int8}")] = None
    """What our matrices are kept in instead; a CPU then multiplies a few rows with our kernels."""
    kv: str = "full"
    """How GRT's steps share keys and values: full, first, last, mean, mod:K or first:all."""
    compile: Literal["on", "off"] = "on"
    """Whether our models are compiled; how long that takes is reported apart."""
    alternations: int = 5
    """Turns of each."""
    peers: list[Literal["dense", "transformers"]] = field(default_factory=lambda: ["dense", "transformers"])
    """dense: GRT against dense; transformers: our dense GPT-2 against theirs, with a cache."""
    device: Device = "auto"
    """Where to compute."""
    threads: int = 0
    """CPU threads; 0: as many as torch takes by itself."""


@dataclass
class Memory:
    """Memory of weights and caches while decoding, beside the closed form: a table, then one JSON line."""

    size: Literal["nano", "small", "medium", "large"] = "medium"
    """GRT and dense of equal block executions."""
    batch: list[int] = field(default_factory=lambda: [1, 32])
    """Rows at a time."""
    kv: list[str] = field(default_factory=lambda: ["full", "mean"])
    """How GRT's steps share keys and values: full, first, last, mean, mod:K or first:all."""


@dataclass
class Dial:
    """Loss and time per token of one trained model at each depth: a table, a plot, then one JSON line."""

    run: Run
    """A run's folder, one of its checkpoints, or a model folder."""
    depths: list[int] = field(default_factory=list)
    """Passes through the core; without it, every number of them from 1 to R."""
    new: int = 64
    """Tokens to generate, after a prompt that fills the rest of the context."""
    windows: int = 16
    """Windows of the run's own validation split to evaluate on."""
    alternations: int = 5
    """Turns of each depth."""
    device: Device = "auto"
    """Where to compute."""
    threads: int = 0
    """CPU threads; 0: as many as torch takes by itself."""
    out: Path = Path("dial.png")
    """The plot."""


@dataclass
class Halting:
    """Tokens that leave the loop one by one, against fixed depths: loss, FLOPs and time per token; a table, a plot,
    then one JSON line."""

    run: Run
    """A run's folder, one of its checkpoints, or a model folder."""
    exits: list[str] = field(default_factory=list)
    """Policies with a threshold (kl:0.01), or to be calibrated (kl); without it, all but fixed depths that the method
    has."""
    mean_depths: list[float] = field(default_factory=list)
    """What to calibrate for; without it R/4, R/3, R/2 and 2R/3."""
    windows: int = 64
    """Windows of the run's own validation split to evaluate on."""
    calibration_windows: int = 32
    """Those before them, to calibrate on."""
    batch: list[int] = field(default_factory=lambda: [1])
    """Rows at a time, where time is taken."""
    new: int = 64
    """Tokens to decode, those of the text itself, after a prompt that fills the rest of the context; 0: no timing."""
    alternations: int = 5
    """Turns of each."""
    device: Device = "auto"
    """Where to compute."""
    threads: int = 0
    """CPU threads; 0: as many as torch takes by itself."""
    out: Path = Path("halting.png")
    """The plot."""


@dataclass
class Speculative:
    """Decoding with drafts against plain decoding, of one trained model: a table, then one JSON line."""

    run: Run
    """A run's folder, one of its checkpoints, or a model folder."""
    draft_depth: list[int] = field(default_factory=list)
    """Steps of a draft; without it 1, 2 and 3."""
    draft_tokens: list[int] = field(default_factory=lambda: [2, 4, 8])
    """Drafts before each verification; without --compile, a number that adapts is measured beside these."""
    new: int = 128
    """Tokens to generate, after a prompt that fills the rest of the context."""
    prompts: int = 10
    """Prompts, from the run's own validation split: one a turn."""
    temperature: float = 0.8
    """0 is greedy."""
    compile: bool = False
    """Compile both, which takes long."""
    device: Device = "auto"
    """Where to compute."""
    threads: int = 0
    """CPU threads; 0: as many as torch takes by itself."""


@dataclass
class Serve:
    """Tokens per second in vLLM, GRT and dense in turn, many requests at once: a table, then one JSON line."""

    size: Literal["nano", "small", "medium", "large"] = "small"
    """GRT and dense of equal block executions."""
    requests: int = 32
    """Requests, all there from the start."""
    prompt: int = 128
    """Tokens of each prompt."""
    new: int = 64
    """Tokens to generate for each."""
    dtype: Literal["auto", "fp32", "bf16"] = "auto"
    """Of weights, caches and products; auto: the fastest here."""
    kv: Literal["full", "first:all"] = "full"
    """How GRT's steps share keys and values."""
    compile: Literal["on", "off"] = "on"
    """Whether vLLM compiles the models."""
    alternations: int = 5
    """Turns of each that count; one more warms up."""
    peers: list[Literal["dense", "gpt2"]] = field(default_factory=lambda: ["dense", "gpt2"])
    """dense: our dense model in vLLM; gpt2: vLLM's own GPT-2."""


def run_training(arguments: list[str]) -> None:
    command = parse(Training, arguments, "bench training")
    from grt.bench.training import bench_training, show

    use_threads(command.threads)
    like: dict[str, Any] = {}
    if command.preset:
        config = preset(command.preset)
        shape = {name: getattr(config.model, name) for name in ("d_model", "n_heads", "context")}
        like = {"shape": shape, "batch_size": config.train.batch_size}
        command.layout = config.model.layout
    report = bench_training(
        command.layout, command.alternations, peers=command.peers, nanogpt=command.nanogpt, methods=command.methods,
        dtype=command.dtype, device=command.device, **like,
    )  # fmt: skip
    show(report)


def run_latency(arguments: list[str]) -> None:
    command = parse(Latency, arguments, "bench latency")
    from grt.bench.latency import bench_latency, show

    use_threads(command.threads)
    report = bench_latency(
        command.sizes, command.protocol, command.batch, prompt=command.prompt, new=command.new, dtype=command.dtype,
        weights=command.weights, kv=command.kv, compiled=command.compile == "on", alternations=command.alternations,
        peers=command.peers, device=command.device,
    )  # fmt: skip
    show(report)


def run_memory(arguments: list[str]) -> None:
    command = parse(Memory, arguments, "bench memory")
    from grt.bench.memory import bench_memory, show

    show(bench_memory(command.size, command.batch, command.kv))


def run_dial(arguments: list[str]) -> None:
    command = parse(Dial, arguments, "bench dial")
    from grt.bench.dial import bench_dial, show

    use_threads(command.threads)
    report = bench_dial(
        command.run, command.depths, new=command.new, windows=command.windows, alternations=command.alternations,
        device=command.device, out=command.out,
    )  # fmt: skip
    show(report)


def run_halting(arguments: list[str]) -> None:
    command = parse(Halting, arguments, "bench halting")
    from grt.bench.halting import bench_halting, show

    use_threads(command.threads)
    report = bench_halting(
        command.run, command.exits, command.mean_depths, windows=command.windows,
        calibration_windows=command.calibration_windows, batches=command.batch, new=command.new,
        alternations=command.alternations, device=command.device, out=command.out,
    )  # fmt: skip
    show(report)


def run_speculative(arguments: list[str]) -> None:
    command = parse(Speculative, arguments, "bench speculative")
    from grt.bench.speculative import bench_speculative, show

    use_threads(command.threads)
    report = bench_speculative(
        command.run, command.draft_depth, command.draft_tokens, new=command.new, prompts=command.prompts,
        temperature=command.temperature, compiled=command.compile, device=command.device,
    )  # fmt: skip
    show(report)


def run_serve(arguments: list[str]) -> None:
    command = parse(Serve, arguments, "bench serve")
    from grt.bench.serve import bench_serve, show

    report = bench_serve(
        command.size, requests=command.requests, prompt=command.prompt, new=command.new, dtype=command.dtype,
        kv=command.kv, compiled=command.compile == "on", alternations=command.alternations, peers=command.peers,
    )  # fmt: skip
    show(report)


def use_threads(threads: int) -> None:
    import torch

    at_least("--threads", threads, 0)
    if threads:
        torch.set_num_threads(threads)


BENCHES: dict[str, tuple[Callable[[list[str]], None], str]] = {
    "training": (run_training, "a step of a recurrent model against dense, or of our dense against peers"),
    "latency": (run_latency, "time per generated token, against dense and transformers"),
    "memory": (run_memory, "weights and caches while decoding, against the closed form"),
    "dial": (run_dial, "loss against time per token, by depth, of one trained model"),
    "halting": (run_halting, "loss, FLOPs and time of tokens that leave one by one, against fixed depths"),
    "speculative": (run_speculative, "time per token with drafts against plain decoding, of one trained model"),
    "serve": (run_serve, "tokens per second in vLLM, against dense models there"),
}


def run_bench(arguments: list[str]) -> int:
    name, *rest = arguments or [""]
    if name in ("-h", "--help"):
        lines = "\n".join(f"  {bench:<12} {what}" for bench, (_, what) in BENCHES.items())
        print(f"usage: grt bench WHAT ...\n\n{lines}\n\n`grt bench WHAT --help` shows its options.")
        return 0
    if name not in BENCHES:
        given = f"{name!r} is none of the benches" if name else "name a bench first"
        raise ConfigError(f"{given}: choose one of {', '.join(BENCHES)}.")
    BENCHES[name][0](rest)
    return 0
