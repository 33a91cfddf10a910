"""Presets: what they build, which names they are found under, and the hashes that must not change."""

import pytest
import torch

from grt.config import ModelConfig, RunConfig, config_hash
from grt.errors import ConfigError
from grt.methods import build_model, depth_sampler
from grt.presets import PRESETS, preset


@pytest.mark.parametrize("name", PRESETS)
def test_presets_build(name):
    config = preset(name)
    assert config.name == name and config.n_slots >= 1
    with torch.device("meta"):
        model = build_model(config.model)
    assert sum(p.numel() for p in model.parameters()) > 0
    sampler = depth_sampler(config.model, config.train.depth)
    assert sampler(0, 0, 0).steps in sampler.probabilities


@pytest.mark.parametrize(("wrong", "nearest"), [("grt-nanno", "grt-nano"), ("dense", "dense-nano"), ("dem", "demo")])
def test_preset_suggests_the_nearest(wrong, nearest):
    with pytest.raises(ConfigError, match=f"unknown preset '{wrong}': did you mean {nearest}"):
        preset(wrong)


def test_method_suggests_the_nearest():
    with pytest.raises(ConfigError, match="model.method is 'gtr': did you mean grt"):
        build_model(ModelConfig(method="gtr", layout="1+1x2+1"))


def test_nanos_are_equal_in_block_executions():
    grt, dense = preset("grt-nano").model, preset("dense-nano").model
    assert grt.blocks.n_executions() == dense.blocks.n_executions() == 8
    assert (grt.d_model, grt.context, grt.vocab_size) == (dense.d_model, dense.context, dense.vocab_size)
    assert (grt.method_name, dense.method_name) == ("grt", "dense")


def test_committed_hashes_stay():
    """Run folders and committed models carry these."""
    hashes = {name: config_hash(preset(name))[:12] for name in ("grt-nano", "grt-nano-paper", "dense-nano", "demo")}
    assert hashes == {
        "grt-nano": "b3c8e3b16d86",
        "grt-nano-paper": "3252533e8851",
        "dense-nano": "9ba4aaad8a3f",
        "demo": "7428383bacdc",
    }


ROWS = {  # of tab:main and tab:hyperparams
    "small": {"dense": "12L", "isoflop": "1+1x10+1", "isoparam": "1+10x10+1"},
    "medium": {"dense": "24L", "isoflop": "2+5x4+2", "isoparam": "2+20x4+2"},
    "large": {"dense": "36L", "isoflop": "1+5x6+5", "isoparam": "3+30x6+3"},
}
COMPARED = ("grt", "mor", "poisson", "rrt", "ouro")
PAPER = {f"dense-{size}": ("dense", layouts["dense"]) for size, layouts in ROWS.items()} | {
    f"{method}-{size}-{regime}": (method, layouts[regime])
    for size, layouts in ROWS.items()
    for regime in ("isoflop", "isoparam")
    for method in COMPARED
}
LADDER = {  # tab:ablation_ladder_2k and fig:ablation_ladder; row 2 keeps the number of block executions
    "ladder-core-small": ("ladder", "0+1x12+0"), "ladder-small": ("ladder", "1+1x10+1"),
    "ladder-noise-small": ("ladder-noise", "1+1x10+1"), "ladder-inject-small": ("ladder-inject", "1+1x10+1"),
}  # fmt: skip
SHORT = {
    "dense-medium-2k": ("dense", "24L"), "ladder-core-medium-2k": ("ladder", "0+6x4+0"),
    "ladder-medium-2k": ("ladder", "2+5x4+2"), "ladder-noise-medium-2k": ("ladder-noise", "2+5x4+2"),
    "ladder-inject-medium-2k": ("ladder-inject", "2+5x4+2"), "grt-medium-isoflop-2k": ("grt", "2+5x4+2"),
}  # fmt: skip


def test_every_row_of_the_paper_is_a_preset():
    assert PAPER.keys() | LADDER.keys() | SHORT.keys() == {n for n in PRESETS if "nano" not in n and n != "demo"}
    assert len(PAPER) == 33
    for names in (LADDER, SHORT):
        executions = {preset(name).model.blocks.n_executions() for name in names}
        assert len(executions) == 1


@pytest.mark.parametrize("name", [*PAPER, *LADDER, *SHORT])
def test_the_papers_recipe(name):
    """tab:hyperparams and sec:experiments, for every method, size and regime."""
    config = preset(name)
    size = next(size for size in ROWS if f"-{size}" in name)
    model, optim, train = config.model, config.optim, config.train
    assert (model.d_model, model.n_heads) == {"small": (768, 12), "medium": (1024, 16), "large": (1280, 20)}[size]
    assert (model.method_name, model.layout) == (PAPER | LADDER | SHORT)[name]
    assert (model.context, model.vocab_size, model.vocab_size + model.n_padding) == (1024, 50257, 50304)
    assert (model.gate_bias, model.gate_temperature, model.state_noise, model.gate_noise) == (4.0, 1.0, 0.1, 0.1)
    assert (config.n_slots, train.batch_size, train.tokens_per_step) == (60, 8, 491_520)
    assert (train.dtype, train.depth, config.data.tokenizer) == ("bf16", "method", "gpt2")
    assert (train.steps, optim.warmup_steps) == ((2000, 200) if name in SHORT else (20_000, 2000))
    assert (optim.lr, optim.min_lr_ratio * optim.lr) == (6e-4, pytest.approx(6e-5))
    assert (optim.beta1, optim.beta2, optim.weight_decay, optim.grad_clip) == (0.9, 0.95, 0.1, 1.0)


def test_every_spelling_of_a_layout_is_one_run():
    spellings = ("8", "8L", "8+0x0+0", "8+0×0+0")
    assert {config_hash(RunConfig(model=ModelConfig(layout=text))) for text in spellings} == {
        config_hash(RunConfig(model=ModelConfig(layout="8L")))
    }
    assert ModelConfig(layout="2+5×4+2").layout == "2+5x4+2"
