"""Costs in closed form against counted ones: parameters, FLOPs, caches and decode memory.

Shapes: d width, T tokens, V vocabulary, R steps.
"""

import copy

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from grt.backbone.context import LoopContext
from grt.config import Layout, ModelConfig
from grt.methods import METHODS, build_model, depth_sampler
from grt.model import cost
from grt.model.depth import Depth, lognormal_poisson
from grt.presets import PRESETS, preset

SIZES = {"S": (768, 12), "M": (1024, 16), "L": (1280, 20)}
GIB = 2**30


def on_meta(method: str, layout: str, **fields):
    with torch.device("meta"):
        return build_model(ModelConfig(method=method, layout=layout, **fields))


def paper_size(method: str, size: str, layout: str):
    d, n_heads = SIZES[size]
    return on_meta(method, layout, d_model=d, n_heads=n_heads)


# Over strict tying: what each method's rule adds, in closed form of width d, core blocks n and steps R.
ADDS = {
    "ladder": lambda d, n, R: 0,
    "ladder-noise": lambda d, n, R: 0,
    "ladder-inject": lambda d, n, R: 2 * d**2,
    "grt": lambda d, n, R: 5 * d**2 + 6 * d,
    "poisson": lambda d, n, R: 2 * d**2 + d,
    "rrt": lambda d, n, R: R * n * 16 * 8 * d,
    "mor": lambda d, n, R: R * d,
    "mor-token": lambda d, n, R: R * d,
    "ouro": lambda d, n, R: d + 1,
}
FIELDS = {"mor mlp": ("mor", {"router": "mlp"}), **{f"rrt {k}": ("rrt", {"lora_rank": k}) for k in (4, 16, 64)}}
ADDS_WITH = {
    "mor mlp": lambda d, n, R: R * (2 * d**2 + 2 * d),
    **{f"rrt {k}": lambda d, n, R, k=k: R * n * 16 * k * d for k in (4, 16, 64)},
}
COLUMNS = ("ladder", "mor", "mor mlp", "poisson", "ouro", "rrt 4", "rrt", "rrt 16", "rrt 64", "grt")
# Millions at V = 50,257 and T = 1,024, and those of the dense row.
ROWS = {
    ("S", "1+1x10+1", "12L", 124.44): (60.65, 60.66, 72.46, 61.83, 60.65, 61.14, 61.63, 62.62, 68.51, 63.60),
    ("M", "2+5x4+2", "24L", 354.82): (165.88, 165.88, 174.28, 167.98, 165.88, 167.19, 168.50, 171.12, 186.85, 171.13),
    ("L", "1+5x6+5", "36L", 774.03): (282.09, 282.10, 301.77, 285.37, 282.10, 284.55, 287.01, 291.92, 321.42, 290.29),
    ("S", "1+10x10+1", "12L", 124.44): (124.44, 124.45, 136.25, 125.62, 124.44, 129.4, 134.3, 144.1, 203.1, 127.39),
    ("M", "2+20x4+2", "24L", 354.82): (354.82, 354.83, 363.22, 356.92, 354.82, 360.1, 365.3, 375.8, 438.7, 360.07),
    ("L", "3+30x6+3", "36L", 774.03): (774.03, 774.04, 793.71, 777.31, 774.03, 788.8, 803.5, 833.0, 1010, 782.23),
}


@pytest.mark.parametrize(("row", "millions"), ROWS.items(), ids=lambda x: x[1] if isinstance(x[0], str) else "")
def test_parameters_at_the_papers_sizes(row, millions):
    """Counted on the meta device against closed forms, and those against the table of the paper's configurations."""
    size, layout, dense_layout, dense = row
    d, (V, T), blocks = SIZES[size][0], (50257, 1024), Layout.parse(layout)
    strict = blocks.n_unique * (12 * d**2 + 13 * d) + 2 * d + (V + T) * d
    for column, printed in zip(COLUMNS, millions, strict=True):
        method, fields = FIELDS.get(column, (column, {}))
        count = cost.parameters(on_meta(method, layout, d_model=d, n_heads=SIZES[size][1], **fields))
        assert count["total"] == strict + (ADDS | ADDS_WITH)[column](d, blocks.n, blocks.R), column
        digits = len(str(printed).partition(".")[2])
        as_printed = 0.5 * 10**-digits + 3e-3  # 290.295 is 290.29 or 290.30 by the way it is rounded
        assert abs(count["total"] / 1e6 - printed) < as_printed, column  # the exact count is above
        assert count["total"] - count["without_positions"] == T * d
        assert count["without_positions"] - count["without_embeddings"] == V * d
    of_dense = cost.parameters(paper_size("ladder", size, dense_layout))["total"]
    assert of_dense == int(dense_layout[:-1]) * (12 * d**2 + 13 * d) + 2 * d + (V + T) * d
    assert of_dense / 1e6 == pytest.approx(dense, abs=0.005)  # printed with two digits


@pytest.mark.parametrize("name", [name for name in PRESETS if "nano" not in name and name != "demo"])
def test_parameters_of_the_sized_presets(name):
    """The true counts, in closed form, of what the presets build: padding is named apart."""
    config = preset(name).model
    with torch.device("meta"):
        model = build_model(config)
    count, d, blocks = cost.parameters(model), config.d_model, config.blocks
    rule = 0 if blocks.is_dense else ADDS[config.method](d, blocks.n, blocks.R)
    closed_form = blocks.n_unique * (12 * d**2 + 13 * d) + 2 * d + (50257 + 1024) * d + rule
    assert count["total"] == closed_form and count["padding"] == 47 * d
    assert sum(p.numel() for p in model.parameters()) == closed_form + 47 * d


@pytest.mark.parametrize("method", METHODS)
def test_parameters_are_counted_by_storage(tiny, method, tmp_path):
    """In bf16, saved and loaded, compiled, and where somebody hangs the core's blocks up once a step."""
    model = tiny(method, dtype=torch.float32)
    count = cost.parameters(model)
    if method in ADDS:  # huginn's blocks are larger
        d, extra = 16, ADDS[method](16, 2, 3)
        assert count["total"] == 4 * (12 * d**2 + 13 * d) + 2 * d + (23 + 12) * d + extra
    assert cost.parameters(tiny(method, dtype=torch.bfloat16)) == count
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    assert sum(x.numel() for x in load_file(tmp_path / "model.safetensors").values()) == count["total"]
    loaded = tiny(method, dtype=torch.float32, seed=1)
    loaded.load_state_dict(load_file(tmp_path / "model.safetensors"), assign=True)
    assert cost.parameters(loaded) == count
    assert cost.parameters(torch.compile(model, backend="eager")) == count
    unrolled = copy.deepcopy(model)
    unrolled.steps = nn.ModuleList(unrolled.core for _ in range(3))
    assert cost.parameters(unrolled) == count
    shared = unrolled.core[0].mlp.up.weight.detach()
    unrolled.twin = nn.Parameter(shared)
    assert cost.parameters(unrolled) == count, "another Parameter over the same storage"
    unrolled.twin = nn.Parameter(shared.clone())
    assert cost.parameters(unrolled)["total"] == count["total"] + shared.numel()


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


def counted(model, depth, tokens, stage=1):
    """FLOPs of a training pass, forward and backward, as torch counts them. With a tap on it, attention is the plain
    products that closed forms count; of torch's kernel, the counter has the backward pass compute the scores again."""
    ids = torch.zeros(1, tokens, dtype=torch.long, device="meta")
    with FlopCounterMode(display=False) as counter:
        ctx = LoopContext(taps={"attention": lambda x, ctx: None})
        loss = model.loss(ids, ids, depth, ctx, stage)
        forward = counter.get_total_flops()
        loss.total.backward()
    return forward, counter.get_total_flops()


@pytest.mark.parametrize("method", METHODS)
def test_training_flops_are_what_torch_counts(method):
    """The read-outs that a loss asks for, and a backward pass that truncation cuts short. There the prelude learns only
    by what each step reads of the anchor; and where the loop begins from a constant, as Poisson's does in any case, the
    projection's own half spares the gradient of what it reads, 2 d^2, which closed forms leave in."""
    model = on_meta(method, "1+2x6+1", d_model=16, n_heads=2, context=64, vocab_size=23).train()
    drawn, anchors = method in ("poisson", "huginn"), method in ("grt", "ladder-inject", "poisson", "huginn")
    for depth in [Depth(1), Depth(4), Depth(6), *([Depth(6, 2), Depth(6, 6), Depth(2, 8)] if anchors else [])]:
        forward, whole = counted(model, depth, 64)
        spared = 2 * 16**2 * (drawn or depth == Depth(6, 2))
        assert forward == 64 * cost.training_forward_flops(model, depth.steps, 64), depth
        assert whole == 64 * (cost.training_flops(model, depth, 64) - spared), depth


def test_flops_of_a_second_stage_are_forward_alone():
    model = on_meta("ouro", "1+2x6+1", d_model=16, n_heads=2, context=64, vocab_size=23).train()
    for name, p in model.named_parameters():
        p.requires_grad_(name.startswith("rule.gate"))
    forward, whole = counted(model, Depth(6), 64, stage=2)
    assert forward == 64 * cost.training_flops(model, Depth(6), 64, stage=2)
    assert whole - forward == 5 * 64 * 2 * 16, "the gate's own gradient is next to nothing: lambda_1 has no label"


def test_depths_are_weighed_with_the_steps_that_learn():
    """By hand for strict tying: three passes, less two of the core's steps that are skipped."""
    model, sampler = on_meta("ladder", "1+2x3+1", d_model=16, n_heads=2, vocab_size=23), lognormal_poisson(2, 0.5, 9, 2)
    block = 24 * 16**2 + 4 * 64 * 16
    each = {r: 3 * ((2 + 2 * r) * block + 2 * 16 * 23) - 2 * 2 * max(r - 2, 0) * block for r in range(1, 10)}
    want = sum(p * each[r] for r, p in sampler.probabilities.items())
    got = cost.mean_over_depths(sampler, lambda depth: cost.training_flops(model, depth, 64))
    assert got == pytest.approx(want, rel=1e-12)


@pytest.mark.parametrize("reads_out", [False, True])
def test_flops_of_halting_by_hand(reads_out):
    """Where tokens take 1 and 3 steps: each its own, the head once, and coda and head after every earlier step."""
    model = on_meta("ladder", "1+2x3+1", d_model=16, n_heads=2, vocab_size=23)
    block, head = 24 * 16**2 + 4 * 64 * 16, 2 * 16 * 23
    want = 0.25 * (4 * block + head) + 0.75 * (8 * block + head + reads_out * 2 * (block + head))
    assert cost.halting_flops(model, {1: 0.25, 3: 0.75}, 64, reads_out) == pytest.approx(want, rel=1e-12)


@pytest.mark.parametrize(("itemsize", "kv_itemsize", "batch"), [(2, 0, 1), (2, 0, 5), (1, 2, 1), (1, 2, 5), (4, 4, 2)])
def test_bytes_read_for_a_token(itemsize, kv_itemsize, batch):
    """A matrix once for all rows, keys and values of each; GRT's anchor halves once, its other three at each step."""
    model = on_meta("grt", "1+2x3+1", d_model=16, n_heads=2, vocab_size=23)
    for k in (1, 3):
        weights = (2 + 2 * k) * 12 * 16**2 + (2 + 3 * k) * 16**2 + 23 * 16
        keys_and_values = batch * (2 + 2 * k) * 2 * 16 * 7
        want = itemsize * weights + (kv_itemsize or itemsize) * keys_and_values
        assert cost.decode_bytes(model, k, 7, batch, itemsize, kv_itemsize) == want


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
    assert round(cost.paper_flops(grt, 1024) / cost.paper_flops(gpt2, 1024), 3) == ratio


def test_kv_bytes():
    grt = paper_size("grt", "M", "2+5x4+2")
    shared = 4 * 1024 * (2 + 5 + 2)
    want = {"full": 4 * 1024 * 24, "first": shared, "last": shared, "mean": shared, "first:all": shared}
    assert cost.kv_bytes_per_token(grt) == want
    some = cost.kv_bytes_per_token(grt, ["mod:1", "mod:3", "mod:9"])  # as many steps as there are, at most
    assert some == {"mod:1": shared, "mod:3": 4 * 1024 * (2 + 5 * 3 + 2), "mod:9": want["full"]}
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
