"""Vocabulary rows for the hardware: however many there are, the model is the same and never says their ids."""

import math

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tiny import finish, rows, run_until, tiny

from grt.config import ModelConfig, config_hash
from grt.decode.sampling import Sampling
from grt.decode.stream import generate
from grt.errors import ConfigError
from grt.evals.loss import evaluate
from grt.methods import METHODS, build_model
from grt.model import cost
from grt.model.depth import Depth
from grt.presets import change
from grt.runs.checkpoint import load_model
from grt.train.loop import Trainer

CASES = [(method, "1+1x3+1") for method in METHODS] + [("ladder", "2L")]
TOKENS = np.random.RandomState(2).randint(0, 23, size=100).tolist()


def pair(method: str = "grt", layout: str = "1+1x3+1", multiple: int = 16, **fields):
    """A model and its padded twin, built from the same seed."""
    models = []
    for vocab_multiple in (1, multiple):
        torch.manual_seed(3)
        sizes = {"d_model": 16, "n_heads": 2, "context": 12, "vocab_size": 23} | fields
        config = ModelConfig(method=method, layout=layout, vocab_multiple=vocab_multiple, **sizes)
        models.append(build_model(config).eval())
    return models


@pytest.mark.parametrize(("vocab", "multiple", "rows"), [(50257, 64, 50304), (50257, 128, 50304), (257, 64, 320),
                                                        (64, 64, 64), (50257, 1, 50257)])  # fmt: skip
def test_rows_are_rounded_up(vocab, multiple, rows):
    config = ModelConfig(vocab_size=vocab, vocab_multiple=multiple, d_model=4, n_heads=1, layout="1L")
    assert config.vocab_size + config.n_padding == rows
    with torch.device("meta"):
        assert build_model(config).embed.tokens.weight.shape == (rows, 4)


@pytest.mark.parametrize(("method", "layout"), CASES)
def test_the_same_seed_builds_the_same_model(split_of, method, layout):
    """Weights, logits and validation loss, over the true vocabulary; costs too."""
    plain, padded = pair(method, layout)
    assert padded.embed.tokens.weight.shape == (32, 16) and not padded.embed.tokens.weight[23:].any()
    theirs = padded.state_dict()
    assert plain.state_dict().keys() == theirs.keys()
    assert all(torch.equal(x, theirs[name]) for name, x in plain.state_dict().items())
    ids = torch.randint(23, (2, 12))
    assert padded(ids).shape == (2, 12, 23)
    torch.testing.assert_close(padded(ids), plain(ids), rtol=1e-5, atol=1e-6)
    split = split_of(TOKENS)
    want = evaluate(plain, split).loss_by_depth
    assert evaluate(padded, split).loss_by_depth == pytest.approx(want, rel=1e-6)
    ours = cost.parameters(plain)
    assert ours["padding"] == 0 and cost.parameters(padded) == {**ours, "padding": 9 * 16}
    assert cost.training_forward_flops(padded, 1, 12) == cost.training_forward_flops(plain, 1, 12)
    assert cost.decode_memory(padded) == cost.decode_memory(plain)


def test_the_loss_is_over_the_true_vocabulary():
    """A zero embedding predicts uniformly: log 23, not log 32; and padding gets no gradient."""
    _, padded = pair()
    ids, targets = torch.randint(23, (2, 12)), torch.randint(23, (2, 12))
    padded.train().loss(ids, targets, Depth(2)).total.backward()
    gradient = padded.embed.tokens.weight.grad
    assert gradient[:23].any() and not gradient[23:].any()
    torch.nn.init.zeros_(padded.embed.tokens.weight)
    assert padded.loss(ids, targets, Depth(2)).total.item() == pytest.approx(math.log(23), rel=1e-6)


def test_padding_is_never_sampled():
    """10,000 draws at temperature 5 of an untrained model with GPT-2's vocabulary, and some through generate."""
    torch.manual_seed(0)
    config = ModelConfig(method="grt", layout="1+1x2+1", d_model=8, n_heads=1, context=8, vocab_multiple=128)
    model = build_model(config).eval()
    with torch.no_grad():
        # Loud rows of padding would win every draw if anything read them.
        model.embed.tokens.weight[50257:] = 100.0
        logits = model(torch.tensor([[50256, 3]]))[0, -1]
    probabilities = (logits / 5).softmax(-1)
    assert probabilities.shape == (50257,)
    drawn = torch.multinomial(probabilities, 10_000, replacement=True, generator=torch.Generator().manual_seed(1))
    assert drawn.max() < 50257 and drawn.max() > 50000
    generator = torch.Generator().manual_seed(2)
    sampling = Sampling(temperature=5.0, repetition_penalty=1.3)
    assert max(sampling.pick(logits, [50256, 3], generator)[0] for _ in range(100)) < 50257
    assert max(generate(model, [50256], max_new_tokens=20, temperature=5.0, crop=True)) < 50257
    for kv in ("full", "first"):
        assert max(generate(model, [50256], temperature=5.0, kv=kv)) < 50257
    with pytest.raises(ConfigError, match="id 50257 of a prompt is not below 50257"):
        generate(model, [50257])


def test_training_does_not_depend_on_padding(data, tmp_path):
    """Losses agree to rounding, rows of padding stay zero through AdamW and its decay, and the hash is the same."""
    plain = tiny(data, optim={"weight_decay": 0.5})
    padded = change(plain, model={"vocab_multiple": 64})
    assert config_hash(plain) == config_hash(padded)
    a, b = finish(plain, tmp_path / "a"), finish(padded, tmp_path / "b")
    for kind in ("train", "eval"):
        losses = [[row["loss"] for row in rows(tmp_path / name, kind)] for name in "ab"]
        assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    weight = b.model.embed.tokens.weight
    assert weight.shape == (320, 16) and not weight[257:].any()
    assert not b.optimizer.state[weight]["exp_avg_sq"][257:].any()
    assert a.model.embed.tokens.weight.shape == (257, 16)


@pytest.mark.parametrize(("first", "then"), [(64, 64), (64, 1), (1, 64)])
def test_checkpoints_hold_true_rows_and_resume_with_any_padding(data, tmp_path, first, then):
    config = tiny(data, model={"vocab_multiple": first})
    whole = finish(config, tmp_path / "whole")
    run_until(config, tmp_path / "run", 15)
    folder = tmp_path / "run" / "checkpoints" / "step-00000015"
    assert load_file(folder / "model.safetensors")["embed.tokens.weight"].shape == (257, 16)
    moments = load_file(folder / "optimizer.safetensors")
    assert moments["embed.tokens.weight.exp_avg"].shape == (257, 16)
    trainer = Trainer(change(config, model={"vocab_multiple": then}), tmp_path / "run", resume=True)
    assert trainer.state.step == 15 and trainer.run() == 0
    tolerance = {"rtol": 0, "atol": 0} if first == then else {"rtol": 1e-4, "atol": 1e-5}
    ours, theirs = trainer.model.state_dict(), whole.model.state_dict()
    for name, x in ours.items():
        torch.testing.assert_close(x, theirs[name], **tolerance)
    model, loaded = load_model(tmp_path / "run")
    assert loaded.model.vocab_multiple == first  # config.json says how the run began
    assert torch.equal(model.state_dict()["embed.tokens.weight"], ours["embed.tokens.weight"])


def test_wrong_numbers_of_rows_are_refused():
    _, padded = pair()
    for n in (22, 24, 32):
        with pytest.raises(RuntimeError, match="size mismatch"):
            padded.load_state_dict({**padded.state_dict(), "embed.tokens.weight": torch.zeros(n, 16)})
    with pytest.raises(RuntimeError, match="Missing key"):
        padded.load_state_dict({k: v for k, v in padded.state_dict().items() if k != "embed.tokens.weight"})
