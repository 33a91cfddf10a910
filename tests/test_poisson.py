"""Poisson and Huginn: the update restated naively, the random start, truncation, sizes and impossible fields.

Shapes: B batch, T tokens, d width, R steps.
"""

import copy
import math

import pytest
import torch
from test_equations import EXACT, block, layer_norm

from grt.backbone.context import LoopContext
from grt.config import Layout, ModelConfig
from grt.errors import ConfigError
from grt.methods import build_model, depth_sampler
from grt.model import cost
from grt.model.depth import Depth, lognormal_poisson
from grt.train.loop import slot_seed

both = pytest.mark.parametrize("method", ["poisson", "huginn"])
SIGMA = math.sqrt(2 / 5)


def sandwich(P, name, x, H):
    """GPT-2's block in two halves, the other half's output being zero, and a norm after each."""

    def without(part):
        return P | {
            f"{name}.{part}.{kind}": torch.zeros_like(P[f"{name}.{part}.{kind}"]) for kind in ("weight", "bias")
        }

    x = layer_norm(P, f"{name}.ln1_post", block(without("mlp.down"), name, x, H))
    return layer_norm(P, f"{name}.ln2_post", block(without("attn.out"), name, x, H))


def prelude(P, config, ids):
    x = P["embed.tokens.weight"][ids] + P["embed.positions.weight"][: ids.shape[1]]
    if config.method == "huginn":
        return sandwich(P, "prelude.0", x * math.sqrt(config.d_model), config.n_heads)
    return block(P, "prelude.0", x, config.n_heads)


def step(P, config, h, h_pre):
    e = (h_pre - h_pre.mean(-1, keepdim=True)) / torch.sqrt(h_pre.var(-1, unbiased=False, keepdim=True) + 1e-5)
    x = torch.cat([h, e], -1) @ P["rule.adapter.weight"].T
    for i in range(config.blocks.n):
        x = (sandwich if config.method == "huginn" else block)(P, f"core.{i}", x, config.n_heads)
    return x / torch.sqrt((x**2).mean(-1, keepdim=True) + 1e-6) * P["rule.norm.weight"]


def readout(P, config, h):
    h = (sandwich if config.method == "huginn" else block)(P, "coda.0", h, config.n_heads)
    return layer_norm(P, "ln_f", h) @ P["embed.tokens.weight"].T


@both
@pytest.mark.parametrize("training", [False, True])
def test_listing_at_every_depth(tiny, ids, method, training):
    model = tiny(method).train(training)
    P, config = dict(model.named_parameters()), model.config
    for k in range(6):
        ctx = LoopContext()
        states = list(model.states(ids, ctx, Depth(k)))
        h, h_pre = states[0], prelude(P, config, ids)
        for r in range(k + 1):
            torch.testing.assert_close(states[r], h, **EXACT)
            h = step(P, config, h, h_pre)
        torch.testing.assert_close(model.logits(states[-1], ctx), readout(P, config, states[-1]), **EXACT)


@both
@pytest.mark.parametrize("k", [1, 2, 4])
def test_truncated_gradients(tiny, ids, method, k):
    """Those of the last k of five steps, begun from a constant state, where h_pre is part of each of the k steps."""
    model = tiny(method).train()
    P, config = dict(model.named_parameters()), model.config
    weights, anchors = torch.randn(2, 12, 23, dtype=torch.float64), []
    ctx = LoopContext(taps={"anchor": lambda x, ctx: anchors.append(x)})
    states = list(model.states(ids, ctx, Depth(5, grad_steps=k)))
    ours = torch.autograd.grad(
        (model.logits(states[-1], ctx) * weights).sum(), [*P.values(), anchors[0]], materialize_grads=True
    )

    h_pre = prelude(P, config, ids)
    entries = [h_pre.clone() for _ in range(k)]  # the anchor as each of the last steps reads it
    h = torch.tensor(states[5 - k].tolist(), dtype=torch.float64)  # numbers only: no history
    for entry in entries:
        h = step(P, config, h, entry)
    total = (readout(P, config, h) * weights).sum()
    want = torch.autograd.grad(total, [*P.values(), *entries], materialize_grads=True)
    assert all(gradient.abs().max() > 1e-6 for gradient in want[len(P) :]), "a step ignores the anchor"
    for name, a, b in zip(P, ours[:-1], want[: len(P)], strict=True):
        assert b.any(), name
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-9, msg=lambda text, name=name: f"{name}: {text}")
    torch.testing.assert_close(ours[-1], sum(want[len(P) :]), rtol=1e-8, atol=1e-9)


def start_of(model, shape, seed=0, dtype=torch.float32):
    h_pre = torch.zeros(*shape, model.config.d_model, dtype=dtype)
    return model.to(dtype).rule.start(h_pre, LoopContext(seed=seed))


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("sigma", [SIGMA, 0.1])
def test_start_is_a_truncated_normal(tiny, training, sigma):
    fields = {} if sigma == SIGMA else {"start_std": sigma}
    model = tiny("poisson", d_model=128, context=512, dtype=torch.float32, **fields).train(training)
    torch.manual_seed(1)
    z = start_of(model, (1, 512)).double() / sigma
    assert 2.95 < z.abs().max() < 3 + 1e-6  # but for rounding
    inside = math.erf(3 / math.sqrt(2))
    for at in (-2.5, -2, -1, -0.3, 0, 0.5, 1.5, 2.8):  # its distribution function
        want = (math.erf(at / math.sqrt(2)) + inside) / (2 * inside)
        assert (z < at).double().mean().item() == pytest.approx(want, abs=0.008)  # 4 standard deviations, at most
    density = math.exp(-4.5) / math.sqrt(2 * math.pi)
    spread = math.sqrt(1 - 6 * density / inside)
    assert z.std().item() == pytest.approx(spread, rel=0.01)  # 65,536 numbers: 4 standard deviations
    assert abs(z.mean().item()) < 0.016  # 4 standard deviations, too
    pieces = z[0].reshape(8, -1)  # and positions are not related
    assert (torch.corrcoef(pieces) - torch.eye(8)).abs().max() < 0.05  # 8,192 numbers each: 4 standard deviations


@both
def test_start_outside_of_training(tiny, method):
    """A function of seed and position alone: not of the rows, the length, the pass, or what else is drawn."""
    model = tiny(method)
    whole = start_of(model, (3, 12))
    before = torch.get_rng_state()
    assert torch.equal(start_of(model, (3, 12)), whole) and torch.equal(torch.get_rng_state(), before)
    assert torch.equal(whole[0], whole[1]) and torch.equal(whole[0], whole[2])
    assert len({tuple(row) for row in whole[0].tolist()}) == 12, "two positions start alike"
    other = tiny(method, seed=4)
    for n in (1, 5, 12):  # on the other from short to long
        assert torch.equal(start_of(model, (2, n)), whole[:2, :n])
        assert torch.equal(start_of(other, (2, n)), whole[:2, :n])
    assert not (start_of(model, (3, 12), seed=1) == whole).any(), "the seed makes no difference"
    assert torch.equal(start_of(model, (3, 12), seed=0), whole)
    ctx = LoopContext(positions=torch.tensor([[0, 0, 1], [3, 4, 5]]))  # of a padded row, and of one further on
    at = model.rule.start(torch.zeros(2, 3, 16), ctx)
    assert torch.equal(at[0], whole[0, [0, 0, 1]]) and torch.equal(at[1], whole[0, 3:6])
    double = start_of(model, (3, 12), dtype=torch.float64)
    assert double.dtype == torch.float64 and torch.equal(double.float(), whole)
    assert torch.equal(start_of(copy.deepcopy(model), (3, 12)), whole)
    assert start_of(model, (3, 12), dtype=torch.bfloat16).dtype == torch.bfloat16
    assert {name for name in model.state_dict() if name.startswith("rule.")} == {
        "rule.adapter.weight", "rule.norm.weight",
    }  # fmt: skip


def test_start_in_training(tiny):
    model = tiny("poisson").train()
    starts = []
    for slot in (0, 1, 0):
        torch.manual_seed(slot_seed(1, 0, slot))
        starts.append(start_of(model, (2, 12)))
    assert torch.equal(starts[0], starts[2])
    assert not (starts[0] == starts[1]).any() and not (starts[0][0] == starts[0][1]).any()


def test_gradients_after_an_evaluation(tiny, ids):
    """The start that an evaluation leaves behind serves a pass with gradients."""
    model = tiny("poisson")
    with torch.inference_mode():
        logits = model(ids[:1])
    again = model(ids[:1])  # of several rows torch would make a copy
    again.sum().backward()
    assert torch.equal(again, logits) and model.rule.adapter.weight.grad.any()


@both
def test_bf16_keeps_the_state_in_fp32(tiny, ids, method):
    model, seen = tiny(method, dtype=torch.float32).train(), []
    taps = {name: lambda x, ctx: seen.append(x.dtype) for name in ("anchor", "input", "proposal", "state")}
    with torch.autocast("cpu", torch.bfloat16):
        model.loss(ids, ids.roll(-1, 1), Depth(3), LoopContext(taps=taps)).total.backward()
    assert len(seen) == 10 and set(seen) == {torch.float32}


@pytest.mark.parametrize(
    ("d", "n_heads", "layout", "millions"),
    [(768, 12, "1+1x10+1", 61.83), (1024, 16, "2+5x4+2", 167.98), (1280, 20, "1+5x6+5", 285.37)],
)
def test_parameters(d, n_heads, layout, millions):
    def total(method):
        with torch.device("meta"):
            model = build_model(ModelConfig(method=method, layout=layout, d_model=d, n_heads=n_heads))
        return cost.parameters(model)["total"]

    n_unique = Layout.parse(layout).n_unique
    closed_form = n_unique * (12 * d**2 + 13 * d) + 2 * d + (50257 + 1024) * d + 2 * d**2 + d
    assert total("poisson") == closed_form
    assert closed_form / 1e6 == pytest.approx(millions, abs=0.005)  # printed with two digits
    assert total("huginn") == closed_form + 4 * d * n_unique


def test_start_values():
    """Of what the conformance suite leaves to the method: A, n_c and the sandwich norms."""
    for method, std in (("poisson", 0.02), ("huginn", math.sqrt(2 / (5 * 128)))):
        torch.manual_seed(0)
        model = build_model(ModelConfig(method=method, layout="1+2x3+1", d_model=128, n_heads=4, vocab_size=99))
        assert model.rule.adapter.weight.std().item() == pytest.approx(std, rel=0.03)  # 32,768 numbers: 0.4 % each
        assert (model.rule.norm.weight == 1).all()
    for layer in model.core:  # Takase's 2L of L = 1 + 2 x 3 + 1 executions, not of the four blocks there are
        for linear in (layer.attn.out, layer.mlp.down):
            want = math.sqrt(1 / (5 * 128) / 8)
            assert linear.weight.std().item() == pytest.approx(want, rel=0.03)  # 16,384 numbers or more: 0.6 % each
    assert all((block.ln1_post.weight == 1).all() and (block.ln2_post.bias == 0).all() for block in model.core)


def test_depths_of_a_config():
    def config(layout="1+1x6+1", **fields):
        return ModelConfig(method="poisson", layout=layout, **fields)

    given = {"mean_depth": 9.0, "depth_sigma": 0.3, "depth_cap": 17, "grad_steps": 3}
    for ours, want in ((config(), (5, 0.5, 24, 8)), (config(**given), (9.0, 0.3, 17, 3))):
        sampler, expected = depth_sampler(ours), lognormal_poisson(*want)
        assert sampler.probabilities == expected.probabilities and sampler.grad_steps == want[-1]
        assert [sampler(1, i, 0) for i in range(50)] == [expected(1, i, 0) for i in range(50)]
    assert {depth_sampler(config("1+1x1+1"))(0, i, 0) for i in range(50)} == {Depth(1, 8)}
    assert {depth_sampler(config(), "fixed")(0, i, 0) for i in range(50)} == {Depth(6, 8)}


@both
@pytest.mark.parametrize(
    ("field", "value", "remedy"),
    [
        ("start_std", 0.0, "above 0"),
        ("start_std", -1.0, "above 0"),
        ("mean_depth", -0.5, "at least 0"),
        ("depth_sigma", -0.1, "at least 0"),
        ("depth_cap", -1, "at least 0"),
        ("grad_steps", 0, "at least 1"),
    ],
)
def test_impossible_fields(method, field, value, remedy):
    config = ModelConfig(method=method, layout="1+1x3+1", d_model=16, n_heads=2, vocab_size=23, **{field: value})
    for make in (build_model, depth_sampler):
        with pytest.raises(ConfigError, match=f"^model.{field} is {value}: it must be {remedy}.$"):
            make(config)
