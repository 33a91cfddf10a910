"""The paper's labelled equations and its listing, restated naively, against the model: states, logits, gradients.

Shapes: B batch, T tokens, d width, H heads, R steps.
"""

import math

import pytest
import torch
from torch.nn import functional as F

from grt.backbone.context import LoopContext
from grt.model.depth import Depth

R = 3
EXACT = {"rtol": 0, "atol": 1e-11}  # float64; states are of order 1


def layer_norm(P, name, x):
    variance = x.var(-1, unbiased=False, keepdim=True)
    return (x - x.mean(-1, keepdim=True)) / torch.sqrt(variance + 1e-5) * P[f"{name}.weight"] + P[f"{name}.bias"]


def linear(P, name, x):
    return x @ P[f"{name}.weight"].T + P[f"{name}.bias"]


def block(P, name, x, H):
    """GPT-2's block with its residuals inside; attention head by head and row by row."""
    q, k, v = linear(P, f"{name}.attn.qkv", layer_norm(P, f"{name}.ln1", x)).chunk(3, -1)
    heads = []
    for q_h, k_h, v_h in zip(q.chunk(H, -1), k.chunk(H, -1), v.chunk(H, -1), strict=True):
        rows = [
            ((q_h[:, t : t + 1] @ k_h[:, : t + 1].mT) / math.sqrt(q_h.shape[-1])).softmax(-1) @ v_h[:, : t + 1]
            for t in range(x.shape[1])
        ]
        heads.append(torch.cat(rows, 1))
    x = x + linear(P, f"{name}.attn.out", torch.cat(heads, -1))
    z = linear(P, f"{name}.mlp.up", layer_norm(P, f"{name}.ln2", x))
    gelu = 0.5 * z * (1 + torch.tanh(math.sqrt(2 / math.pi) * (z + 0.044715 * z**3)))
    return x + linear(P, f"{name}.mlp.down", gelu)


def eq_proj(P, h, h_pre, eps):
    return torch.cat([h + eps, h_pre], -1) @ P["rule.proj.weight"].T


def eq_block(P, h_tilde, n, H):
    for i in range(n):
        h_tilde = block(P, f"core.{i}", h_tilde, H)
    return h_tilde


def eq_gate(P, h, h_pre, tau, eps_g):
    z = torch.cat([layer_norm(P, "rule.ln_state", h), layer_norm(P, "rule.ln_anchor", h_pre)], -1)
    z = linear(P, "rule.gate.up", z)
    return 1 / (1 + torch.exp(-(linear(P, "rule.gate.down", z / (1 + torch.exp(-z))) / tau + eps_g)))


def eq_gate_update(g, h, o):
    return g * h + (1 - g) * o


def grt_forward(P, config, ids, r, eps, eps_g):
    """list:pseudocode, with the residuals inside the blocks and ln_f before the head: (states, proposals, gates,
    logits)."""
    H, layout = config.n_heads, config.blocks
    h = P["embed.tokens.weight"][ids] + P["embed.positions.weight"][: ids.shape[1]]
    for i in range(layout.p):
        h = block(P, f"prelude.{i}", h, H)
    h_pre = h
    states, proposals, gates = [h], [], []
    for step in range(r):
        h_tilde = eq_proj(P, h, h_pre, eps[step])
        o = eq_block(P, h_tilde, layout.n, H)
        g = eq_gate(P, h, h_pre, config.gate_temperature, eps_g[step])
        h = eq_gate_update(g, h, o)
        states, proposals, gates = [*states, h], [*proposals, o], [*gates, g]
    for i in range(layout.c):
        h = block(P, f"coda.{i}", h, H)
    return states, proposals, gates, layer_norm(P, "ln_f", h) @ P["embed.tokens.weight"].T


def parameters(model):
    return dict(model.named_parameters())


def noises(model, ids, seed=5):
    """Two tensors (R, B, T, d) to pass in instead of what the model would draw."""
    generator = torch.Generator().manual_seed(seed)
    shape = (R, *ids.shape, model.config.d_model)
    return (0.3 * torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(2))


def record(*names):
    """Taps that keep what passes, and the lists they fill."""
    kept = {name: [] for name in names}
    return {name: lambda x, ctx, name=name: kept[name].append(x.clone()) for name in names}, kept


@pytest.mark.parametrize("tau", [1.0, 0.4])
@pytest.mark.parametrize("noisy", [False, True], ids=["eval", "noise"])
def test_listing_at_every_depth(tiny, ids, tau, noisy):
    model = tiny(gate_temperature=tau).train(noisy)
    eps, eps_g = noises(model, ids) if noisy else (torch.zeros(R), torch.zeros(R))
    taps, kept = record("proposal", "gate")
    if noisy:
        taps["state_noise"] = lambda x, ctx: eps[ctx.step]
        taps["gate_noise"] = lambda x, ctx: eps_g[ctx.step]
    for k in range(R + 1):
        kept["proposal"].clear(), kept["gate"].clear()
        ctx = LoopContext(taps=taps)
        states = list(model.states(ids, ctx, Depth(k)))
        logits = model.logits(states[-1], ctx)
        want_states, want_o, want_g, want_logits = grt_forward(parameters(model), model.config, ids, k, eps, eps_g)
        assert len(states) == k + 1
        torch.testing.assert_close(torch.stack(states), torch.stack(want_states), **EXACT)
        torch.testing.assert_close(logits, want_logits, **EXACT)
        if k:
            torch.testing.assert_close(torch.stack(kept["proposal"]), torch.stack(want_o), **EXACT)
            torch.testing.assert_close(torch.stack(kept["gate"]), torch.stack(want_g), **EXACT)


def test_each_equation_alone(tiny, ids):
    """One step from a state that is not h_pre, hook by hook, so that a fault names its equation."""
    model = tiny()
    P, config = parameters(model), model.config
    ctx = LoopContext()
    h_pre, h = torch.randn(2, 2, 12, 16, dtype=torch.float64)
    assert model.rule.start(h_pre, ctx) is h_pre
    u = model.rule.read(h, h_pre, ctx)
    torch.testing.assert_close(u, eq_proj(P, h, h_pre, 0), **EXACT)
    o = model.rule.transform(u, model.core, ctx)
    torch.testing.assert_close(o, eq_block(P, u, 2, config.n_heads), **EXACT)
    g = eq_gate(P, h, h_pre, 1.0, 0)
    assert g.min() > 0.02 and g.max() < 0.9999 and g.std() > 1e-3, "the gate is too uniform to tell anything"
    torch.testing.assert_close(model.rule.write(h, o, h_pre, ctx), eq_gate_update(g, h, o), **EXACT)


def test_gradient_of_the_split_projections(tiny, ids):
    model = tiny().train()
    eps, eps_g = noises(model, ids)
    weights = torch.randn(2, 12, 23, dtype=torch.float64)
    taps = {"state_noise": lambda x, ctx: eps[ctx.step], "gate_noise": lambda x, ctx: eps_g[ctx.step]}
    P = parameters(model)
    ours = torch.autograd.grad((model(ids, ctx=LoopContext(taps=taps)) * weights).sum(), P.values())
    naive = torch.autograd.grad((grt_forward(P, model.config, ids, R, eps, eps_g)[3] * weights).sum(), P.values())
    for name, a, b in zip(P, ours, naive, strict=True):
        assert b.abs().max() > 0, name
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9, msg=lambda text, name=name: f"{name}: {text}")


def test_a_projection_that_is_no_plain_linear_is_called_as_it_is(tiny, ids):
    """As an adapter would be: on the state and the anchor side by side, in the equation's order."""
    model = tiny()
    want = grt_forward(parameters(model), model.config, ids, R, torch.zeros(R), torch.zeros(R))[3]
    model.rule.proj, called = torch.nn.Sequential(model.rule.proj), []
    model.rule.proj.register_forward_hook(lambda module, given, y: called.append(given[0].shape))
    torch.testing.assert_close(model(ids), want, **EXACT)
    assert called == [(2, 12, 32)] * R


def test_loss_is_mean_cross_entropy(tiny, ids):
    model = tiny()
    targets = ids.roll(-1, 1)
    logits = grt_forward(parameters(model), model.config, ids, 2, torch.zeros(R), torch.zeros(R))[3]
    want = -logits.log_softmax(-1).gather(-1, targets[..., None]).mean()
    loss = model.loss(ids, targets, Depth(2))
    assert loss.total.item() == pytest.approx(want.item(), abs=1e-5) == loss.lm.item()


def test_noise_is_drawn_afresh_at_every_step(tiny, ids):
    """And enters where the equations say, which the recorded draws show."""
    model = tiny().train()
    taps, kept = record("state_noise", "gate_noise")
    logits = model(ids, ctx=LoopContext(taps=taps))
    eps, eps_g = kept["state_noise"], kept["gate_noise"]
    assert len(eps) == len(eps_g) == R and all(x.shape == (2, 12, 16) for x in eps + eps_g)
    draws = torch.stack([x.flatten() for x in eps + eps_g])  # (2R, BTd)
    correlation = torch.corrcoef(draws) - torch.eye(2 * R)
    assert correlation.abs().max() < 0.25, "two draws are related"  # 384 numbers: 5 standard deviations
    torch.testing.assert_close(logits, grt_forward(parameters(model), model.config, ids, R, eps, eps_g)[3], **EXACT)


@pytest.mark.parametrize("scale", [1.0, 1000.0])
def test_sigma_is_absolute(tiny, ids, scale):
    model = tiny(d_model=64, state_noise=0.05, gate_noise=0.2).train()
    with torch.no_grad():
        model.embed.tokens.weight *= scale
    taps, kept = record("state_noise", "gate_noise")
    torch.manual_seed(5)
    model(ids, ctx=LoopContext(taps=taps))
    torch.manual_seed(5)
    for eps, eps_g in zip(kept["state_noise"], kept["gate_noise"], strict=True):
        assert torch.equal(eps, torch.empty(2, 12, 64, dtype=torch.float64).normal_(0, 0.05))
        assert torch.equal(eps_g, torch.empty(2, 12, 64, dtype=torch.float64).normal_(0, 0.2))


@pytest.mark.parametrize("which", ["state_noise", "gate_noise"])
def test_each_noise_acts_alone_and_only_in_training(tiny, ids, which):
    other = {"state_noise": "gate_noise", "gate_noise": "state_noise"}[which]
    model = tiny(**{which: 0.1, other: 0.0})
    quiet = model(ids)
    assert torch.equal(model(ids), quiet)
    assert not torch.equal(model.train()(ids), quiet)
    called = []
    model.eval()(ids, ctx=LoopContext(taps={which: lambda x, ctx: called.append(ctx.step)}))
    model.train()(ids, ctx=LoopContext(taps={other: lambda x, ctx: called.append(ctx.step)}))
    assert called == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("training", [False, True])
def test_gate_of_one_keeps_the_prelude(tiny, ids, dtype, training):
    model = tiny(dtype=dtype).train(training)
    ctx = LoopContext(taps={"gate": lambda g, ctx: torch.ones_like(g)})
    states = list(model.states(ids, ctx, Depth(R)))
    assert all(torch.equal(h, states[0]) for h in states)
    assert torch.equal(model.logits(states[-1], ctx), model(ids, Depth(0)))
    assert not torch.equal(model(ids, Depth(0)), model(ids)), "the gate makes no difference anyway"


def test_gate_of_zero_takes_the_proposal(tiny, ids):
    taps, kept = record("proposal")
    ctx = LoopContext(taps={**taps, "gate": lambda g, ctx: torch.zeros_like(g)})
    _, *states = tiny(dtype=torch.float32).states(ids, ctx, Depth(R))
    assert len(states) == R and all(torch.equal(h, o) for h, o in zip(states, kept["proposal"], strict=True))


@pytest.mark.parametrize("bias", [-2.0, 0.0, 4.0])
def test_gate_starts_at_its_bias(tiny, ids, bias):
    taps, kept = record("gate")
    tiny(spread=0, gate_bias=bias)(ids, ctx=LoopContext(taps=taps))
    assert torch.stack(kept["gate"]).mean().item() == pytest.approx(1 / (1 + math.exp(-bias)), abs=1e-4)


def test_ladder_is_the_core_repeated(tiny, ids):
    """Plain weight tying: the listing without projection, noise and gate."""
    model = tiny("ladder").train()
    P, H = parameters(model), model.config.n_heads
    h = block(P, "prelude.0", P["embed.tokens.weight"][ids] + P["embed.positions.weight"][:12], H)
    for k in range(R + 1):
        readout = layer_norm(P, "ln_f", block(P, "coda.0", h, H))
        torch.testing.assert_close(model(ids, Depth(k)), F.linear(readout, P["embed.tokens.weight"]), **EXACT)
        h = eq_block(P, h, 2, H)
