"""Named configurations, each derived from another: the only home of a hyper-parameter's value.

The search that found the nano values is in dev/LOG.md.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from grt.config import DataConfig, ModelConfig, OptimConfig, RunConfig, TrainConfig
from grt.errors import ConfigError, did_you_mean


def change(config: RunConfig, **sections: dict) -> RunConfig:
    """Copy a config with some fields of some sections changed: change(c, model={"gate_bias": 0.0})."""
    return replace(config, **{name: replace(getattr(config, name), **fields) for name, fields in sections.items()})


# What each compared method adds to the recipe. Sources and choices are in the methods' own files.
POISSON = {"start_std": 0.4**0.5, "mean_depth": 0.0, "depth_sigma": 0.5, "depth_cap": 0, "grad_steps": 8}
METHODS: dict[str, dict] = {
    "grt": {"gate_bias": 4.0, "gate_temperature": 1.0, "state_noise": 0.1, "gate_noise": 0.1},
    "mor": {"capacities": "", "router": "linear", "router_scale": 0.1, "router_loss": 1e-3, "router_z_loss": 0.0},
    "poisson": POISSON,
    "rrt": {"lora_rank": 8, "lora_scale": 2.0, "lora_targets": "attn.qkv,attn.out,mlp.up,mlp.down"},
    "ouro": {"exit_beta": 0.05, "loop_carry": "normed"},
}
VARIANTS: dict[str, dict] = {
    "mor-token": {"router": "linear", "router_scale": 1.0, "router_loss": 0.1, "router_z_loss": 1e-5},
    "huginn": POISSON,
}
LADDER = ("ladder-core", "ladder", "ladder-noise", "ladder-inject")  # rows 2 to 5; the first is a layout of `ladder`


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


def nano(method: str) -> RunConfig:
    """Another method under the recipe of grt-nano."""
    fields = (METHODS | VARIANTS).get(method, {})
    return replace(change(grt_nano(), model={"method": method, "gate_bias": 4.0, **fields}), name=f"{method}-nano")


# Size -> the dense model, and the layouts that tab:main compares it with: isoflop has as many block executions,
# isoparam as many unique blocks.
SIZES: dict[str, tuple[Callable[[], RunConfig], dict[str, str]]] = {
    "small": (dense_small, {"isoflop": "1+1x10+1", "isoparam": "1+10x10+1"}),
    "medium": (dense_medium, {"isoflop": "2+5x4+2", "isoparam": "2+20x4+2"}),
    "large": (dense_large, {"isoflop": "1+5x6+5", "isoparam": "3+30x6+3"}),
}


def sized(method: str, size: str, regime: str) -> RunConfig:
    """A row of tab:main: everything but method and layout is the dense model's."""
    dense, layouts = SIZES[size]
    config = change(dense(), model={"method": method, "layout": layouts[regime], **METHODS[method]})
    return replace(config, name=f"{method}-{size}-{regime}")


def ladder(row: str, base: RunConfig, name: str) -> RunConfig:
    """Row 2 to 5 of the component ablation, under the recipe of the gated model `base`. Row 2 has no prelude and no
    coda: their blocks join the core (R of them at a time) or, where that does not come out even, its repetitions."""
    layout = base.model.blocks
    if row == "ladder-core":
        more, rest = divmod(layout.p + layout.c, layout.R)
        again, odd = divmod(layout.p + layout.c, layout.n)
        assert not rest or not odd, "no layout without prelude and coda has as many block executions"
        n, R = (layout.n + more, layout.R) if not rest else (layout.n, layout.R + again)
        changed = {"method": "ladder", "layout": f"0+{n}x{R}+0"}
    else:
        changed = {"method": row}
    return replace(change(base, model={"gate_bias": 4.0, **changed}), name=name)


def short(config: RunConfig) -> RunConfig:
    """tab:ablation_ladder_2k: 2,000 steps. The paper names no other warm-up; ours keeps its share of the run."""
    return replace(change(config, train={"steps": 2000}, optim={"warmup_steps": 200}), name=f"{config.name}-2k")


def _presets() -> dict[str, Callable[[], RunConfig]]:
    makers: dict[str, Callable[[], RunConfig]] = {f"{m}-nano": partial(nano, m) for m in [*METHODS, *VARIANTS]}
    makers |= {"grt-nano": grt_nano, "grt-nano-paper": grt_nano_paper, "dense-nano": dense_nano, "demo": demo}
    makers |= {f"{row}-nano": lambda row=row: ladder(row, grt_nano(), f"{row}-nano") for row in LADDER}
    for size, (dense, layouts) in SIZES.items():
        makers[f"dense-{size}"] = dense
        for regime in layouts:
            makers |= {f"{method}-{size}-{regime}": partial(sized, method, size, regime) for method in METHODS}
    for row in LADDER:  # fig:ablation_ladder is small, tab:ablation_ladder_2k medium and short
        small, medium = (partial(sized, "grt", size, "isoflop") for size in ("small", "medium"))
        makers[f"{row}-small"] = lambda row=row, base=small: ladder(row, base(), f"{row}-small")
        makers[f"{row}-medium-2k"] = lambda row=row, base=medium: short(ladder(row, base(), f"{row}-medium"))
    for name in ("dense-medium", "grt-medium-isoflop"):
        makers[f"{name}-2k"] = lambda make=makers[name]: short(make())
    return makers


PRESETS = _presets()


def preset(name: str) -> RunConfig:
    """The preset called `name` (ConfigError names the nearest where there is none)."""
    if name in PRESETS:
        return PRESETS[name]()
    raise ConfigError(f"unknown preset {name!r}: {did_you_mean(name, PRESETS, '`grt list` shows all.')}")
