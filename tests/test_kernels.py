"""Our kernels against the naive product, on each instruction set; their compilation, and what happens without it."""

import functools
import os
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from grt.cpu import kernels
from grt.decode.quantize import kept

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
            assert ((got - want).abs() <= tolerance).all(), (n, k, rows)  # see `exact` for it
            rounded = ops.row_product(x.bfloat16(), values, scale, b)
            want, tolerance = exact(x.bfloat16(), values, scale, b)
            assert rounded.dtype == torch.bfloat16
            assert ((rounded - want).abs() <= want.abs() / 256 + tolerance).all()  # bf16 rounds by so much


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


@pytest.mark.parametrize("path", PATHS)
def test_each_path_is_the_naive_gate(ops, path):
    if path not in ops.paths().split():
        pytest.skip(f"this CPU has no {path}")
    torch.manual_seed(0)
    path, d = ops.paths().split().index(path), 210
    for rows, kind, tolerance in ((1, "fp32", 1e-4), (3, "fp32", 1e-4), (1, "int8", 1e-3)):
        x, anchor = torch.randn(1, rows, d), torch.randn(1, rows, d)
        norm, bias = (torch.randn(d), torch.randn(d), 1e-5), torch.randn(d)
        up, down = (as_kept(torch.randn(d, d) / d**0.5, kind) for _ in range(2))
        dense = [values * (1 if scale is None else scale[:, None]) for values, scale in (up, down)]
        torch.set_num_threads(2)
        try:
            y = ops.gate(x, *norm, *up, anchor, *down, bias, path=path)
        finally:
            torch.set_num_threads(1)
        inner = F.silu(F.linear(F.layer_norm(x, (d,), *norm), dense[0]) + anchor)
        assert torch.allclose(y, F.linear(inner, dense[1], bias), atol=tolerance)  # int8 meets x in 16 bits


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


def test_sources_are_package_data():
    assert all(source.parent == Path(kernels.__file__).parent and source.is_file() for source in kernels.SOURCES)
