"""Costs in closed form against counted ones: parameters, FLOPs, caches and decode memory.

Shapes: d width, T tokens, V vocabulary, R steps.
"""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from grt.config import Layout, ModelConfig
from grt.methods import METHODS, build_model, depth_sampler
from grt.model import cost
from grt.model.depth import Depth
from grt.presets import preset

SIZES = {"S": (768, 12), "M": (1024, 16), "L": (1280, 20)}
GIB = 2**30


def on_meta(method: str, layout: str, **fields):
    with torch.device("meta"):
        return build_model(ModelConfig(method=method, layout=layout, **fields))


def paper_size(method: str, size: str, layout: str):
    d, n_heads = SIZES[size]
    return on_meta(method, layout, d_model=d, n_heads=n_heads)


# millions of parameters: strict tying, GRT, and the dense model of the row
@pytest.mark.parametrize(
    ("size", "layout", "dense_layout", "strict", "grt", "dense"),
    [
        ("S", "1+1x10+1", "12L", 60.65, 63.60, 124.44),
        ("M", "2+5x4+2", "24L", 165.88, 171.13, 354.82),
        ("L", "1+5x6+5", "36L", 282.09, 290.29, 774.03),
        ("S", "1+10x10+1", "12L", 124.44, 127.39, 124.44),
        ("M", "2+20x4+2", "24L", 354.82, 360.07, 354.82),
        ("L", "3+30x6+3", "36L", 774.03, 782.23, 774.03),
    ],
)
def test_parameters_at_the_papers_sizes(size, layout, dense_layout, strict, grt, dense):
    d, (V, T) = SIZES[size][0], (50257, 1024)
    rows = [("ladder", layout, strict), ("grt", layout, grt), ("ladder", dense_layout, dense)]
    for method, blocks, millions in rows:
        count = cost.parameters(paper_size(method, size, blocks))
        assert count["total"] / 1e6 == pytest.approx(millions, abs=0.005)
        assert count["total"] - count["without_positions"] == T * d
        assert count["without_positions"] - count["without_embeddings"] == V * d
        closed_form = Layout.parse(blocks).n_unique * (12 * d**2 + 13 * d) + 2 * d
        assert count["without_embeddings"] - (5 * d**2 + 6 * d) * (method == "grt") == closed_form


@pytest.mark.parametrize(
    ("name", "millions"),
    [
        ("dense-small", 124.44), ("grt-small-isoflop", 63.60), ("grt-small-isoparam", 127.39),
        ("dense-medium", 354.82), ("grt-medium-isoflop", 171.13), ("grt-medium-isoparam", 360.07),
        ("dense-large", 774.03), ("grt-large-isoflop", 290.29), ("grt-large-isoparam", 782.23),
    ],
)  # fmt: skip
def test_parameters_of_the_sized_presets(name, millions):
    """The true counts, in closed form, of what the presets build: padding is named apart."""
    config = preset(name).model
    with torch.device("meta"):
        model = build_model(config)
    count, d = cost.parameters(model), config.d_model
    rule = (5 * d**2 + 6 * d) * (not config.blocks.is_dense)
    closed_form = config.blocks.n_unique * (12 * d**2 + 13 * d) + 2 * d + (50257 + 1024) * d + rule
    assert count["total"] == closed_form and closed_form / 1e6 == pytest.approx(millions, abs=0.005)
    assert count["padding"] == 47 * d
    assert sum(p.numel() for p in model.parameters()) == closed_form + 47 * d


@pytest.mark.parametrize("tokens", [8, 256, 1024])
@pytest.mark.parametrize(
    ("method", "layout"),
    [(m, layout) for m in METHODS for layout in ("1+2x3+1", "0+1x2+0")] + [("ladder", "4L")],
)
def test_executed_flops_are_what_torch_counts(method, layout, tokens):
    model = on_meta(method, layout, d_model=16, n_heads=2, context=1024, vocab_size=23).eval()
    ids = torch.zeros(1, tokens, dtype=torch.long, device="meta")
    for k in range(model.config.blocks.R + 1):
        with FlopCounterMode(display=False) as counter:
            model(ids, Depth(k))
        per_token = cost.executed_flops(model, k, tokens) + cost.head_flops(model.config)
        assert counter.get_total_flops() == tokens * per_token


def test_head_flops_are_what_torch_counts():
    model = on_meta("grt", "1+2x3+1", d_model=16, n_heads=2, context=8, vocab_size=23)
    with FlopCounterMode(display=False) as counter:
        torch.nn.functional.linear(torch.zeros(8, 16, device="meta"), model.embed.tokens.weight)
    assert counter.get_total_flops() == 8 * cost.head_flops(model.config) == 8 * 2 * 16 * 23


@pytest.mark.parametrize("method", METHODS)
def test_cost_at_the_mean_depth_is_the_mean_cost(method):
    model = on_meta(method, "1+2x6+1", d_model=16, n_heads=2, context=64, vocab_size=23)
    sampler = depth_sampler(model.config)
    each = {r: cost.training_forward_flops(model, r, 64) for r in sampler.probabilities}
    assert len(set(each.values())) == len(each)
    want = sum(p * each[r] for r, p in sampler.probabilities.items())
    assert cost.mean_over_depths(sampler, lambda depth: each[depth.steps]) == pytest.approx(want, rel=1e-12)
    assert sum(sampler.probabilities.values()) == pytest.approx(1, rel=1e-9)


@pytest.mark.parametrize(
    ("size", "layout", "want"),
    [
        ("S", "1+1x10+1", 12 * (24 * 768**2 + 4 * 1024 * 768) + 10 * 10 * 768**2),
        ("M", "2+5x4+2", 24 * (24 * 1024**2 + 4 * 1024 * 1024) + 4 * 10 * 1024**2),
        ("L", "1+5x6+5", 36 * (24 * 1280**2 + 4 * 1024 * 1280) + 6 * 10 * 1280**2),
    ],
)
def test_paper_flops_are_eq_flops(size, layout, want):
    d, n_heads = SIZES[size]
    config = ModelConfig(method="grt", layout=layout, d_model=d, n_heads=n_heads)
    assert cost.paper_flops(config, 1024) == want
    p, n, R, c = (getattr(config.blocks, name) for name in "pnRc")
    assert cost.paper_flops(config, 100) == (p + n * R + c) * (24 * d**2 + 4 * 100 * d) + R * 10 * d**2
    # what the code runs is less: the anchor halves of both projections, 4 d^2, run once instead of R times
    executed = cost.executed_flops(paper_size("grt", size, layout), R, 1024)
    assert want - executed == 4 * d**2 * (R - 1)


@pytest.mark.parametrize(
    ("layout", "dense", "ratio"),
    [("1+1x10+1", "S", 1.284), ("2+5x4+2", "M", 1.060), ("1+5x6+5", "L", 1.061)],
)
def test_iso_flop_is_not_iso_by_eq_flops(layout, dense, ratio):
    d, n_heads = SIZES[dense]
    grt = ModelConfig(method="grt", layout=layout, d_model=d, n_heads=n_heads)
    gpt2 = ModelConfig(layout={"S": "12L", "M": "24L", "L": "36L"}[dense], d_model=d, n_heads=n_heads)
    assert cost.paper_flops(grt, 1024) / cost.paper_flops(gpt2, 1024) == pytest.approx(ratio, abs=5e-4)


def test_kv_bytes():
    grt = paper_size("grt", "M", "2+5x4+2")
    shared = 4 * 1024 * (2 + 5 + 2)
    want = {"full": 4 * 1024 * 24, "first": shared, "last": shared, "mean": shared, "first:all": shared}
    assert cost.kv_bytes_per_token(grt) == want
    dense = cost.kv_bytes_per_token(paper_size("ladder", "M", "24L"))
    assert set(dense.values()) == {4 * 1024 * 24}


@pytest.mark.parametrize(
    ("method", "layout", "strategy", "one", "thirty_two", "digits"),
    [
        ("ladder", "24L", "full", 0.755, 3.661, 3),
        ("grt", "2+5x4+2", "full", 0.41, 3.32, 2),
        ("grt", "2+5x4+2", "mean", 0.35, 1.44, 2),
    ],
)
def test_decode_memory_is_tab_decode_mem(method, layout, strategy, one, thirty_two, digits):
    memory = cost.decode_memory(paper_size(method, "M", layout))[strategy]
    assert {B: round(n / GIB, digits) for B, n in memory.items()} == {"1": one, "32": thirty_two}
