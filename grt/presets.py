"""Named configurations, each derived from another: the only home of a hyper-parameter's value.

The search that found the nano values is in dev/LOG.md.
"""

from collections.abc import Callable
from dataclasses import replace

from grt.config import ConfigError, DataConfig, ModelConfig, OptimConfig, RunConfig, TrainConfig


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


def dense_small() -> RunConfig:
    """GPT-2 small under the paper's recipe (sec:experiments, tab:hyperparams), from which all the paper's runs derive.

    491,520 tokens a step are 60 slots of 8 x 1,024. The vocabulary is padded to 50,304 rows, which changes no result.
    The paper does not name its text: set --data.path to yours; `builtin` (40 MB of code) only stands in for it.
    """
    return RunConfig(
        name="dense-small",
        model=ModelConfig(
            layout="12L", d_model=768, n_heads=12, context=1024, vocab_size=50257, vocab_multiple=128,
            gate_bias=4.0, gate_temperature=1.0, state_noise=0.1, gate_noise=0.1,
        ),
        data=DataConfig(path="builtin", tokenizer="gpt2"),
        optim=OptimConfig(lr=6e-4, min_lr_ratio=0.1, warmup_steps=2000, weight_decay=0.1, grad_clip=1.0),
        train=TrainConfig(steps=20_000, tokens_per_step=491_520, batch_size=8, dtype="bf16"),
    )  # fmt: skip


def dense_medium() -> RunConfig:
    """GPT-2 medium."""
    config = change(dense_small(), model={"layout": "24L", "d_model": 1024, "n_heads": 16})
    return replace(config, name="dense-medium")


def dense_large() -> RunConfig:
    """GPT-2 large."""
    config = change(dense_small(), model={"layout": "36L", "d_model": 1280, "n_heads": 20})
    return replace(config, name="dense-large")


def gated(dense: RunConfig, layout: str, regime: str) -> RunConfig:
    """The GRT that the paper compares with a dense model: isoflop (as many block executions) or isoparam (as many
    unique blocks); everything else is the dense model's."""
    config = change(dense, model={"method": "grt", "layout": layout})
    return replace(config, name=f"{dense.name.replace('dense', 'grt')}-{regime}")


def grt_small_isoflop() -> RunConfig:
    return gated(dense_small(), "1+1x10+1", "isoflop")


def grt_small_isoparam() -> RunConfig:
    return gated(dense_small(), "1+10x10+1", "isoparam")


def grt_medium_isoflop() -> RunConfig:
    return gated(dense_medium(), "2+5x4+2", "isoflop")


def grt_medium_isoparam() -> RunConfig:
    return gated(dense_medium(), "2+20x4+2", "isoparam")


def grt_large_isoflop() -> RunConfig:
    return gated(dense_large(), "1+5x6+5", "isoflop")


def grt_large_isoparam() -> RunConfig:
    return gated(dense_large(), "3+30x6+3", "isoparam")


PRESETS: dict[str, Callable[[], RunConfig]] = {
    make.__name__.replace("_", "-"): make
    for make in (
        grt_nano, grt_nano_paper, dense_nano, demo,
        dense_small, grt_small_isoflop, grt_small_isoparam,
        dense_medium, grt_medium_isoflop, grt_medium_isoparam,
        dense_large, grt_large_isoflop, grt_large_isoparam,
    )
}  # fmt: skip


def preset(name: str) -> RunConfig:
    """The preset called `name` (ConfigError names the nearest where there is none)."""
    import difflib

    if name in PRESETS:
        return PRESETS[name]()
    nearest = difflib.get_close_matches(name, PRESETS, n=1, cutoff=0.0)[0]
    raise ConfigError(f"unknown preset {name!r}: did you mean {nearest}? `grt list` shows all.")
