"""Configs of Mixture-of-Recursions that cannot work; its parameters, FLOPs and slots."""

import pytest
import torch
from routes import SIZES, R, T
from torch.utils.flop_counter import FlopCounterMode

from grt.backbone.context import LoopContext
from grt.config import ModelConfig
from grt.errors import ConfigError
from grt.methods import build_model
from grt.model import cost
from grt.model.depth import Depth


@pytest.mark.parametrize("text", ["1,0.5", "1,1,1,1", "1,0.5,0.6", "1.1,0.5,0.1", "1,0.5,0", "1,0.5,-0.1", "1,half,0.1",
                                  "1,0.5,", "nan,nan,nan", "1,0.5,1e-999", ","])  # fmt: skip
def test_wrong_capacities_are_named(tiny, text):
    with pytest.raises(ConfigError) as error:
        tiny(method="mor", capacities=text)
    assert str(error.value).startswith(f"model.capacities is {text!r}: give 3 numbers") and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"router": "wide"}, "model.router is 'wide': choose linear or mlp"),
        ({"eval_routing": "best"}, "model.eval_routing is 'best': choose threshold or topk"),
        ({"router_scale": 0.0}, "model.router_scale is 0.0: it must be above 0"),
        ({"router_loss": -1.0}, "model.router_loss is -1.0: it must be at least 0"),
        ({"router_z_loss": -0.1}, "model.router_z_loss is -0.1: it must be at least 0"),
    ],
)
def test_wrong_fields_are_named(tiny, fields, message):
    with pytest.raises(ConfigError, match=message):
        tiny(method="mor", **fields)


@pytest.mark.parametrize("method", ["mor", "mor-token"])
def test_deeper_than_trained_is_refused(tiny, method):
    with pytest.raises(ConfigError, match=f"depth 4 is beyond the 3 steps of {method}: choose at most 3"):
        tiny(method).check_depth(4, least=1)


def on_meta(method, size, layout=None, **fields):
    d, n_heads, isoflop = SIZES[size]
    with torch.device("meta"):
        return build_model(ModelConfig(method=method, layout=layout or isoflop, d_model=d, n_heads=n_heads, **fields))


@pytest.mark.parametrize(
    ("size", "layout", "linear", "mlp"),
    [
        ("S", "1+1x10+1", 60.66, 72.46), ("M", "2+5x4+2", 165.88, 174.28), ("L", "1+5x6+5", 282.10, 301.77),
        ("S", "1+10x10+1", 124.45, 136.25), ("M", "2+20x4+2", 354.83, 363.22), ("L", "3+30x6+3", 774.04, 793.71),
    ],
)  # fmt: skip
def test_parameters(size, layout, linear, mlp):
    d, steps = SIZES[size][0], int(layout.split("x")[1].split("+")[0])
    strict = cost.parameters(on_meta("ladder", size, layout))["total"]
    for router, millions, one in (("linear", linear, d), ("mlp", mlp, 2 * d * d + 2 * d)):
        total = cost.parameters(on_meta("mor", size, layout, router=router))["total"]
        assert total == strict + steps * one
        assert total / 1e6 == pytest.approx(millions, abs=0.0051)  # printed with two digits
    token = cost.parameters(on_meta("mor-token", size, layout))["total"]
    assert token == strict + steps * d
    token = cost.parameters(on_meta("mor-token", size, layout, router="mlp"))["total"]
    assert token == strict + 2 * d * d + 2 * d * steps


@pytest.mark.parametrize(("size", "ratio"), [("S", 0.60), ("M", 0.67), ("L", 0.64)])
def test_flops_against_the_layout_without_routing(size, ratio):
    plain, routed, token = (on_meta(method, size) for method in ("ladder", "mor", "mor-token"))
    steps = plain.config.blocks.R
    executed = [cost.executed_flops(model, steps, 1024) for model in (plain, routed, token)]
    assert [round(flops / executed[0], 2) for flops in executed[1:]] == [ratio, ratio]


@pytest.mark.parametrize("method", ["mor", "mor-token"])
@pytest.mark.parametrize("fields", [{"router": "mlp"}, {"capacities": "1,0.67,0.33"}, {"eval_routing": "topk"}])
def test_counted_flops(method, fields):
    config = ModelConfig(method=method, layout="1+2x3+1", d_model=16, n_heads=2, context=64, vocab_size=23, **fields)
    with torch.device("meta"):
        model = build_model(config)
    for training in (True, False):
        for k in range(R + 1):
            with FlopCounterMode(display=False) as counter:
                model.train(training)(torch.zeros(1, 50, dtype=torch.long, device="meta"), Depth(k))
            want = 50 * (cost.executed_flops(model, k, 50) + cost.head_flops(config))
            assert counter.get_total_flops() == pytest.approx(want, rel=1e-12)


@torch.no_grad()
def test_flops_are_those_of_a_real_pass(routed, ids):
    """Top-k gathers what the closed form says. The tap is there since torch does not count a CPU's fused attention."""
    model = routed(eval_routing="topk", dtype=torch.float32)
    with FlopCounterMode(display=False) as counter:
        model(ids, ctx=LoopContext(taps={"attention": lambda p, ctx: None}))
    want = 24 * (cost.executed_flops(model, R, T) + cost.head_flops(model.config))
    assert counter.get_total_flops() == pytest.approx(want, rel=1e-12)


@pytest.mark.parametrize("method", ["mor", "mor-token"])
def test_kv_slots(method):
    model = on_meta(method, "M")
    assert model.rule.kv_slots() == {"full": 2 + 2 + 5 * 4 * 5 / 8, "first": 9}
    assert cost.kv_bytes_per_token(model) == {"full": 4 * 1024 * 33 // 2, "first": 4 * 1024 * 9}
    assert on_meta("mor", "M", capacities="1,0.5,0.25,0.25").rule.kv_slots()["full"] == 14
