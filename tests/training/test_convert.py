"""From a dense model to a recurrent one: what is tied, what the deltas take up, and what is refused.

Shapes: d width, R steps, n core blocks.
"""

import json

import numpy as np
import pytest
import torch
from tiny import ROOT, finish, quick, rows, tiny

from grt.config import Layout, load
from grt.errors import ConfigError
from grt.methods import METHODS, build_model
from grt.methods.rrt import WIDTHS
from grt.model.convert import convert, tied_layers
from grt.presets import change, preset
from grt.runs.checkpoint import load_model
from grt.train.loop import Trainer
from grt.train.start import load_initial

LAYOUTS = ["1+2x3+1", "0+1x4+2", "2+3x2+0"]
SHARED_BY_STEPS = ("ln1.weight", "ln1.bias", "ln2.weight", "ln2.bias", *(f"{name}.bias" for name in WIDTHS))


def dense_for(tiny, layout, alike="", written=None):
    """A dense model with as many layers as `layout` executes. alike: those that are tied in this way have equal norms
    and biases; stepwise may tie a layer to others than the average does, so there all of them have."""
    blocks = Layout.parse(layout)
    model = tiny("ladder", written or f"{blocks.n_executions()}L", seed=5)
    if alike:
        layers = [*model.prelude, *model.coda]
        for j in range(blocks.n):
            for r, name in ((r, name) for r in range(blocks.R) for name in SHARED_BY_STEPS):
                source = layers[blocks.p + (j if alike == "average" else 0)].get_parameter(name)
                layers[blocks.p + r * blocks.n + j].get_parameter(name).data.copy_(source)
    return model


def weights_of(dense, name):
    return [layer.get_parameter(f"{name}.weight").detach() for layer in [*dense.prelude, *dense.coda]]


def effective(model, r, j, name):
    rule, key = model.rule, name.replace(".", "_")
    delta = rule.scale * rule.B[key][r, j] @ rule.A[key][r, j]
    return (model.core[j].get_parameter(f"{name}.weight") + delta).detach()


@pytest.mark.parametrize(
    ("layout", "average", "stepwise"),
    [
        ("1+2x3+1", [[1, 3, 5], [2, 4, 6]], [[1], [6]]),
        ("0+1x4+2", [[0, 1, 2, 3]], [[0]]),
        ("2+3x2+0", [[2, 5], [3, 6], [4, 7]], [[2], [4], [7]]),
        ("1+4x2+1", [[1, 5], [2, 6], [3, 7], [4, 8]], [[1], [3], [6], [8]]),
        ("1+3x1+1", [[1], [2], [3]], [[1], [2], [3]]),
    ],
)
def test_which_layers_are_tied(layout, average, stepwise):
    assert tied_layers(Layout.parse(layout), "average") == average
    assert tied_layers(Layout.parse(layout), "stepwise") == stepwise


@pytest.mark.parametrize("p", [0, 1, 2])
def test_stepwise_is_evenly_spaced(p):
    """As numpy spaces the layers that are tied, first and last among them."""
    for n in range(1, 13):
        for R in range(1, 9):
            got = [i for (i,) in tied_layers(Layout(p, n, R, 1), "stepwise")]
            exact = np.linspace(p, p + n * R - 1, n)
            assert np.abs(exact - got).max() <= 0.5 + 1e-9  # but for rounding
            assert got == sorted(set(got))
            assert got[0] == p and (n == 1 or got[-1] == p + n * R - 1)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("how", ["average", "stepwise"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_tensor_by_hand(tiny, method, how, layout):
    dense, model, blocks = dense_for(tiny, layout), tiny(method, layout, seed=9), Layout.parse(layout)
    before = {name: x.clone() for name, x in model.state_dict().items()}
    record = convert(model, dense.state_dict(), dense.config.blocks, how)
    assert record["how"] == how and record["layers"] == tied_layers(blocks, how)
    layers = list(dense.prelude)
    for i in range(blocks.p):
        assert all(torch.equal(x, model.prelude[i].state_dict()[k]) for k, x in layers[i].state_dict().items())
    for i in range(blocks.c):
        end = layers[blocks.n_executions() - blocks.c + i]
        assert all(torch.equal(x, model.coda[i].state_dict()[k]) for k, x in end.state_dict().items())
    for j, tied in enumerate(tied_layers(blocks, how)):
        for name in layers[0].state_dict():
            want = sum(layers[i].state_dict()[name] for i in tied) / len(tied)
            torch.testing.assert_close(model.core[j].state_dict()[name], want, rtol=1e-12, atol=1e-12)
    for name in ("embed.tokens.weight", "embed.positions.weight", "ln_f.weight", "ln_f.bias"):
        assert torch.equal(model.state_dict()[name], dense.state_dict()[name])
    adopted = "kept" in record
    for name, x in before.items():
        if name.startswith("rule."):
            assert torch.equal(x, model.state_dict()[name]) != adopted, name


@pytest.mark.parametrize("how", ["average", "stepwise"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("scale", [2.0, 0.5])
def test_at_full_rank_it_computes_what_the_dense_model_does(tiny, ids, how, layout, scale):
    dense = dense_for(tiny, layout, alike=how)
    model = tiny("rrt", layout, lora_rank=16, lora_scale=scale)
    record = convert(model, dense.state_dict(), dense.config.blocks, how)
    torch.testing.assert_close(model(ids), dense(ids), rtol=0, atol=1e-11)
    assert record["kept"] == pytest.approx(1, abs=1e-12)
    short = tiny("rrt", layout, lora_rank=15, lora_scale=scale)
    assert convert(short, dense.state_dict(), dense.config.blocks, how)["kept"] < 1
    assert (short(ids) - dense(ids)).abs().max() > 1e-3


def test_norms_and_biases_are_shared_by_the_steps(tiny, ids):
    """So a dense model in which they differ is not reproduced, though every weight is."""
    dense, model = dense_for(tiny, "1+2x3+1"), tiny("rrt", lora_rank=16)
    convert(model, dense.state_dict(), dense.config.blocks, "average")
    assert (model(ids) - dense(ids)).abs().max() > 1e-3
    for name in WIDTHS:
        for r in range(3):
            for j in range(2):
                want = weights_of(dense, name)[1 + 2 * r + j]
                torch.testing.assert_close(effective(model, r, j, name), want, rtol=0, atol=1e-12)


@pytest.mark.parametrize("how", ["average", "stepwise"])
@pytest.mark.parametrize("rank", [1, 4, 9])
def test_the_deltas_are_the_best_of_their_rank(tiny, how, rank):
    """Eckart-Young: what is left over has as its squared norm the squared singular values that were cut off."""
    dense, model = dense_for(tiny, "1+2x3+1"), tiny("rrt", lora_rank=rank, lora_scale=0.7)
    record = convert(model, dense.state_dict(), dense.config.blocks, how)
    kept = whole = 0.0
    for name in WIDTHS:
        weights = weights_of(dense, name)
        for r in range(3):
            for j in range(2):
                tied = np.mean([weights[i].numpy() for i in tied_layers(Layout(1, 2, 3, 1), how)[j]], 0)
                source = weights[1 + 2 * r + j].numpy()
                S = np.linalg.svd(source - tied, compute_uv=False)
                error = np.linalg.norm(source - effective(model, r, j, name).numpy()) ** 2
                assert error == pytest.approx((S[rank:] ** 2).sum(), rel=1e-9, abs=1e-20)
                kept, whole = kept + (S[:rank] ** 2).sum(), whole + (S**2).sum()
    assert record["kept"] == pytest.approx(kept / whole, rel=1e-9)


def test_only_the_chosen_linears_take_up_what_they_lost(tiny):
    dense, model = dense_for(tiny, "1+2x3+1"), tiny("rrt", lora_rank=16, lora_targets="mlp.up")
    convert(model, dense.state_dict(), dense.config.blocks, "average")
    assert torch.allclose(effective(model, 2, 1, "mlp.up"), weights_of(dense, "mlp.up")[6])
    assert set(model.rule.A) == {"mlp_up"}


@pytest.mark.parametrize("method", METHODS)
def test_equal_layers_stay_what_they_are(tiny, ids, method):
    """In float32 too, where a mean of three equal numbers may not be that number. The deltas have nothing to do."""
    dense = tiny("ladder", "8L", dtype=torch.float32)
    for j, r in ((j, r) for j in range(2) for r in range(1, 3)):
        dense.prelude[1 + 2 * r + j].load_state_dict(dense.prelude[1 + j].state_dict())
    model = tiny(method, dtype=torch.float32)
    record = convert(model, dense.state_dict(), dense.config.blocks, "average")
    assert all(torch.equal(x, model.core[1].state_dict()[k]) for k, x in dense.prelude[4].state_dict().items())
    if "kept" in record:
        assert record["kept"] == 1 and torch.equal(model(ids), dense(ids))


def test_a_dense_layout_may_have_its_blocks_behind(tiny, ids):
    dense = dense_for(tiny, "1+2x3+1", alike="average", written="3+0x0+5")
    model = tiny("rrt", lora_rank=16)
    convert(model, dense.state_dict(), dense.config.blocks, "average")
    torch.testing.assert_close(model(ids), dense(ids), rtol=0, atol=1e-11)


@pytest.fixture(scope="module")
def source(data, tmp_path_factory):
    """A finished dense run of five layers; tests only read it."""
    with pytest.MonkeyPatch.context() as patch:
        quick(patch)
        out = tmp_path_factory.mktemp("source") / "run"
        finish(tiny(data, model={"method": "ladder", "layout": "5L"}), out)
        return out


def recurrent(data, source, method="rrt", model=None, **train):
    fields = {"method": method, "lora_rank": 16} | (model or {})
    return tiny(data, model=fields, train={"init_from": str(source), "seed": 7, "steps": 4, **train})


@pytest.mark.parametrize("how", ["average", "stepwise"])
@pytest.mark.parametrize("method", ["rrt", "grt"])
def test_a_run_begins_as_a_tied_dense_one(data, source, tmp_path, method, how):
    config = recurrent(data, source, method, {"vocab_multiple": 64}, init_tie=how)
    trainer = Trainer(config, tmp_path / "run")
    trainer.log.close()
    record = json.loads((tmp_path / "run/env.json").read_text())["init_from"]
    assert record["path"] == str(source / "checkpoints/step-00000030") and record["step"] == 30
    assert record["tied"]["how"] == how
    assert record["tied"]["layers"] == {"average": [[1, 2, 3]], "stepwise": [[1]]}[how]
    dense, theirs = load_model(source)
    torch.manual_seed(0)
    want = build_model(change(config, model={"vocab_multiple": 1}).model)
    convert(want, dense.state_dict(), theirs.model.blocks, how)
    got = trainer.model.state_dict()
    for name, x in want.state_dict().items():
        assert torch.equal(x, got[name]) or (method == "grt" and name.startswith("rule.")), name
    assert ("kept" in record["tied"]) == (method == "rrt")


def test_it_begins_better_than_afresh_and_is_saved(data, source, tmp_path):
    finish(recurrent(data, source), tmp_path / "run")
    finish(recurrent(data, ""), tmp_path / "anew")
    first = {name: rows(tmp_path / name, "train")[0]["loss"] for name in ("run", "anew")}
    assert first["run"] < rows(source, "train")[0]["loss"] - 1 < first["anew"]
    model, config = load_model(tmp_path / "run")
    assert config == load(tmp_path / "run/config.json") and all(B.any() for B in model.rule.B.values())
    finish(recurrent(data, tmp_path / "run"), tmp_path / "on")  # the weights of its own kind, as before
    assert "tied" not in json.loads((tmp_path / "on/env.json").read_text())["init_from"]


def test_from_the_committed_dense_model():
    """Weights in bf16 and compressed: everything is worked out in float32."""
    config = change(preset("dense-nano"), model={"method": "rrt", "layout": "1+2x3+1", "lora_rank": 128})
    config = change(config, train={"init_from": str(ROOT / "models/dense-nano"), "init_tie": "stepwise"})
    torch.manual_seed(0)
    model = build_model(config.model)
    record = load_initial(model, config)
    assert record["tied"]["layers"] == [[1], [6]] and record["tied"]["kept"] == pytest.approx(1, abs=1e-6)
    dense, _ = load_model(ROOT / "models/dense-nano")
    for name in WIDTHS:
        source = weights_of(dense, name)[3]
        torch.testing.assert_close(effective(model, 1, 0, name), source, rtol=0, atol=1e-5)
        assert (model.core[0].get_parameter(f"{name}.weight") - source).abs().max() > 0.1


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (
            {"layout": "1+1x4+1"},
            "is dense with 5 layers, but model.layout 1+1x4+1 executes 6 blocks: start from a dense model of 6 layers",
        ),
        ({"d_model": 32}, "has model.d_model 16, this run 32: set --model.d-model to its value, or start from other"),
        ({"context": 8}, "has model.context 16, this run 8"),
        ({"vocab_size": 300}, "has model.vocab_size 257, this run 300"),
        ({"layout": "6L"}, "has model.layout 5L, this run 6L: set --model.layout to its value, or start from other"),
    ],
    ids=str,
)
def test_a_dense_model_that_does_not_fit_is_refused(data, source, tmp_path, model, message):
    with pytest.raises(ConfigError) as error:
        Trainer(recurrent(data, source, model=model), tmp_path / "run")
    assert str(error.value).startswith(f"train.init_from {source} {message}") and "\n" not in str(error.value)
    assert not (tmp_path / "run/config.json").exists()


def test_another_recurrent_model_is_refused_with_what_would_fit(data, source, tmp_path):
    finish(recurrent(data, source, steps=1), tmp_path / "rrt")
    for field, value, n_layers in (("method", "ladder", 5), ("layout", "2+1x3+1", 6)):
        remedy = f"--model.{field} to its value, or start from a dense model of {n_layers} layers"
        with pytest.raises(ConfigError, match=remedy):
            Trainer(recurrent(data, tmp_path / "rrt", model={field: value}), tmp_path / "run")
    with pytest.raises(ConfigError, match="has model.lora_rank 16, this run 8: set --model.lora-rank to its value, or"):
        Trainer(recurrent(data, tmp_path / "rrt", model={"lora_rank": 8}), tmp_path / "run")
