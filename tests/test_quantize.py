"""Weights as inference keeps them: int8 against its bound, every method with each precision, without kernels too."""

import copy
import json
from functools import partial

import pytest
import torch
from tiny import ROOT

from grt import cli
from grt.bench import latency
from grt.config import ModelConfig
from grt.cpu import kernels
from grt.decode.decoder import Decoder
from grt.decode.quantize import Kept, keep_weights, kept
from grt.decode.sampling import Sampling
from grt.decode.stream import Stream, generate
from grt.errors import ConfigError
from grt.methods import METHODS
from grt.model import cost


def test_int8_is_within_half_a_step():
    W = torch.randn(40, 300) * torch.logspace(-6, 3, 40)[:, None]
    W[7] = 0
    matrix = kept(W, "int8", torch.float32, fast=False)
    assert matrix.values.dtype == torch.int8 and matrix.scale.shape == (40,)
    step = W.abs().amax(1, keepdim=True) / 127
    assert ((matrix.dense() - W).abs() <= step * 0.5001).all()  # half a step, but for rounding
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
        assert torch.allclose(model(ids[:1, :3]), slow(ids[:1, :3]), atol=5e-4)  # int8 meets x in 16 bits
        in_bf16 = keep_weights(tiny(dtype=torch.float32), "int8", torch.bfloat16)(ids)
    assert in_bf16.dtype == torch.bfloat16
    assert (in_bf16.float() - slow(ids)).norm() < 0.02 * slow(ids).norm()  # bf16 rounds by .002, in eight blocks


def test_compiled_decoding_without_a_compiler_is_one_clear_sentence(tiny, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(ConfigError, match="a C\\+\\+ compiler, .*'no-such-compiler'"):
        Decoder(tiny(dtype=torch.float32), [[1]], 2, compiled=True)


def test_weights_are_kept_from_a_model_of_fp32(tiny):
    with pytest.raises(ConfigError, match="load it in fp32"):
        keep_weights(tiny(dtype=torch.bfloat16), "int8", torch.bfloat16)
    with pytest.raises(ConfigError, match="dtype is torch.float64: kept weights compute in fp32 or bf16"):
        keep_weights(tiny(dtype=torch.float32), "int8", torch.float64)


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
    off = max(abs(a - b) for a, b in zip(losses["fp32"], losses["int8"], strict=True))
    assert 0 < off < 0.005  # twice of what eight bits cost this model


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
@pytest.mark.parametrize(("method", "rows"), [("dense", 2), ("grt", 2), ("rrt", 1)])
def test_compiled_text_is_the_same(tiny, method, rows):
    """Where no tape is played: several rows, or a pass with more in it."""
    of = {"layout": "3L"} if method == "dense" else {"method": method}
    texts = []
    for compiled in (False, True):
        model = keep_weights(tiny(dtype=torch.float32, **of), "int8", torch.float32)
        prompts = [[1, 2, 3], [4, 5, 6]][:rows]
        stream = Stream(model, prompts, max_new_tokens=6, compiled=compiled, sampling=Sampling(temperature=0))
        texts.append([[drawn.token for drawn in step if drawn is not None] for step in stream])
        assert stream.decoder.tape is None
    torch.compiler.reset()
    assert texts[0] == texts[1] and len(texts[0]) == 6
