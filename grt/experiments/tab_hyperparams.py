"""tab:hyperparams: the configurations that the paper prints beside those of presets.py. Nothing is trained for it."""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from grt.config import RunConfig
from grt.methods import depth_sampler
from grt.presets import preset
from grt.study.report import Report, Table
from grt.study.results import Results
from grt.train.optim import learning_rate


class Printed(NamedTuple):
    """A row of the table; p, b, R and c are None where it prints a dash."""

    p: int | None
    b: int | None
    R: int | None
    c: int | None
    d: int
    h: int
    batch_tokens: int
    lr: float
    steps: int


EXPECTED: dict[str, Printed] = {
    "dense-small": Printed(None, None, None, None, 768, 12, 491_520, 6e-4, 20_000),
    "grt-small-isoflop": Printed(1, 1, 10, 1, 768, 12, 491_520, 6e-4, 20_000),
    "dense-medium": Printed(None, None, None, None, 1024, 16, 491_520, 6e-4, 20_000),
    "grt-medium-isoflop": Printed(2, 5, 4, 2, 1024, 16, 491_520, 6e-4, 20_000),
    "grt-medium-isoparam": Printed(2, 20, 4, 2, 1024, 16, 491_520, 6e-4, 20_000),
    "dense-large": Printed(None, None, None, None, 1280, 20, 491_520, 6e-4, 20_000),
    "grt-large-isoflop": Printed(1, 5, 6, 5, 1280, 20, 491_520, 6e-4, 20_000),
    "grt-large-isoparam": Printed(3, 30, 6, 3, 1280, 20, 491_520, 6e-4, 20_000),
}
# What the caption and the text (subsec:setup) give for all of them, and then for GRT's alone.
COMMON = {
    "beta1": "0.9", "beta2": "0.95", "weight decay": "0.1", "gradient clip": "1",
    "precision": "bf16", "warm-up steps": "2000", "decay": "cosine", "final learning rate": "6e-05",
    "sequence length": "1024", "vocabulary": "50257", "batch size": "8", "accumulation": "60",
    "tokens of a run": "9.8 B",
}  # fmt: skip
GATED = {
    "gate bias": "4", "sigma_x": "0.1", "sigma_g": "0.1", "tau": "1", "depths drawn": "uniform in 1..R",
    "a depth for each": "step",
}  # fmt: skip
NOTES = [
    "A layout is p+bxR+c: p blocks of prelude, b of core, applied R times, c of coda; d is the width, h the heads.",
    "Batch tokens: the caption's formula, 8 x 60 x 1,024, times its number of GPUs (two) would be 983,040. Read "
    "here as 491,520 in all, whatever the number of ranks.",
    "Medium: the caption of the architecture's figure has 2+5x8+2, every table 2+5x4+2. Read here as R = 4.",
    "Depth: the text draws it at each training step, its listing in each forward pass. Here each of a step's 60 slots "
    "draws its own, the same on all ranks.",
]


def RUNS(scale: str, seeds: Sequence[int]) -> list[RunConfig]:
    """None."""
    return []


def ours(config: RunConfig) -> Printed:
    layout, model = config.model.blocks, config.model
    p, b, R, c = (None,) * 4 if layout.is_dense else (layout.p, layout.n, layout.R, layout.c)
    train = config.train
    return Printed(p, b, R, c, model.d_model, model.n_heads, train.tokens_per_step, config.optim.lr, train.steps)


def decay(config: RunConfig) -> str:
    """The shape of the schedule, from its rate after a quarter of the decay."""
    optim, steps = config.optim, config.train.steps
    quarter = learning_rate(optim, optim.warmup_steps + (steps - optim.warmup_steps) // 4, steps)
    share = (quarter / optim.lr - optim.min_lr_ratio) / (1 - optim.min_lr_ratio)
    return "cosine" if math.isclose(share, (1 + math.cos(math.pi / 4)) / 2) else f"{share:.3f} at a quarter"


def depths_drawn(config: RunConfig) -> str:
    found, R = depth_sampler(config.model, config.train.depth).probabilities, config.model.blocks.R
    return "uniform in 1..R" if dict(found) == dict.fromkeys(range(1, R + 1), 1 / R) else str(dict(found))


def drawn_for(config: RunConfig) -> str:
    sampler = depth_sampler(config.model, config.train.depth)
    depths = {sampler(config.train.seed, 0, slot).steps for slot in range(config.n_slots)}
    return "slot" if len(depths) > 1 else "step"


OURS: dict[str, Callable[[RunConfig], str]] = {
    "beta1": lambda config: f"{config.optim.beta1:g}",
    "beta2": lambda config: f"{config.optim.beta2:g}",
    "weight decay": lambda config: f"{config.optim.weight_decay:g}",
    "gradient clip": lambda config: f"{config.optim.grad_clip:g}",
    "precision": lambda config: config.train.dtype,
    "warm-up steps": lambda config: str(config.optim.warmup_steps),
    "decay": decay,
    "final learning rate": lambda config: f"{learning_rate(config.optim, config.train.steps, config.train.steps):g}",
    "sequence length": lambda config: str(config.model.context),
    "vocabulary": lambda config: str(config.model.vocab_size),
    "batch size": lambda config: str(config.train.batch_size),
    "accumulation": lambda config: str(config.n_slots),
    "tokens of a run": lambda config: f"{config.train.steps * config.train.tokens_per_step / 1e9:.1f} B",
    "gate bias": lambda config: f"{config.model.gate_bias:g}",
    "sigma_x": lambda config: f"{config.model.state_noise:g}",
    "sigma_g": lambda config: f"{config.model.gate_noise:g}",
    "tau": lambda config: f"{config.model.gate_temperature:g}",
    "depths drawn": depths_drawn,
    "a depth for each": drawn_for,
}


def build(results: Results) -> Report:
    """The same at every scale."""
    return Report("tab:hyperparams, the paper's and ours", [sizes(), settings()], {}, NOTES)


def sizes() -> Table:
    rows = []
    for name, printed in EXPECTED.items():
        found = ours(preset(name))
        differ = [field for field in Printed._fields if getattr(printed, field) != getattr(found, field)]
        rows.append([name, "paper", *map(_cell, printed), ""])
        rows.append([name, "ours", *map(_cell, found), f"! {', '.join(differ)}" if differ else "no"])
    columns = ("run", "", "p", "b", "R", "c", "d", "h", "batch tokens", "peak LR", "steps", "differs")
    return Table("tab_hyperparams", "Configurations as printed and as presets (`grt list`).", columns, rows)


def _cell(value: float | None) -> str:
    return "" if value is None else f"{value:,}" if isinstance(value, int) else f"{value:g}"


def settings() -> Table:
    configs = [preset(name) for name in EXPECTED]
    gated = [config for config in configs if not config.model.blocks.is_dense]
    rows = []
    for printed, of in ((COMMON, configs), (GATED, gated)):
        for name, value in printed.items():
            found = " or ".join(sorted({OURS[name](config) for config in of}))
            rows.append((name, value, found, "no" if found == value else "!"))
    caption = "What all runs share (from `gate bias` on: GRT's), printed and in the presets. AdamW in both."
    return Table("tab_hyperparams_shared", caption, ("setting", "paper", "ours", "differs"), rows)
