"""The recipe of each scale: which preset a row of a table is, under how many steps, with which learning rate.

small, medium and large are the paper's presets as they stand. nano is what two cores can afford: the recipe of
grt-nano, shortened, at the learning rate (and gate bias) that the sweep in learning_rates.py found for the method.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal, get_args

from grt.config import RunConfig
from grt.errors import ConfigError
from grt.presets import LADDER, PRESETS, change, preset

Scale = Literal["nano", "small", "medium", "large"]
SCALES: tuple[Scale, ...] = get_args(Scale)
METHODS = ("mor", "poisson", "ouro", "rrt", "grt")  # the order of tab:main
SEEDS = (1337, 42, 123)  # tab:seeds

NANO_LR = 4e-3  # the middle of the sweep
# What the sweep chose, method -> factor of NANO_LR; other layouts and rows of the ladder take their method's.
NANO_FACTOR: dict[str, float] = {"mor": 2.0}
NANO_GATE_BIAS = 4.0  # likewise
UNIQUE = "3L"  # dense, as many unique blocks as 1+1x6+1
# What tables of these rows say of it.
UNSWEPT = (
    "Rates were swept for dense 8L and the five methods alone: dense-3L has that of dense 8L, rows of the ladder "
    "GRT's, and sweeps of their own might move them."
)


def shorten(config: RunConfig) -> RunConfig:
    """A nano preset within the study's budget: 1,500 steps of 2,048 bytes, two slots (and so two depths) a step."""
    return change(
        config,
        optim={"warmup_steps": 100},
        train={
            "steps": 1500, "tokens_per_step": 8 * 256, "dtype": "bf16", "eval_every": 250, "eval_windows": 64,
            "checkpoint_every": 250, "keep": 1,
        },
    )  # fmt: skip


def nano(name: str, factor: float | None = None, gate_bias: float | None = None) -> RunConfig:
    """A row at nano scale: dense, dense-3L, a method, or a row of the ladder."""
    base = "dense" if name.startswith("dense") else "grt" if name in LADDER else name
    config = shorten(preset(f"{'dense' if base == 'dense' else name}-nano"))
    if name == "dense-3L":
        config = change(config, model={"layout": UNIQUE})
    if name == "grt":
        config = change(config, model={"gate_bias": NANO_GATE_BIAS if gate_bias is None else gate_bias})
    factor = NANO_FACTOR.get(base, 1.0) if factor is None else factor
    return replace(change(config, optim={"lr": factor * NANO_LR}), name=f"{name}-nano")


def row(name: str, scale: str, regime: str = "isoflop") -> RunConfig:
    """The config of dense, a method or a ladder row at a scale. ConfigError where the paper has none."""
    if scale == "nano":
        return nano(name)
    for candidate in (f"{name}-{scale}", f"{name}-{scale}-{regime}"):
        if candidate in PRESETS:
            return preset(candidate)
    raise ConfigError(f"{name} has no configuration at scale {scale}: choose one of {', '.join(SCALES)}.")


def with_seeds(configs: Sequence[RunConfig], seeds: Sequence[int]) -> list[RunConfig]:
    """Every config under every seed, all configs of a seed before the next seed."""
    return [change(config, train={"seed": seed}) for seed in seeds for config in configs]
