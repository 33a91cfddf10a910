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
    """A GRT that two CPU cores train in twenty minutes: three blocks, eight block executions, bytes.

    Four slots a step, so four depths: at equal tokens that was better than one depth for the whole step. Gate bias
    -2, not the paper's +4: on so few tokens a gate that starts closed stays closed, and depth is ignored.
    """
    return RunConfig(
        name="grt-nano",
        model=ModelConfig(
            method="grt", layout="1+1x6+1", d_model=128, n_heads=4, context=256, vocab_size=257, gate_bias=-2.0
        ),
        optim=OptimConfig(lr=4e-3, warmup_steps=100),
        train=TrainConfig(steps=4000, tokens_per_step=16 * 256, batch_size=4),
    )


def grt_nano_paper() -> RunConfig:
    """grt-nano with the paper's gate bias."""
    return replace(change(grt_nano(), model={"gate_bias": 4.0}), name="grt-nano-paper")


def dense_nano() -> RunConfig:
    """Dense GPT-2 with as many block executions as grt-nano, under the same recipe."""
    return replace(change(grt_nano(), model={"method": "ladder", "layout": "8L", "gate_bias": 4.0}), name="dense-nano")


def demo() -> RunConfig:
    """What `make demo` trains within five minutes: grt-nano on windows half as long, with a gate that starts half
    open (both learn faster at first)."""
    config = change(
        grt_nano(),
        model={"context": 128, "gate_bias": 0.0},
        optim={"warmup_steps": 60},
        train={"steps": 1000, "tokens_per_step": 16 * 128, "batch_size": 16, "eval_every": 100},
    )
    return replace(config, name="demo")


PRESETS: dict[str, Callable[[], RunConfig]] = {
    "grt-nano": grt_nano,
    "grt-nano-paper": grt_nano_paper,
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
