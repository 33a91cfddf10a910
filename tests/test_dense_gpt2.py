"""The dense layout is GPT-2: against one written here from raw tensor operations, and against transformers'."""

import math

import pytest
import torch

CLOSE = {"rtol": 1e-5, "atol": 1e-5}


@pytest.fixture
def dense(tiny):
    return tiny("ladder", "3L", dtype=torch.float32, d_model=32, n_heads=4)


def gpt2(P: dict[str, torch.Tensor], ids: torch.Tensor, n_layers: int, n_heads: int) -> torch.Tensor:
    """Logits (B, T, V) from a state dict (Radford et al. 2019; gelu_new, epsilon 1e-5, tied head)."""

    def norm(name, x):
        centred = x - x.mean(-1, keepdim=True)
        return (
            centred * (centred.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * P[name + ".weight"] + P[name + ".bias"]
        )

    def affine(name, x):
        return torch.einsum("btj,ij->bti", x, P[name + ".weight"]) + P[name + ".bias"]

    B, T = ids.shape
    x = P["embed.tokens.weight"][ids] + P["embed.positions.weight"][torch.arange(T)]
    for layer in range(n_layers):
        at = f"prelude.{layer}."
        q, k, v = affine(at + "attn.qkv", norm(at + "ln1", x)).split(x.shape[-1], -1)
        q, k, v = (z.reshape(B, T, n_heads, -1) for z in (q, k, v))
        scores = torch.einsum("bihc,bjhc->bhij", q, k) / math.sqrt(q.shape[-1])
        weights = scores.exp() * torch.ones(T, T).tril()
        weights = weights / weights.sum(-1, keepdim=True)
        x = x + affine(at + "attn.out", torch.einsum("bhij,bjhc->bihc", weights, v).reshape(B, T, -1))
        z = affine(at + "mlp.up", norm(at + "ln2", x))
        z = 0.5 * z * (1 + torch.tanh(math.sqrt(2 / math.pi) * (z + 0.044715 * z.pow(3))))
        x = x + affine(at + "mlp.down", z)
    return norm("ln_f", x) @ P["embed.tokens.weight"].T


def test_equals_a_gpt2_of_raw_tensor_operations(dense, ids):
    logits = dense(ids)
    assert logits.std() > 0.1
    torch.testing.assert_close(logits, gpt2(dense.state_dict(), ids, 3, 4), **CLOSE)


@pytest.mark.parametrize("tokens", [1, 7, 12])
def test_equals_transformers_gpt2(dense, ids, tokens):
    transformers = pytest.importorskip("transformers", reason="compares with transformers' GPT-2, an extra: hf or dev")
    config = transformers.GPT2Config(
        vocab_size=23, n_positions=12, n_embd=32, n_layer=3, n_head=4, activation_function="gelu_new",
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    theirs = transformers.GPT2LMHeadModel(config).eval()
    names = {
        "embed.tokens.": "wte.", "embed.positions.": "wpe.", "prelude.": "h.", "ln1.": "ln_1.", "ln2.": "ln_2.",
        "attn.qkv.": "attn.c_attn.", "attn.out.": "attn.c_proj.", "mlp.up.": "mlp.c_fc.", "mlp.down.": "mlp.c_proj.",
    }  # fmt: skip
    weights = {}
    for name, x in dense.state_dict().items():
        conv1d = name.startswith("prelude.") and x.ndim == 2  # transformers keeps these as (in, out)
        for ours, hf in names.items():
            name = name.replace(ours, hf)
        weights["transformer." + name] = x.T if conv1d else x
    told = theirs.load_state_dict(weights, strict=False)
    assert told.missing_keys == ["lm_head.weight"] and not told.unexpected_keys  # tied to wte
    with torch.no_grad():
        torch.testing.assert_close(dense(ids[:, :tokens]), theirs(ids[:, :tokens]).logits, **CLOSE)
