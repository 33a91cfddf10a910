"""Weights as inference keeps them: our kernels against the naive product, int8 against its bound, every method with
each precision, and what happens without a compiler."""

import copy
import functools
import json
import os
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
import torch
from tiny import ROOT
from torch.nn import functional as F

from grt import cli
from grt.bench import latency
from grt.config import ConfigError, ModelConfig
from grt.infer import kernels
from grt.infer.decoder import Decoder
from grt.infer.generate import Stream, generate
from grt.infer.quantize import Kept, keep_weights, kept
from grt.infer.sampling import Sampling
from grt.methods import METHODS
from grt.model import cost

PATHS = ("avx512", "avx2", "portable")
SIZES = [(1, 1), (3, 5), (6, 15), (7, 63), (5, 64), (9, 65), (2, 200), (130, 129)]


@pytest.fixture(scope="module")
def ops():
    if not kernels.load():
        pytest.skip("no C++ compiler here")
    return torch.ops.grt


def as_kept(W: torch.Tensor, kind: str) -> tuple[torch.Tensor, torch.Tensor | None]:
    matrix = kept(W, kind, torch.float32, fast=True)
    return matrix.values, matrix.scale


def exact(x, values, scale, bias):
    """In float64; and what it may be off by, as a sum of fp32 products, or of int8 times x in 16 bits."""
    W = values.double() * (1 if scale is None else scale.double()[:, None])
    size = F.linear(x.double().abs(), W.abs(), None if bias is None else bias.double().abs())
    tolerance = 1e-6 * size + 1e-30
    if scale is not None:
        tolerance = tolerance + W.abs().sum(1) * x.double().abs().amax(-1, keepdim=True) / 32767 * 0.51
    return F.linear(x.double(), W, None if bias is None else bias.double()), tolerance


@pytest.mark.parametrize("kind", ["fp32", "bf16", "int8"])
@pytest.mark.parametrize("path", PATHS)
def test_each_path_is_the_naive_product(ops, path, kind):
    if path not in ops.paths().split():
        pytest.skip(f"this CPU has no {path}")
    torch.manual_seed(0)
    for n, k in SIZES:
        (values, scale), bias = as_kept(torch.randn(n, k), kind), torch.randn(n)
        for rows, b in ((1, bias), (3, None), (16, bias.bfloat16())):
            x = torch.randn(1, rows, k)
            want, tolerance = exact(x, values, scale, b)
            got = ops.row_product(x, values, scale, b, path=ops.paths().split().index(path))
            assert got.shape == (1, rows, n) and got.dtype == torch.float32
            assert ((got - want).abs() <= tolerance).all(), (n, k, rows)
            rounded = ops.row_product(x.bfloat16(), values, scale, b)
            want, tolerance = exact(x.bfloat16(), values, scale, b)
            assert rounded.dtype == torch.bfloat16
            assert ((rounded - want).abs() <= want.abs() / 256 + tolerance).all(), (n, k, rows)


@pytest.mark.parametrize("path", PATHS)
def test_integers_do_not_overflow(ops, path):
    if path not in ops.paths().split():
        pytest.skip(f"this CPU has no {path}")
    values, path = torch.full((1, 30_000), 127, dtype=torch.int8), ops.paths().split().index(path)
    y = ops.row_product(torch.full((1, 30_000), 3.0), values, torch.ones(1), None, path=path)
    assert y.item() == pytest.approx(3 * 127 * 30_000, rel=1e-6)


def test_halves_of_a_matrix_and_numbers_that_are_none(ops):
    W = torch.randn(6, 140)
    left, right = W.split(70, dim=1)
    x = torch.randn(2, 70)
    for half in (left, right):
        assert torch.allclose(ops.row_product(x, half, None, None), F.linear(x, half), atol=1e-5)
    x[1, 3] = torch.nan
    for dtype in (torch.float32, torch.bfloat16):
        assert ops.row_product(x.to(dtype), left, None, None).isnan().all(1).tolist() == [False, True]
    x[1, 3] = torch.inf
    assert not ops.row_product(x.bfloat16(), left, None, None)[1].isfinite().any()


@pytest.mark.parametrize("k", [1, 63, 1000, 5000])
def test_int8_is_the_same_to_the_bit(ops, k):
    """Whatever the path, the number of threads and the rows beside it."""
    (values, scale), x, bias = as_kept(torch.randn(403, k), "int8"), torch.randn(3, k), torch.randn(403)
    want = ops.row_product(x, values, scale, bias)
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        try:
            for path in range(len(ops.paths().split())):
                assert torch.equal(ops.row_product(x, values, scale, bias, path=path), want)
                assert torch.equal(ops.row_product(x[1:2], values, scale, bias, path=path), want[1:2])
        finally:
            torch.set_num_threads(1)


@pytest.mark.parametrize("path", PATHS)
def test_each_path_is_the_naive_block(ops, path):
    """Two calls with what they are given, by two threads, against torch; keys and values at other distances."""
    if path not in ops.paths().split():
        pytest.skip(f"this CPU has no {path}")
    torch.manual_seed(0)
    path = ops.paths().split().index(path)
    B, H, c, T = 2, 3, 70, 37
    d = H * c
    W = [torch.randn(n, k) / k**0.5 for n, k in ((3 * d, d), (d, d), (4 * d, d), (d, 4 * d))]
    qkv, out, up, down = ((w, None, torch.randn(w.shape[0])) for w in W)
    norm, x, kv = (torch.randn(d), torch.randn(d), 1e-5), torch.randn(B, 1, d), torch.randn(2, B, H, T + 5, c)
    keys, values = kv[:, :, :, :T]
    visible = torch.rand(B, T) < 0.7
    visible[:, 0] = True
    torch.set_num_threads(2)
    try:
        y = ops.row_product(x, *qkv, *norm, path=path)
        z = ops.rest_of_block(x, y, keys, values, visible, *out, *norm, *up, *down, path=path)
    finally:
        torch.set_num_threads(1)
    near = partial(torch.allclose, atol=1e-4)
    assert near(y, F.linear(F.layer_norm(x, (d,), *norm), W[0], qkv[2]))
    q = y[..., :d].view(B, 1, H, c).transpose(1, 2)
    mixed = F.scaled_dot_product_attention(q, keys, values, attn_mask=visible[:, None, None])
    h = x + F.linear(mixed.transpose(1, 2).reshape(B, 1, d), W[1], out[2])
    wide = F.gelu(F.linear(F.layer_norm(h, (d,), *norm), W[2], up[2]), approximate="tanh")
    assert near(z, h + F.linear(wide, W[3], down[2]))


def test_int8_is_within_half_a_step():
    W = torch.randn(40, 300) * torch.logspace(-6, 3, 40)[:, None]
    W[7] = 0
    matrix = kept(W, "int8", torch.float32, fast=False)
    assert matrix.values.dtype == torch.int8 and matrix.scale.shape == (40,)
    step = W.abs().amax(1, keepdim=True) / 127
    assert ((matrix.dense() - W).abs() <= step * 0.5001).all()
    assert matrix.values.abs().amax(1).tolist() == [127] * 7 + [0] + [127] * 32  # all of the range is used
    assert torch.equal(kept(W, "bf16", torch.float32, fast=False).dense(), W.bfloat16().float())


def matrices(model) -> list[tuple[str, str, Kept]]:
    return [(m, name, x) for m, module in model.named_modules() for name, x in vars(module).items() if type(x) is Kept]


def replaced(plain, model):
    """A plain model whose parameters have the values that the kept ones stand for."""
    plain = copy.deepcopy(plain)
    for module, name, matrix in matrices(model):
        getattr(plain.get_submodule(module), name).data = matrix.dense()
    return plain


@pytest.mark.parametrize("weights", ["bf16", "int8"])
@pytest.mark.parametrize("method", ["dense", *METHODS])
def test_every_method_computes_with_what_is_kept(tiny, ids, method, weights):
    """Side by side and token by token, and so does its text; only positions are left of the matrices."""
    of = {"layout": "3L"} if method == "dense" else {"method": method}
    plain = tiny(dtype=torch.float32, **of)
    model = keep_weights(copy.deepcopy(plain), weights, torch.float32)
    assert [name for name, p in model.named_parameters() if p.ndim > 1] == ["embed.positions.weight"]
    assert len(matrices(model)) == sum(p.ndim > 1 for p in plain.parameters()) - 1  # each once, a core's too
    stood_for = replaced(plain, model)
    near = partial(torch.allclose, atol={"bf16": 1e-5, "int8": 5e-4}[weights])  # int8 meets x in 16 bits
    with torch.inference_mode():
        assert near(model(ids), stood_for(ids))
        assert not torch.equal(model(ids), plain(ids))
        for kv in ("full", "first"):
            ours, theirs = (Decoder(m, [ids[0, :5].tolist()], 4, kv=kv) for m in (model, stood_for))
            assert near(ours.prefill(), theirs.prefill())
            for token in ids[0, 5:9]:
                assert near(ours.step(token[None]), theirs.step(token[None]))
    assert len(list(generate(model, [1, 2, 3], max_new_tokens=5, seed=3))) == 5


def test_torch_stands_in_for_the_kernels(tiny, ids, monkeypatch):
    model = keep_weights(tiny(dtype=torch.float32), "int8", torch.float32)
    monkeypatch.setattr(kernels, "load", lambda: False)
    slow = keep_weights(tiny(dtype=torch.float32), "int8", torch.float32)
    with torch.inference_mode():
        assert torch.allclose(model(ids[:1, :3]), slow(ids[:1, :3]), atol=5e-4)
        in_bf16 = keep_weights(tiny(dtype=torch.float32), "int8", torch.bfloat16)(ids)
    assert in_bf16.dtype == torch.bfloat16 and torch.allclose(in_bf16.float(), slow(ids), atol=0.3)


@pytest.mark.parametrize("compiler", ["no-such-compiler", "false"])
def test_without_a_compiler_one_line_says_so(monkeypatch, tmp_path, capsys, compiler):
    monkeypatch.setenv("CXX", compiler)
    monkeypatch.setenv("GRT_CACHE", str(tmp_path))
    monkeypatch.setattr(kernels, "load", functools.cache(kernels.load.__wrapped__))
    assert not kernels.load() and not kernels.load()
    assert kernels.best() is None
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("warning: no kernels for single rows (") and compiler in line
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_compiled_decoding_without_a_compiler_is_one_clear_sentence(tiny, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(ConfigError, match="a C\\+\\+ compiler, .*'no-such-compiler'"):
        Decoder(tiny(dtype=torch.float32), [[1]], 2, compiled=True)


def test_kernels_refuse_what_they_cannot_read(ops):
    x, W, scale = torch.ones(1, 4), torch.ones(4, 4, dtype=torch.int8), torch.ones(4)
    assert ops.row_product(x, W, scale, scale).tolist() == [[5.0] * 4]
    for weight, its_scale, bias, message in (
        (W, scale.bfloat16(), None, "a scale must be fp32"),
        (W, scale[:1], None, "one for each output"),
        (W, scale, scale[:1], "a bias must be one number for each output"),
        (W.half(), None, None, "weights must be fp32, bf16 or int8"),
        (W.int(), None, None, "weights must be fp32, bf16 or int8"),
    ):
        with pytest.raises(RuntimeError, match=message):
            ops.row_product(x, weight, its_scale, bias)


def test_weights_are_kept_from_a_model_of_fp32(tiny):
    with pytest.raises(ConfigError, match="load it in fp32"):
        keep_weights(tiny(dtype=torch.bfloat16), "int8", torch.bfloat16)
    with pytest.raises(ConfigError, match="dtype is torch.float64: kept weights compute in fp32 or bf16"):
        keep_weights(tiny(dtype=torch.float32), "int8", torch.float64)


def test_several_may_compile_at_once(monkeypatch, tmp_path):
    """A library has its name only when it is whole, and is made once for those who come later."""
    compiler, calls = tmp_path / "c++", tmp_path / "calls"
    compiler.write_text(
        '#!/bin/sh\nwhile [ "$1" != -o ]; do shift; done\nprintf "half" > "$2"\nsleep 0.3\n'
        f'printf " and half" >> "$2"\necho >> {calls}\n'
    )
    monkeypatch.setenv("CXX", f"sh {compiler}")  # of several words, as "ccache g++"
    monkeypatch.setenv("GRT_CACHE", str(tmp_path / "cache"))
    with ThreadPoolExecutor(3) as pool:
        [library] = set(pool.map(lambda _: kernels.compiled(), range(3)))
    assert library.read_text() == "half and half" and os.listdir(library.parent) == [library.name]
    assert kernels.compiled() == library and len(calls.read_text()) == 3
    library.write_text("half")  # a damaged one is made anew
    assert kernels.compiled().read_text() == "half and half" and len(calls.read_text()) == 4


def test_the_command_line_keeps_weights(monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(ROOT)
    nano = "models/grt-nano"
    texts, losses = {}, {}
    words = tmp_path / "words.txt"
    words.write_text("def main(argv):\n    return len(argv)\n" * 40, encoding="utf-8")
    monkeypatch.setenv("GRT_CACHE", str(tmp_path / "cache"))
    for weights in ("fp32", "bf16", "int8"):
        options = ["--weights", weights, "--device", "cpu", "--json"]
        assert cli.main(["generate", nano, "--prompt", "def ", "--max-new-tokens", "8", "--seed", "1", *options]) == 0
        texts[weights] = json.loads(capsys.readouterr().out)
        asked = ["--data", str(words), "--windows", "2", "--depth", "1", "6", "--kv", "mean"]
        assert cli.main(["eval", nano, *asked, *options]) == 0
        report = json.loads(capsys.readouterr().out)
        assert report["weights"] == weights
        losses[weights] = [*report["loss_by_depth"].values(), report["sharing"]["mean"]["loss"]]
    assert all(len(text["tokens"]) == 8 for text in texts.values())
    assert losses["bf16"] == pytest.approx(losses["fp32"], abs=1e-6)  # this model's weights are of bf16 anyway
    assert 0 < max(abs(a - b) for a, b in zip(losses["fp32"], losses["int8"], strict=True)) < 0.05


def test_the_bench_counts_what_is_read(monkeypatch):
    shape = {"d_model": 16, "n_heads": 2, "context": 12, "vocab_size": 23}
    pair = ModelConfig(method="grt", layout="1+2x3+1", **shape), ModelConfig(layout="8L", **shape)
    monkeypatch.setattr(latency, "pair_of", lambda size: pair)
    monkeypatch.setattr(latency, "READ", 1 << 16)
    report = latency.bench_latency(
        ["small"], ["cached"], [1], prompt=6, new=4, dtype="bf16", weights="int8", compiled=False, alternations=1,
        peers=["dense"], device="cpu",
    )  # fmt: skip
    assert (report["dtype"], report["weights"], report["kernels"]) == ("bf16", "int8", kernels.best())
    d, V = 16, 23
    assert report["rows"][1]["bytes_per_token"] == 8 * 12 * d**2 + V * d + 2 * 8 * 2 * d * 8


def test_keys_and_values_may_be_of_another_size(tiny):
    model = tiny(layout="8L")
    weights, both = (cost.decode_bytes(model, 0, tokens, 2, 1, 2) for tokens in (0, 5))
    assert both - weights == 2 * 2 * 8 * 2 * 16 * 5


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("method", ["dense", "grt", "rrt"])
def test_compiled_text_is_the_same(tiny, method):
    of = {"layout": "3L"} if method == "dense" else {"method": method}
    texts = []
    for compiled in (False, True):
        model = keep_weights(tiny(dtype=torch.float32, **of), "int8", torch.float32)
        stream = Stream(model, [[1, 2, 3]], max_new_tokens=6, compiled=compiled, sampling=Sampling(temperature=0))
        texts.append([drawn.token for (drawn,) in stream if drawn is not None])
    torch.compiler.reset()
    assert texts[0] == texts[1] and len(texts[0]) == 6


def test_sources_are_package_data():
    assert all(source.parent == Path(kernels.__file__).parent and source.is_file() for source in kernels.SOURCES)
