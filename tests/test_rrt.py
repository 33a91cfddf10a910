"""Relaxed recursion against its equation written out: a model whose steps have whole weights of their own.

Shapes: B batch, T tokens, d width, H heads, R steps, n core blocks.
"""

import itertools

import pytest
import torch
from test_equations import block, layer_norm

from grt.backbone.context import LoopContext
from grt.config import ModelConfig
from grt.device import autocast
from grt.errors import ConfigError
from grt.methods import METHODS, build_model, depth_sampler
from grt.methods.rrt import WIDTHS
from grt.model import cost
from grt.model.depth import Depth

R, n, d, H = 3, 2, 16, 2
EXACT = {"rtol": 0, "atol": 1e-11}  # float64; states are of order 1
SIZES = {"S": (768, 12), "M": (1024, 16), "L": (1280, 20)}


def relaxed(P, config, r):
    """The parameters with the weights of step r, W + s B A, in the place of the core's."""
    P = dict(P)
    for target in config.lora_targets.split(","):
        A, B = (P[f"rule.{factor}.{target.replace('.', '_')}"] for factor in "AB")
        for j in range(n):
            name = f"core.{j}.{target}.weight"
            P[name] = P[name] + config.lora_scale * B[r, j] @ A[r, j]
    return P


def naive_states(P, config, ids):
    """h_0, ..., h_R by the equation."""
    states = [block(P, "prelude.0", P["embed.tokens.weight"][ids] + P["embed.positions.weight"][: ids.shape[1]], H)]
    for r in range(R):
        h = states[-1]
        for j in range(n):
            h = block(relaxed(P, config, r), f"core.{j}", h, H)
        states.append(h)
    return states


def naive_logits(P, h):
    return layer_norm(P, "ln_f", block(P, "coda.0", h, H)) @ P["embed.tokens.weight"].T


def factors(model):
    return {name: p for name, p in model.named_parameters() if name.startswith("rule.")}


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"lora_rank": 1, "lora_scale": 0.3},
        {"lora_rank": 16},
        {"lora_targets": "mlp.down"},
        {"lora_targets": "mlp.up,attn.qkv", "lora_rank": 3},
        {"lora_targets": "attn.out"},
    ],
    ids=str,
)
def test_each_step_has_weights_of_its_own(tiny, ids, fields):
    model = tiny("rrt", **fields).train()
    P = dict(model.named_parameters())
    states, naive = list(model.states(ids, LoopContext(), Depth(R))), naive_states(P, model.config, ids)
    torch.testing.assert_close(torch.stack(states), torch.stack(naive), **EXACT)
    for k in range(R + 1):
        torch.testing.assert_close(model(ids, Depth(k)), naive_logits(P, naive[k]), **EXACT)
    weights = torch.randn(2, 12, 23, dtype=torch.float64)
    ours = torch.autograd.grad((model(ids) * weights).sum(), P.values())
    theirs = torch.autograd.grad((naive_logits(P, naive[-1]) * weights).sum(), P.values())
    for name, a, b in zip(P, ours, theirs, strict=True):
        assert b.abs().max() > 0, name
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("training", [False, True])
def test_without_deltas_it_is_plain_weight_tying(tiny, ids, dtype, training):
    """B = 0, as at the start of training: bit for bit the strict model of the same seed."""
    model = tiny("rrt", dtype=dtype).train(training)
    plain = tiny("ladder", dtype=dtype).train(training)
    plain.load_state_dict({name: x for name, x in model.state_dict().items() if not name.startswith("rule.")})
    assert not torch.equal(model(ids), plain(ids)), "the deltas make no difference anyway"
    with torch.no_grad():
        for B in model.rule.B.values():
            B.zero_()
    pairs = [m.states(ids, LoopContext(), Depth(R)) for m in (model, plain)]
    assert all(map(torch.equal, *pairs)) and torch.equal(model(ids), plain(ids))
    model.loss(ids, ids.roll(-1, 1), Depth(R)).total.backward()
    plain.loss(ids, ids.roll(-1, 1), Depth(R)).total.backward()
    for name, p in plain.named_parameters():
        torch.testing.assert_close(model.get_parameter(name).grad, p.grad, rtol=1e-4, atol=1e-6)


def test_it_begins_as_the_strict_model_of_its_seed(tiny, ids):
    model, plain = (tiny(method, spread=0, seed=3) for method in ("rrt", "ladder"))
    assert torch.equal(model(ids), plain(ids))
    assert all(torch.equal(x, model.state_dict()[name]) for name, x in plain.state_dict().items())


def test_start_values():
    """A is uniform within 1 / sqrt(d_in), each matrix by itself; B is zero."""
    torch.manual_seed(0)
    model = build_model(ModelConfig(method="rrt", layout="1+2x3+1", d_model=64, n_heads=4, context=8, vocab_size=23))
    for name, (d_in, d_out) in WIDTHS.items():
        A, B = (factor[name.replace(".", "_")] for factor in (model.rule.A, model.rule.B))
        assert A.shape == (3, 2, 8, 64 * d_in) and B.shape == (3, 2, 64 * d_out, 8)
        bound = (64 * d_in) ** -0.5
        assert 0.98 * bound < A.abs().max() <= bound  # of 3,072 numbers or more
        assert not B.any()
        for matrix in A.flatten(0, 1):  # 512 numbers or more
            assert matrix.std().item() == pytest.approx(bound / 3**0.5, rel=0.08)  # 4 standard deviations
        want = torch.empty(8, 64 * d_in)
        torch.nn.init.kaiming_uniform_(want, a=5**0.5)
        assert want.abs().max().item() == pytest.approx(bound, rel=0.02)  # the largest of 512 draws
    assert not torch.equal(A[0, 0], A[1, 0]) and not torch.equal(A[0, 0], A[0, 1])


@pytest.mark.parametrize("r", range(R))
def test_a_step_teaches_its_own_deltas_only(tiny, ids, r):
    """What step r alone adds, seen from a constant state: the other steps' factors get zeros."""
    model = tiny("rrt").train()
    taps = {"input": lambda x, ctx: x.detach() if ctx.step == r else None}
    h = list(itertools.islice(model.states(ids, LoopContext(taps=taps), Depth(R)), r + 2))[-1]
    (h * torch.randn_like(h)).sum().backward()
    for name, p in factors(model).items():
        for step in range(R):
            assert all(p.grad[step, j].any() == (step == r) for j in range(n)), (name, step)


def test_a_shallow_pass_leaves_no_parameter_out(tiny, ids):
    model = tiny("rrt", dtype=torch.float32).train()
    model.loss(ids, ids.roll(-1, 1), Depth(1)).total.backward()
    assert all(p.grad is not None for p in model.parameters())
    assert all(p.grad[0].any() and not p.grad[1:].any() for p in factors(model).values())


def test_deeper_steps_do_not_change_shallower_ones(tiny, ids):
    model = tiny("rrt")
    before = list(model.states(ids, LoopContext(), Depth(R)))
    with torch.no_grad():
        for p in factors(model).values():
            p[1] += 1
    after = list(model.states(ids, LoopContext(), Depth(R)))
    assert [torch.equal(a, b) for a, b in zip(before, after, strict=True)] == [True, True, False, False]


def test_prelude_and_coda_are_not_adapted(tiny, ids):
    """Nor anything after a core that failed."""
    model, ctx = tiny("rrt"), LoopContext()
    states = list(model.states(ids, ctx, Depth(R)))
    assert ctx.low_rank is None
    assert torch.equal(model.logits(states[-1], ctx), model.logits(states[-1], LoopContext()))

    def fail(*_):
        raise RuntimeError("the core fails")

    handle = model.core[1].register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="the core fails"):
        list(model.states(ids, ctx, Depth(R)))
    handle.remove()
    assert torch.equal(model.logits(states[-1], ctx), model(ids))


def test_under_autocast_the_state_keeps_its_precision(tiny, ids):
    model = tiny("rrt", dtype=torch.float32).train()
    seen = []
    transform = model.rule.transform

    def watch(u, core, ctx):
        o = transform(u, core, ctx)
        seen.append((u.dtype, o.dtype))
        return o

    model.rule.transform = watch
    with autocast(ids.device, torch.bfloat16):
        loss = model.loss(ids, ids.roll(-1, 1), Depth(R)).total
    assert seen == [(torch.float32, torch.float32)] * R
    with torch.no_grad():
        exact = model.loss(ids, ids.roll(-1, 1), Depth(R)).total.item()
    assert loss.item() != exact and loss.item() == pytest.approx(exact, rel=1e-3)  # a mean of logits of three digits
    loss.backward()
    assert all(p.grad.dtype == torch.float32 and p.grad.isfinite().all() for p in model.parameters())


def test_in_bf16_and_compiled(tiny, ids):
    """Both run, and count the parameters as before."""
    model = tiny("rrt", dtype=torch.float32)
    total, logits = cost.parameters(model), model(ids)
    compiled = torch.compile(model, backend="eager")
    assert cost.parameters(compiled) == total
    torch.testing.assert_close(compiled(ids), logits, rtol=0, atol=1e-5)
    halved = model.bfloat16()
    assert cost.parameters(halved) == total and {p.dtype for p in halved.parameters()} == {torch.bfloat16}
    assert halved(ids).dtype == torch.bfloat16
    assert (halved(ids).float() - logits).norm() < 0.02 * logits.norm()  # bf16 rounds by .002, in eight blocks


# millions as printed: strict tying, then RRT at ranks 4, 8, 16 and 64
TABLE = [
    ("S", "1+1x10+1", "60.65", "61.14 61.63 62.62 68.51"),
    ("M", "2+5x4+2", "165.88", "167.19 168.50 171.12 186.85"),
    ("L", "1+5x6+5", "282.09", "284.55 287.01 291.92 321.42"),
    ("S", "1+10x10+1", "124.44", "129.4 134.3 144.1 203.1"),
    ("M", "2+20x4+2", "354.82", "360.1 365.3 375.8 438.7"),
    ("L", "3+30x6+3", "774.03", "788.8 803.5 833.0 1010"),
]


@pytest.mark.parametrize(("size", "layout", "strict", "relaxed"), TABLE, ids=[row[1] for row in TABLE])
def test_parameters_at_the_papers_sizes(size, layout, strict, relaxed):
    width, heads = SIZES[size]

    def total(method, **fields):
        config = ModelConfig(method=method, layout=layout, d_model=width, n_heads=heads, **fields)
        with torch.device("meta"):
            return cost.parameters(build_model(config))["total"], config.blocks

    def printed(count, like):
        return f"{count / 1e6:.{len(like.partition('.')[2])}f}"

    base, blocks = total("ladder")
    assert printed(base, strict) == strict
    for rank, millions in zip((4, 8, 16, 64), relaxed.split(), strict=True):
        count = total("rrt", lora_rank=rank)[0]
        assert count - base == blocks.R * blocks.n * 16 * rank * width
        assert printed(count, millions) == millions
    qkv_only = total("rrt", lora_rank=8, lora_targets="attn.qkv")[0]
    assert qkv_only - base == 4 * blocks.R * blocks.n * 8 * width


@pytest.mark.parametrize(
    ("targets", "widths"), [("attn.qkv,attn.out,mlp.up,mlp.down", 16), ("attn.qkv", 4), ("mlp.down,attn.out", 7)]
)
def test_flops_of_the_deltas(tiny, targets, widths):
    """2 rank (d_in + d_out) for each token, chosen linear and block execution: 32 rank d for all four."""
    model, plain = tiny("rrt", lora_rank=5, lora_targets=targets), tiny("ladder")
    for k in range(R + 1):
        assert model.rule.flops(k, 12) - plain.rule.flops(k, 12) == 12 * k * n * 2 * 5 * widths * d


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"lora_rank": 0}, "model.lora_rank is 0: it must lie between 1 and model.d_model, 16."),
        ({"lora_rank": 17}, "model.lora_rank is 17: it must lie between 1 and model.d_model, 16."),
        ({"lora_scale": 0.0}, "model.lora_scale is 0.0: it must be above 0."),
        ({"lora_scale": -1.0}, "model.lora_scale is -1.0: it must be above 0."),
        ({"lora_scale": float("nan")}, "model.lora_scale is nan: it must be a finite number of single precision."),
        ({"lora_targets": ""}, "model.lora_targets has '': choose among attn.qkv, attn.out, mlp.up, mlp.down"),
        ({"lora_targets": "attn.qkv,"}, "model.lora_targets has '': choose among"),
        ({"lora_targets": "attn.qkv,q_proj"}, "model.lora_targets has 'q_proj': choose among"),
        ({"lora_targets": "mlp.up,attn.out,mlp.up"}, "'mlp.up,attn.out,mlp.up', which names a linear twice: name each"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_settings_that_cannot_work(tiny, fields, message):
    with pytest.raises(ConfigError) as error:
        tiny("rrt", **fields)
    assert message in str(error.value) and "\n" not in str(error.value)


def test_the_order_of_the_targets_is_no_setting(tiny, ids):
    a, b = (tiny("rrt", lora_targets=targets) for targets in ("mlp.up,attn.qkv", "attn.qkv,mlp.up"))
    assert torch.equal(a(ids), b(ids))


def test_depth_is_fixed_and_ends_at_R(tiny):
    model = tiny("rrt")
    assert depth_sampler(model.config).probabilities == {R: 1.0} and not METHODS["rrt"].rule.extrapolates
    with pytest.raises(ConfigError, match="depth 4 is beyond the 3 steps of rrt: choose at most 3."):
        model.check_depth(4, least=1)
