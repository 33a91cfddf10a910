"""Logits of models in bf16, when they decode: the largest in float32, so that which one it is is no accident."""

import pytest
import torch
from torch.nn import functional as F

from grt.backbone.context import LoopContext
from grt.backbone.head import FEW, largest_again, logits_for_decoding
from grt.cache.kv import KVCache
from grt.cpu import kernels
from grt.decode.decoder import Decoder
from grt.decode.quantize import keep_weights, kept


@pytest.fixture
def z_and_weight() -> tuple[torch.Tensor, torch.Tensor]:
    """A head whose last 4 rows give almost the same logit, the largest; the second of them gives most."""
    torch.manual_seed(0)
    z, weight = torch.randn(2, 3, 64), torch.randn(200, 64) / 8
    weight[-4:] = z[1, 2] / 4
    weight[-4:, 0] += torch.tensor([0.0, 0.03, 0.01, 0.02]) * z[1, 2, 0].sign()
    return z.bfloat16(), weight.bfloat16()


def exact(z: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return z.double() @ weight.double().T


def test_the_largest_are_exact_and_the_rest_as_they_were(z_and_weight) -> None:
    z, weight = z_and_weight
    rounded = F.linear(z, weight)
    assert len(set(rounded[1, 2, -4:].tolist())) < 4  # they do compete
    logits = logits_for_decoding(z, weight)
    assert logits.dtype == torch.float32
    largest = rounded.float().topk(FEW).indices
    torch.testing.assert_close(
        logits.gather(-1, largest).double(), exact(z, weight).gather(-1, largest), rtol=0, atol=1e-5
    )
    changed = logits != rounded.float()
    assert changed.sum(-1).max() <= FEW and changed.any()
    assert logits[1, 2].argmax() == exact(z, weight)[1, 2].argmax() == len(weight) - 3


def test_a_small_vocabulary(z_and_weight) -> None:
    z, weight = z_and_weight[0], z_and_weight[1][:3]
    torch.testing.assert_close(
        largest_again(F.linear(z, weight), z, weight).double(), exact(z, weight), rtol=0, atol=1e-5
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_is_precise_stays_as_it_is(z_and_weight, dtype: torch.dtype) -> None:
    z, weight = (x.to(dtype) for x in z_and_weight)
    assert torch.equal(logits_for_decoding(z, weight), F.linear(z, weight))


@pytest.mark.parametrize("fast", [True, False])
def test_kept_weights(z_and_weight, fast: bool) -> None:
    if fast and not kernels.load():
        pytest.skip("there is no C++ compiler for the kernels")
    z, weight = z_and_weight
    logits = logits_for_decoding(z, kept(weight.float(), "bf16", torch.bfloat16, fast))
    assert logits.dtype == torch.float32
    error = (logits.double() - exact(z, weight)).abs().max()
    assert error < (1e-5 if fast else 0.1)


@pytest.mark.parametrize("weights", [None, "bf16"])
def test_decoders_say_float32(tiny, weights) -> None:
    model = tiny("grt", dtype=torch.float32)
    model = model.bfloat16() if weights is None else keep_weights(model, weights, torch.bfloat16)
    decoder = Decoder(model, [[1, 2, 3]], 4)
    assert decoder.prefill().dtype == torch.float32
    for token in (4, 5):  # recorded, played
        assert decoder.step(torch.tensor([token])).dtype == torch.float32
    assert (decoder.tape is not None) == (weights is not None and kernels.load())


@torch.inference_mode()
def test_a_pass_with_a_cache_says_float32(tiny) -> None:
    """Of all its positions; one without, which may be of training, stays as it is."""
    model, ids = tiny("grt", dtype=torch.float32).bfloat16(), torch.tensor([[1, 2, 3]])
    assert model(ids, ctx=LoopContext(cache=KVCache(model, 1, 3))).dtype == torch.float32
    assert model(ids).dtype == torch.bfloat16


def test_under_autocast(z_and_weight) -> None:
    z, weight = z_and_weight
    with torch.autocast("cpu", torch.bfloat16):
        logits = logits_for_decoding(z, weight)
    assert logits[1, 2].argmax() == len(weight) - 3


def test_padding_is_not_among_the_largest(tiny) -> None:
    """Rows of padding give 0, which is more than logits that are negative."""
    models = [tiny("grt", dtype=torch.float32, vocab_multiple=multiple).bfloat16() for multiple in (1, 64)]
    models[1].load_state_dict(models[0].state_dict(), strict=False)
    z = torch.randn(1, 5, models[0].config.d_model, dtype=torch.bfloat16)
    with torch.inference_mode():
        for model in models:
            model.embed.tokens.weight[: model.config.vocab_size] += 1
            model.ln_f.bias.fill_(-5)
        plain, padded = (model.head(z, decoding=True) for model in models)
    assert models[1].config.n_padding > FEW and plain.max() < 0 and torch.equal(plain, padded)


def test_many_rows_of_kept_weights(z_and_weight) -> None:
    z, weight = torch.randn(3, 7, 64).bfloat16(), z_and_weight[1]
    for weights in ("bf16", "int8"):
        head = kept(weight.float(), weights, torch.bfloat16, kernels.load())
        expected = z.double() @ head.float().double().T
        largest = expected.topk(4).indices
        got = logits_for_decoding(z, head).double().gather(-1, largest)
        torch.testing.assert_close(got, expected.gather(-1, largest), rtol=1e-4, atol=1e-4)
