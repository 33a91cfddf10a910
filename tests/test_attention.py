"""The faster attention of bf16 training on a CPU against torch's kernel in float32."""

import math

import pytest
import torch
from torch.nn import functional as F

from grt.backbone import block
from grt.backbone.block import PRODUCTS_UP_TO, attend


def heads(T: int, dtype: torch.dtype, seed: int = 0) -> list[torch.Tensor]:
    """q, k, v as a block hands them over: transposed views of one tensor."""
    x = torch.randn(2, T, 3 * 3 * 16, generator=torch.Generator().manual_seed(seed)).to(dtype)
    return [z.view(2, T, 3, 16).transpose(1, 2).detach().requires_grad_() for z in x.split(48, dim=2)]


@pytest.fixture
def kernel(monkeypatch):
    """Counts the calls of torch's fused kernel."""
    calls, real = [], F.scaled_dot_product_attention
    monkeypatch.setattr(F, "scaled_dot_product_attention", lambda *a, **k: calls.append(1) or real(*a, **k))
    return calls


@pytest.mark.parametrize("T", [1, 2, 17, 64])
def test_products_give_the_kernels_values_and_gradients(kernel, T):
    ours = heads(T, torch.bfloat16)
    exact = [x.detach().double().requires_grad_() for x in ours]
    y = attend(*ours)
    assert y.dtype == torch.bfloat16 and not kernel
    want = F.scaled_dot_product_attention(*exact, is_causal=True)
    weights = torch.randn(want.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    (y.double() * weights).sum().backward()
    (want * weights).sum().backward()
    assert (y.double() - want).norm() < 0.006 * want.norm()  # bf16 rounds scores, probabilities and sums by .002 each
    for a, b in zip(ours, exact, strict=True):
        assert a.grad is not None and b.grad is not None
        off = (a.grad.double() - b.grad).norm()
        assert off < 0.01 * b.grad.norm() + 1e-6  # the same once more on the way back


@pytest.mark.parametrize("seen", [1, 9, 16])
def test_products_do_not_look_ahead(seen):
    q, k, v = heads(17, torch.bfloat16)
    y = attend(q, k, v)
    for changed in (k, v):
        changed.data[:, :, seen:] += 9.0
    z = attend(q, k, v)
    assert torch.equal(y[:, :, :seen], z[:, :, :seen]) and not torch.equal(y, z)


@pytest.mark.parametrize(
    ("T", "dtype", "training", "fused"),
    [
        (8, torch.bfloat16, True, False), (8, torch.bfloat16, False, True), (8, torch.float32, True, True),
        (PRODUCTS_UP_TO, torch.bfloat16, True, False), (PRODUCTS_UP_TO + 1, torch.bfloat16, True, True),
    ],
)  # fmt: skip
def test_only_short_bf16_training_leaves_the_kernel(kernel, T, dtype, training, fused):
    with torch.set_grad_enabled(training):
        attend(*heads(T, dtype))
    assert len(kernel) == fused


@torch.no_grad()
def test_decoding_in_bf16_without_amx_computes_in_float32(monkeypatch):
    """So that bf16 rounds what comes out, and nothing before it."""
    monkeypatch.setattr(block, "HAS_AMX", False)
    q, k, v = heads(17, torch.bfloat16)
    scores = (q.double() @ k.double().mT / 4).masked_fill(~torch.ones(17, 17, dtype=torch.bool).tril(), -math.inf)
    y = attend(q, k, v)
    assert y.dtype == torch.bfloat16
    want = scores.softmax(-1) @ v.double()
    torch.testing.assert_close(y.double(), want, rtol=2**-8, atol=1e-6)  # what bf16 rounds once, at the end


def test_a_bf16_loss_is_as_near_to_float32_as_with_the_kernel(tiny, monkeypatch):
    model = tiny(layout="1+2x3+1", dtype=torch.float32, d_model=32, context=64)
    ids, targets = torch.randint(23, (2, 4, 64), generator=torch.Generator().manual_seed(2))
    exact = model.loss(ids, targets, model.full_depth).total.item()
    off = {}
    for name, limit in (("products", 512), ("kernel", 0)):
        monkeypatch.setattr(block, "PRODUCTS_UP_TO", limit)
        with torch.autocast("cpu", torch.bfloat16):
            off[name] = abs(model.loss(ids, targets, model.full_depth).total.item() - exact)
    assert 0 < off["products"] < 0.02 and off["kernel"] < 0.02 and off["products"] != off["kernel"]
