"""Named configurations, each derived from another: the only home of a hyper-parameter's value.

The search that found the nano values is in dev/LOG.md.
"""

from collections.abc import Callable
from dataclasses import replace

from grt.config import ConfigError, ModelConfig, OptimConfig, RunConfig, TrainConfig


def change(config: RunConfig, **sections: dict) -> RunConfig:
    """Copy a config with some fields of some sections changed: change(c, model={"gate_bias": 0.0})."""
    return replace(config, **{name: replace(getattr(config, name), **fields) for name, fields in sections.items()})


def grt_nano() -> RunConfig:
    """A GRT that two CPU cores train: three blocks, eight block executions, bytes."""
    return RunConfig(
        name="grt-nano",
        model=ModelConfig(method="grt", layout="1+1x6+1", d_model=128, n_heads=4, context=256, vocab_size=257),
        optim=OptimConfig(lr=2e-3, warmup_steps=100),
        train=TrainConfig(steps=4000, tokens_per_step=16 * 256, batch_size=16),
    )


def dense_nano() -> RunConfig:
    """Dense GPT-2 with as many block executions as grt-nano."""
    return replace(change(grt_nano(), model={"method": "ladder", "layout": "8L"}), name="dense-nano")


def demo() -> RunConfig:
    """What `make demo` trains within five minutes: grt-nano on fewer tokens."""
    return replace(change(grt_nano(), train={"steps": 500, "eval_every": 100}), name="demo")


PRESETS: dict[str, Callable[[], RunConfig]] = {
    "grt-nano": grt_nano,
    "dense-nano": dense_nano,
    "demo": demo,
}


def preset(name: str) -> RunConfig:
    """The preset called `name` (ConfigError names the nearest where there is none)."""
    import difflib

    if name in PRESETS:
        return PRESETS[name]()
    nearest = difflib.get_close_matches(name, PRESETS, n=1, cutoff=0.0)[0]
    raise ConfigError(f"unknown preset {name!r}: did you mean {nearest}? `grt list` shows all.")
