"""What every method promises, and the dense model: one suite over grt.methods.METHODS. It is one contract, to be read
as a whole by whoever adds a method; so it stays one file.

Shapes: B batch, T tokens, d width, R steps, V vocabulary.
"""

import copy
import math

import pytest
import torch

from grt.backbone.context import LoopContext
from grt.config import ModelConfig
from grt.errors import ConfigError
from grt.methods import METHODS, build_model, depth_sampler
from grt.model.depth import Depth

CASES = [(method, "1+2x3+1") for method in METHODS] + [("ladder", "4L")]
every_method = pytest.mark.parametrize(("method", "layout"), CASES, ids=[*METHODS, "dense"])
recurrent = pytest.mark.parametrize("method", METHODS)
# Methods that compute active tokens only: how many are gathered may depend on later tokens, and with the sizes of the
# products their last bits (grt/methods/mor.py). A changed decision would exceed the bound.
GATHERING = {"mor", "mor-token"}


def states_of(model, ids, k, taps=None):
    return list(model.states(ids, LoopContext(taps=taps or {}), Depth(k)))


@every_method
def test_shapes_and_finite(tiny, ids, method, layout):
    model = tiny(method, layout)
    R = model.config.blocks.R
    states = states_of(model, ids, R)
    assert [h.shape for h in states] == [(2, 12, 16)] * (R + 1)
    logits = model(ids)
    assert logits.shape == (2, 12, 23) and logits.isfinite().all()
    assert len({tuple(h.flatten().tolist()) for h in states}) == R + 1, "a step does nothing"


@every_method
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_logits_never_depend_on_later_tokens(tiny, ids, method, layout, dtype):
    model = tiny(method, layout, dtype=dtype)
    logits = model(ids)
    for t in range(11):
        changed = ids.clone()
        changed[:, t + 1 :] = (changed[:, t + 1 :] + 1 + t) % 23
        other = model(changed)
        if method in GATHERING:
            bound = 1e-5 if dtype == torch.float32 else 1e-12
            torch.testing.assert_close(other[:, : t + 1], logits[:, : t + 1], rtol=0, atol=bound)  # by rounding alone
        else:
            assert torch.equal(other[:, : t + 1], logits[:, : t + 1]), t
        assert not torch.equal(other[:, t + 1 :], logits[:, t + 1 :])


@every_method
def test_logits_depend_on_every_earlier_token(tiny, ids, method, layout):
    model = tiny(method, layout)
    logits = model(ids)[:, -1]
    for t in range(12):
        changed = ids.clone()
        changed[:, t] = (changed[:, t] + 1) % 23
        assert not torch.equal(model(changed)[:, -1], logits), t


@every_method
def test_shorter_sequences(tiny, ids, method, layout):
    """Positions count from 0, so that a shorter sequence is a prefix; one beyond the context is refused."""
    model = tiny(method, layout)
    for n in (1, 5, 11):
        torch.testing.assert_close(model(ids[:, :n]), model(ids)[:, :n], rtol=0, atol=1e-12)
    with pytest.raises(ConfigError, match="the input has 13 tokens, model.context is 12"):
        model(torch.zeros(1, 13, dtype=torch.long))


@every_method
def test_equal_tokens_are_told_apart_by_their_positions(tiny, method, layout):
    logits = tiny(method, layout)(torch.full((1, 12), 5))[0]
    assert len({tuple(row) for row in logits.tolist()}) == 12


@every_method
def test_a_padded_row_is_the_row_alone(tiny, ids, method, layout):
    """Its positions count from its first token, and padding, which sees nothing, spoils nothing: not even where the
    probabilities are formed for a tap."""
    model, pad = tiny(method, layout), 5
    real = torch.arange(12) >= torch.tensor([[0], [pad]])
    for taps in ({}, {"attention": lambda x, ctx: None}):
        logits = model(ids, ctx=LoopContext(taps=taps, real=real))
        torch.testing.assert_close(logits[:1], model(ids[:1]), rtol=0, atol=1e-12)
        torch.testing.assert_close(logits[1:, pad:], model(ids[1:, pad:]), rtol=0, atol=1e-12)


@recurrent
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_depth_k_is_a_prefix_of_depth_R(tiny, ids, method, dtype):
    model = tiny(method, dtype=dtype)
    deepest, readouts = states_of(model, ids, 3), []
    for k in range(4):
        states = states_of(model, ids, k)
        assert len(states) == k + 1 and all(map(torch.equal, states, deepest))
        readouts.append(model(ids, Depth(k)))
        assert torch.equal(readouts[k], model.logits(deepest[k], LoopContext()))
        assert not any(torch.equal(readouts[k], shallower) for shallower in readouts[:k])
    assert torch.equal(readouts[3], model(ids))


@every_method
@pytest.mark.parametrize("training", [False, True])
def test_recording_changes_nothing(tiny, ids, method, layout, training):
    model = tiny(method, layout, dtype=torch.float32).train(training)
    seen = []
    names = ("anchor", "input", "proposal", "gate", "state", "state_noise", "gate_noise")
    taps = {name: lambda x, ctx, name=name: seen.append((name, ctx.step, x.clone())) for name in names}
    torch.manual_seed(3)
    plain = states_of(model, ids, model.config.blocks.R)
    torch.manual_seed(3)
    tapped = states_of(model, ids, model.config.blocks.R, taps)
    assert all(map(torch.equal, plain, tapped))
    assert [x[1] for x in seen if x[0] == "anchor"] == [-1]
    for tapped_once_a_step in ("input", "proposal", "state"):
        recorded = [(step, x) for name, step, x in seen if name == tapped_once_a_step]
        assert [step for step, _ in recorded] == list(range(model.config.blocks.R)), tapped_once_a_step
    assert all(torch.equal(x, h) for (_, x), h in zip(recorded, plain[1:], strict=True))


@recurrent
def test_a_tap_that_returns_a_tensor_intervenes(tiny, ids, method):
    model = tiny(method)
    taps = {"state": lambda x, ctx: torch.zeros_like(x) if ctx.step == 1 else None}
    states, plain = states_of(model, ids, 3, taps), states_of(model, ids, 3)
    assert torch.equal(states[1], plain[1]) and not states[2].any() and not torch.equal(states[3], plain[3])


@every_method
def test_attention_tap(tiny, ids, method, layout):
    """Probabilities over all tokens; in the core of a method that gathers active ones, over as many as it gathers."""
    model = tiny(method, layout)
    kept, alive = [], []
    taps = {
        "attention": lambda x, ctx: kept.append((ctx.section, ctx.step, ctx.block, x.clone())),
        "alive": lambda x, ctx: alive.append(int(x.sum(1).max())),
    }
    logits = model(ids, ctx=LoopContext(taps=taps))
    torch.testing.assert_close(logits, model(ids), rtol=0, atol=1e-12)
    single = model.float()
    torch.testing.assert_close(single(ids, ctx=LoopContext(taps=taps)), single(ids), rtol=1e-5, atol=1e-5)
    if layout == "4L":
        want = [("prelude", -1, i) for i in range(4)]
    else:
        want = [("prelude", -1, 0), *(("core", r, i) for r in range(3) for i in range(2)), ("coda", 2, 0)]
    assert [where[:3] for where in kept] == want * 2
    for section, step, _, probabilities in kept[: len(want)]:
        K = alive[step] if alive and section == "core" else 12
        assert probabilities.shape == (2, 2, K, K)
        torch.testing.assert_close(probabilities.sum(-1), torch.ones(2, 2, K).double(), rtol=0, atol=1e-12)
        assert not probabilities.triu(1).any() and (probabilities.tril() > 0).sum() == 2 * 2 * K * (K + 1) // 2


# Parameters that learn from the second step on, by the start of their names: the method's file says why.
LEARN_LATER = {"rrt": ("rule.A.",)}


@every_method
def test_every_parameter_learns(tiny, ids, method, layout):
    model = tiny(method, layout, dtype=torch.float32, spread=0).train()
    for still in (LEARN_LATER.get(method, ()), ()):
        model.zero_grad()
        model.loss(ids, ids.roll(-1, 1), model.full_depth).total.backward()
        for name, p in model.named_parameters():
            assert p.grad is not None and p.grad.isfinite().all(), name
            assert p.grad.any() != name.startswith(still), name
        with torch.no_grad():
            for p in model.parameters():
                p -= 0.01 * p.grad


def test_auxiliary_losses_are_added(tiny, ids):
    model = tiny("ladder")
    plain = model.loss(ids, ids.roll(-1, 1), Depth(2))
    more = model.loss(ids, ids.roll(-1, 1), Depth(2), LoopContext(aux=[torch.tensor(0.5), torch.tensor(0.25)]))
    assert plain.total == plain.lm == more.lm and more.total.item() == pytest.approx(plain.lm.item() + 0.75, rel=1e-6)


@recurrent
def test_every_block_learns_at_depth_one(tiny, ids, method):
    """A parameter that a shallow pass leaves unused would stop distributed data parallel training."""
    model = tiny(method, dtype=torch.float32, spread=0).train()
    model.loss(ids, ids.roll(-1, 1), Depth(1)).total.backward()
    assert all(p.grad is not None for p in model.parameters())


@recurrent
@pytest.mark.parametrize("k", [1, 2, 3])
def test_truncated_back_propagation(tiny, ids, method, k):
    """grad_steps=k learns as if the last k steps had begun from a constant state."""
    model = tiny(method)
    weights = torch.randn(2, 12, 16, dtype=torch.float64)

    def core_gradient(h):
        return torch.autograd.grad((h * weights).sum(), list(model.core.parameters()))

    truncated = list(model.states(ids, LoopContext(), Depth(3, grad_steps=k)))
    full = states_of(model, ids, 3)
    assert all(map(torch.equal, truncated, full)), "truncation changed the values"
    anchors = []
    ctx = LoopContext(taps={"anchor": lambda x, ctx: anchors.append(x)})
    h, h_pre = list(model.states(ids, ctx, Depth(3 - k)))[-1], anchors[0]  # and ctx.carry, as the rule left it
    if k < 3:
        h = torch.tensor(h.tolist(), dtype=torch.float64)  # numbers only: no history
    for ctx.step in range(3 - k, 3):
        h = model.rule.step(h, h_pre, model.core, ctx)
    want = core_gradient(h)
    torch.testing.assert_close(core_gradient(truncated[-1]), want, rtol=1e-10, atol=1e-12)
    if k < 3:
        whole = core_gradient(full[-1])
        assert all((a - b).norm() > 1e-3 * b.norm() for a, b in zip(whole, want, strict=True))


@recurrent
def test_a_shared_weight_is_every_steps(tiny, ids, method):
    """The core exists once: changing it changes what each step makes of one and the same state."""
    model = tiny(method)

    def steps_from_given_states():
        given = torch.randn(4, 2, 12, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
        taps = {"state": lambda h, ctx: made.append(h) or given[ctx.step]}
        made: list[torch.Tensor] = []
        states_of(model, ids, 3, taps)
        return made

    before = steps_from_given_states()
    with torch.no_grad():
        model.core[0].mlp.up.weight *= 1.5
    after = steps_from_given_states()
    assert len(after) == 3 and not any(map(torch.equal, before, after))


@every_method
def test_compiled_is_eager(tiny, ids, method, layout):
    torch._dynamo.reset()
    model = tiny(method, layout, dtype=torch.float32)
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(model, backend="aot_eager")(ids), model(ids), rtol=1e-5, atol=1e-6)


BLOCK = {
    "ln1.weight": ("d",), "ln1.bias": ("d",), "attn.qkv.weight": ("3d", "d"), "attn.qkv.bias": ("3d",),
    "attn.out.weight": ("d", "d"), "attn.out.bias": ("d",), "ln2.weight": ("d",), "ln2.bias": ("d",),
    "mlp.up.weight": ("4d", "d"), "mlp.up.bias": ("4d",), "mlp.down.weight": ("d", "4d"), "mlp.down.bias": ("d",),
}  # fmt: skip
OUTSIDE = {
    "embed.tokens.weight": ("V", "d"), "embed.positions.weight": ("T", "d"), "ln_f.weight": ("d",), "ln_f.bias": ("d",),
}  # fmt: skip
GRT_RULE = {
    "rule.proj.weight": ("d", "2d"), "rule.gate.up.weight": ("d", "2d"), "rule.gate.up.bias": ("d",),
    "rule.gate.down.weight": ("d", "d"), "rule.gate.down.bias": ("d",), "rule.ln_state.weight": ("d",),
    "rule.ln_state.bias": ("d",), "rule.ln_anchor.weight": ("d",), "rule.ln_anchor.bias": ("d",),
}  # fmt: skip
RRT_RULE = {f"rule.A.{name}": (3, 2, 8, width) for name, width in [
    ("attn_qkv", "d"), ("attn_out", "d"), ("mlp_up", "d"), ("mlp_down", "4d"),
]} | {f"rule.B.{name}": (3, 2, width, 8) for name, width in [
    ("attn_qkv", "3d"), ("attn_out", "d"), ("mlp_up", "4d"), ("mlp_down", "d"),
]}  # fmt: skip
CORE = ("prelude.0", "core.0", "core.1", "coda.0")
POISSON_RULE = {"rule.adapter.weight": ("d", "2d"), "rule.norm.weight": ("d",)}
SANDWICH = {
    f"{block}.{norm}_post.{name}": ("d",) for block in CORE for norm in ("ln1", "ln2") for name in ("weight", "bias")
}


@pytest.mark.parametrize(
    ("method", "layout", "blocks", "rule"),
    [
        ("grt", "1+2x3+1", CORE, GRT_RULE),
        ("ladder", "1+2x3+1", CORE, {}),
        ("poisson", "1+2x3+1", CORE, POISSON_RULE),
        ("huginn", "1+2x3+1", CORE, POISSON_RULE | SANDWICH),
        ("rrt", "1+2x3+1", CORE, RRT_RULE),
        ("ouro", "1+2x3+1", CORE, {"rule.gate.weight": ("1", "d"), "rule.gate.bias": ("1",)}),
        ("ladder", "3L", ("prelude.0", "prelude.1", "prelude.2"), {}),
        ("grt", "3L", ("prelude.0", "prelude.1", "prelude.2"), {}),
    ],
)
def test_state_dict(tiny, method, layout, blocks, rule):
    """Names and shapes are a file format: checkpoints, exports and other tools read them."""
    want = OUTSIDE | {f"{block}.{name}": shape for block in blocks for name, shape in BLOCK.items()} | rule
    sizes = {"1": 1, "d": 16, "2d": 32, "3d": 48, "4d": 64, "V": 23, "T": 12}
    got = {name: tuple(x.shape) for name, x in tiny(method, layout).state_dict().items()}
    assert got == {name: tuple(sizes.get(s, s) for s in shape) for name, shape in want.items()}


@every_method
def test_initialisation(method, layout):
    """N(0, 0.02), residual projections 0.02 / sqrt(2L) for L block executions, zero biases, norms at one.

    Huginn (its docstring says so) has Takase's standard deviations in place of the two.
    """
    torch.manual_seed(0)
    model = build_model(ModelConfig(method=method, layout=layout, d_model=128, n_heads=4, context=128, vocab_size=300))
    L = {"1+2x3+1": 8, "4L": 4}[layout]
    wide, narrow = 0.02, 0.02 / math.sqrt(2 * L)
    if method == "huginn":
        wide, narrow = math.sqrt(2 / (5 * 128)), math.sqrt(1 / (5 * 128 * L))
    for name, x in model.state_dict().items():
        if name.startswith("rule.") and method != "grt":
            continue  # a rule's own start values are its own test's matter
        if name == "rule.gate.down.bias":
            assert (x == 4).all()
        elif name.endswith("bias"):
            assert (x == 0).all(), name
        elif x.ndim == 1:
            assert (x == 1).all(), name
        else:
            std = narrow if name.endswith(("attn.out.weight", "mlp.down.weight")) else wide
            assert x.std().item() == pytest.approx(std, rel=0.03), name  # 16,384 numbers or more: 0.6 % each
            assert abs(x.mean().item()) < 0.04 * std, name  # of as many: 0.8 % each


@every_method
def test_seed_decides_the_weights(tiny, method, layout):
    a, b, c = (tiny(method, layout, spread=0, seed=seed).state_dict() for seed in (1, 1, 2))
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert not torch.equal(a["prelude.0.attn.qkv.weight"], c["prelude.0.attn.qkv.weight"])


@every_method
def test_meta_device_and_copies(tiny, ids, method, layout):
    with torch.device("meta"):
        meta = tiny(method, layout, dtype=torch.float32, spread=0)
    assert all(p.is_meta for p in meta.parameters())
    model = tiny(method, layout, dtype=torch.float32)
    meta.load_state_dict(model.state_dict(), assign=True)
    assert torch.equal(meta(ids), model(ids))
    twin = copy.deepcopy(model)
    before = twin(ids)
    assert torch.equal(before, model(ids))
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    assert torch.equal(twin(ids), before)


@recurrent
@pytest.mark.parametrize("layout", ["0+2x2+0", "0+1x3+1", "2+1x1+0"])
def test_layouts_without_prelude_or_coda(tiny, ids, method, layout):
    model = tiny(method, layout)
    anchors = []
    states = states_of(model, ids, model.config.blocks.R, {"anchor": lambda x, ctx: anchors.append(x)})
    if layout.startswith("0"):
        assert torch.equal(anchors[0], model.rule.embed(model.embed(ids)))
    if layout.endswith("+0"):
        want = torch.nn.functional.linear(model.ln_f(states[-1]), model.embed.tokens.weight)
        assert torch.equal(model(ids), want)
    loss = model.train().loss(ids, ids.roll(-1, 1), depth_sampler(model.config)(0, 0, 0))
    loss.total.backward()
    assert loss.total.isfinite()
