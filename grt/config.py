"""What a run is: frozen dataclasses, their JSON form and the hash that names the run.

Nothing here imports torch. Defaults are neutral and never change (the hash leaves them out, so that a new field
does not rename old runs); the value of every hyper-parameter that somebody chose lives in presets.py.
"""

import hashlib
import json
import re
from dataclasses import dataclass, field
from importlib.resources.abc import Traversable
from typing import Literal

from grt.errors import ConfigError
from grt.schema import at_least, finite, from_dict, identity, operational, to_dict

Weights = Literal["fp32", "bf16", "int8"]  # what inference may keep matrices in (grt/decode/quantize.py)

VERSION = "0.1.0"


@dataclass(frozen=True)
class Layout:
    """Blocks of a model, `p+nxR+c`: p prelude blocks, a core of n blocks applied R times, c coda blocks."""

    p: int
    n: int
    R: int
    c: int

    @classmethod
    def parse(cls, text: str) -> "Layout":
        """Read `2+5x4+2`, or `12L` and `12` for a dense model of 12 blocks (ConfigError on anything else)."""
        if dense := re.fullmatch(r"(\d{1,6})L?", text, re.ASCII):
            layout = cls(int(dense[1]), 0, 0, 0)
        elif recurrent := re.fullmatch(r"(\d{1,6})\+(\d{1,6})[x×](\d{1,6})\+(\d{1,6})", text, re.ASCII):
            layout = cls(*map(int, recurrent.groups()))
        else:
            raise ConfigError(f"model.layout is {text[:40]!r}, which is not a layout: write '1+1x6+1' or '12L'.")
        if layout.n_unique == 0:
            raise ConfigError(f"model.layout {text!r} has no block at all: give it at least one.")
        if (layout.n == 0) != (layout.R == 0):
            raise ConfigError(f"model.layout {text!r} needs both core blocks and recurrences, or neither (as in '8L').")
        return layout

    def __str__(self) -> str:
        return f"{self.p}L" if self.is_dense and not self.c else f"{self.p}+{self.n}x{self.R}+{self.c}"

    @property
    def is_dense(self) -> bool:
        return self.R == 0

    @property
    def n_unique(self) -> int:
        """Blocks with weights of their own."""
        return self.p + self.n + self.c

    def n_executions(self, steps: int | None = None) -> int:
        """Block executions of one forward pass at depth `steps` (default R)."""
        return self.p + self.n * (self.R if steps is None else steps) + self.c


@dataclass(frozen=True)
class ModelConfig:
    method: str = "ladder"
    """How the core is recurred: a key of grt.methods.METHODS. A dense layout has no core and ignores it."""
    layout: str = "12L"
    """p+nxR+c (prelude, core x recurrences, coda), or 12L for a dense model."""
    d_model: int = 768
    """Width d."""
    n_heads: int = 12
    """Attention heads."""
    context: int = 1024
    """Longest sequence T, in tokens."""
    vocab_size: int = 50257
    """Size of the tokenizer's vocabulary."""
    vocab_multiple: int = operational(1)
    """Round the embedding's rows up to a multiple of this, for the hardware; the added rows never take part."""
    gate_bias: float = 4.0
    """GRT: start value of the gate's last bias; sigmoid(4) = 0.98 copies nearly everything (eq:gate)."""
    gate_temperature: float = 1.0
    """GRT: tau of eq:gate."""
    state_noise: float = 0.1
    """GRT: sigma_x, standard deviation of the state noise in training (eq:proj)."""
    gate_noise: float = 0.1
    """GRT: sigma_g, standard deviation of the gate noise in training (eq:gate)."""
    start_std: float = 0.4**0.5
    """Poisson: standard deviation of the random state that the loop starts from."""
    mean_depth: float = 0.0
    """Poisson: r-bar, the mean of the drawn depth less one; 0: R - 1."""
    depth_sigma: float = 0.5
    """Poisson: sigma of the log-normal rate that the depth is drawn at."""
    depth_cap: int = 0
    """Poisson: deepest depth that is drawn; 0: 4R."""
    grad_steps: int = 8
    """Poisson: how many of the last steps carry gradient."""
    lora_rank: int = 8
    """RRT: rank of each step's low-rank deltas."""
    lora_scale: float = 2.0
    """RRT: factor of the deltas (alpha / rank)."""
    lora_targets: str = "attn.qkv,attn.out,mlp.up,mlp.down"
    """RRT: the linears of a block that have deltas, with commas between them."""
    capacities: str = ""
    """MoR: share of the tokens that each step keeps, with commas between them; empty: R/R, ..., 2/R, 1/R."""
    router: Literal["linear", "mlp"] = "linear"
    """MoR: what scores a token, one linear or two."""
    router_scale: float = 0.1
    """MoR: alpha, the factor of a router's weight on what a step adds."""
    router_loss: float = 1e-3
    """MoR: weight of the routers' own loss (auxiliary or balancing)."""
    router_z_loss: float = 0.0
    """MoR: weight of the mean squared log-sum-exp of the router's scores."""
    eval_routing: Literal["threshold", "topk"] = "threshold"
    """MoR: who goes on outside of training: scores above the threshold, or the sequence's best (sees the future)."""
    exit_beta: float = 0.05
    """Ouro: weight of the entropy of the exit distribution."""
    loop_carry: Literal["normed", "raw"] = "normed"
    """Ouro: what the next step reads of a state, its final norm or itself."""

    def __post_init__(self) -> None:
        finite("model", self)
        object.__setattr__(self, "layout", str(Layout.parse(self.layout)))  # one spelling: 8, 8L, 8+0x0+0 are one run
        for name in ("d_model", "n_heads", "context", "vocab_size", "vocab_multiple"):
            at_least(f"model.{name}", getattr(self, name), 1)
        if self.d_model % self.n_heads:
            raise ConfigError(
                f"model.d_model {self.d_model} is not divisible by model.n_heads {self.n_heads}: change one."
            )
        if self.gate_temperature <= 0:
            raise ConfigError(f"model.gate_temperature is {self.gate_temperature}: it must be above 0.")
        for name in ("state_noise", "gate_noise"):
            at_least(f"model.{name}", getattr(self, name), 0)

    @property
    def blocks(self) -> Layout:
        return Layout.parse(self.layout)

    @property
    def method_name(self) -> str:
        """The method as tables print it: a layout without a core is dense, whatever the field says."""
        return "dense" if self.blocks.is_dense else self.method

    @property
    def n_padding(self) -> int:
        """Rows of the embedding beyond the vocabulary."""
        return -self.vocab_size % self.vocab_multiple


@dataclass(frozen=True)
class DataConfig:
    path: str = "builtin"
    """Sources as in `grt prepare`, with commas between them, or a folder that it made."""
    tokenizer: str = "bytes"
    """How text becomes tokens: bytes, gpt2, or hf: and a tokenizer.json, its folder or a name on the hub."""
    field: str = "text"
    """Field of the rows of .jsonl and .parquet files and of datasets that holds the text."""
    windows: Literal["any", "document"] = "any"
    """Windows may span documents, or each lies within one (then documents shorter than one are not read)."""
    val_fraction: float = 0.02
    """Share of the documents that is kept for validation, chosen by their hash."""

    def __post_init__(self) -> None:
        finite("data", self)
        if not 0 < self.val_fraction < 1:
            raise ConfigError(f"data.val_fraction is {self.val_fraction}: it must lie between 0 and 1.")


@dataclass(frozen=True)
class OptimConfig:
    """AdamW and its schedule (sec:experiments): linear warm-up, then a cosine down to min_lr_ratio x lr."""

    lr: float = 6e-4
    """Peak learning rate."""
    min_lr_ratio: float = 0.1
    """Final learning rate as a share of the peak."""
    warmup_steps: int = 0
    """Optimizer steps of linear warm-up."""
    beta1: float = 0.9
    beta2: float = 0.95
    weight_decay: float = 0.1
    """On matrices only; biases, norms and vectors are not decayed."""
    grad_clip: float = 1.0
    """Largest norm of the whole gradient."""

    def __post_init__(self) -> None:
        finite("optim", self)
        if self.lr <= 0:
            raise ConfigError(f"optim.lr is {self.lr}: it must be above 0.")
        if not 0 <= self.min_lr_ratio <= 1:
            raise ConfigError(f"optim.min_lr_ratio is {self.min_lr_ratio}: it must lie between 0 and 1.")
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise ConfigError(f"optim.{name} is {getattr(self, name)}: it must lie in [0, 1).")
        at_least("optim.warmup_steps", self.warmup_steps, 0)
        at_least("optim.weight_decay", self.weight_decay, 0)
        if self.grad_clip <= 0:
            raise ConfigError(f"optim.grad_clip is {self.grad_clip}: it must be above 0.")


@dataclass(frozen=True)
class TrainConfig:
    init_from: str = ""
    """A run, checkpoint or model folder whose weights to start from; everything else starts anew."""
    init_tie: Literal["average", "stepwise"] = "average"
    """The core from a dense model of as many layers: the mean of the layers that it ties, or evenly spaced ones. Of no
    account where init_from is recurrent itself, or nothing."""
    stage: Literal[1, 2] = 1
    """2: train only what the method adds in a second stage (Ouro: the exit gate), from a run of the first one."""
    steps: int = 20_000
    """Optimizer steps."""
    tokens_per_step: int = 491_520
    """Tokens of one optimizer step: slots x sequences x context, whatever the number of ranks."""
    batch_size: int = 8
    """Sequences of one slot (one forward and backward pass); the rest of the step is accumulation."""
    seed: int = 1337
    """Decides initial weights, data order, depths and noise."""
    depth: Literal["method", "fixed"] = "method"
    """Recurrence depth of each slot: drawn as the method does, or always R."""
    dtype: Literal["auto", "fp32", "bf16"] = "auto"
    """Precision of the matrix products (weights stay fp32); auto: bf16 on CUDA, the faster of the two on a CPU."""
    device: Literal["auto", "cpu", "cuda", "mps"] = operational("auto")
    """Where to train."""
    threads: int = operational(0)
    """CPU threads; 0: as many as torch takes by itself."""
    recompute: Literal["auto", "none", "readout"] = operational("auto")
    """Coda and head again in the backward pass instead of kept; auto: where the loss reads out more than one state."""
    eval_every: int = operational(250)
    """Steps between two validations; the last step always has one."""
    eval_windows: int = operational(64)
    """Windows of the validation split that these validations read."""
    checkpoint_every: int = operational(500)
    """Steps between two checkpoints; the last step always has one."""
    keep: int = operational(2)
    """Newest checkpoints to keep; the best one stays too, even if it is older."""

    def __post_init__(self) -> None:
        counts = ("steps", "tokens_per_step", "batch_size", "eval_every", "eval_windows", "checkpoint_every", "keep")
        for name in counts:
            at_least(f"train.{name}", getattr(self, name), 1)
        at_least("train.threads", self.threads, 0)


@dataclass(frozen=True)
class RunConfig:
    """Everything that decides a training run."""

    name: str = operational("custom")
    """What to call it in tables."""
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    train: TrainConfig = field(default_factory=TrainConfig)

    def __post_init__(self) -> None:
        slot = self.train.batch_size * self.model.context
        if self.train.tokens_per_step % slot:
            raise ConfigError(
                f"train.tokens_per_step {self.train.tokens_per_step} is not a multiple of one slot, train.batch_size "
                f"{self.train.batch_size} x model.context {self.model.context} = {slot} tokens: change one of them."
            )

    @property
    def n_slots(self) -> int:
        """Slots A (forward and backward passes) of one optimizer step."""
        return self.train.tokens_per_step // (self.train.batch_size * self.model.context)


def load(path: Traversable) -> RunConfig:
    """Read a config.json (ConfigError, with the file's name, when it is missing or not one)."""
    try:
        return from_dict(RunConfig, json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        raise ConfigError(f"{path} does not exist: give a config.json or a run's folder.") from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror}): give a config.json.") from None
    except RecursionError:
        raise ConfigError(f"{path} is nested too deeply to be a config: restore it or write it anew.") from None
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    except (ValueError, OverflowError) as error:
        raise ConfigError(f"{path} is not JSON of a config ({error}): restore it or write it anew.") from None


def dump(config: RunConfig) -> str:
    return json.dumps(to_dict(config), indent=2) + "\n"


def config_hash(config: RunConfig) -> str:
    """The run's identity: sha256 of `identity`. Two configs that train the same run have the same hash."""
    return hashlib.sha256(json.dumps(identity(config), sort_keys=True).encode()).hexdigest()
