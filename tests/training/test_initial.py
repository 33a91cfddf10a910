"""Starting from another run's weights: the weights alone, as a part of the new run's identity."""

import json
import shutil

import pytest
import torch
from tiny import finish, rows, run_until, tiny

from grt.config import config_hash, load
from grt.errors import ConfigError
from grt.files import sha256
from grt.methods import METHODS
from grt.presets import change
from grt.runs.checkpoint import load_model, weights_file
from grt.train.loop import Trainer
from grt.train.start import check_source


@pytest.fixture(scope="module")
def source(trained):
    """A finished run; tests only read it."""
    return trained[0]


def other_config(data, source, **sections):
    """Another schedule, seed and noise."""
    fields = {"seed": 7, "steps": 6, "init_from": str(source)}
    optim = {"lr": 1e-3, "warmup_steps": 2}
    return change(change(tiny(data, optim=optim, train=fields), model={"state_noise": 0.05}), **sections)


def as_model_folder(run, folder):
    """As committed under models/: bf16 weights and the config, no optimizer."""
    from safetensors.torch import load_file, save

    from grt.runs.checkpoint import write_folder

    tensors = {k: v.bfloat16() for k, v in load_file(run / "checkpoints/step-00000030/model.safetensors").items()}
    config = load(run / "config.json")
    write_folder(folder, {"model.safetensors": save(tensors)}, config_hash(config), 30)
    shutil.copy(run / "config.json", folder)
    return folder


def begin(config, out):
    """Begin a run, which has the weights of its source and nothing else of it."""
    trainer = Trainer(config, out)
    trainer.close()
    want = load_model(config.train.init_from)[0].state_dict()
    assert all(torch.equal(x, want[name]) for name, x in trainer.model.state_dict().items())
    assert trainer.state.step == 0 and not trainer.optimizer.state


@pytest.mark.parametrize("form", ["run", "checkpoint", "older checkpoint", "model folder"])
def test_a_run_begins_with_the_weights_of(data, source, tmp_path, form):
    place = {
        "run": lambda: source,
        "checkpoint": lambda: source / "checkpoints/step-00000030",
        "older checkpoint": lambda: source / "checkpoints/step-00000025",
        "model folder": lambda: as_model_folder(source, tmp_path / "model"),
    }[form]()
    begin(other_config(data, place), tmp_path / "run")
    record = json.loads((tmp_path / "run/env.json").read_text())["init_from"]
    folder = source / "checkpoints/step-00000030" if form == "run" else place
    assert record == {
        "path": str(folder),
        "step": 25 if form == "older checkpoint" else 30,
        "sha256": sha256(weights_file(folder)),
    }


def test_it_goes_on_learning_from_there(data, source, tmp_path):
    finish(other_config(data, source), tmp_path / "run")
    finish(change(other_config(data, source), train={"init_from": ""}), tmp_path / "anew")
    first = {name: rows(tmp_path / name, "train")[0]["loss"] for name in ("run", "anew")}
    assert first["run"] < rows(source, "train")[0]["loss"] - 1 < first["anew"]
    assert [row["lr"] for row in rows(tmp_path / "run", "train")][:2] == [5e-4, 1e-3]
    assert "init_from" not in json.loads((tmp_path / "anew/env.json").read_text())


def test_the_source_is_part_of_the_identity(data, source):
    plain = tiny(data)
    named = change(plain, train={"init_from": str(source)})
    assert config_hash(named) != config_hash(plain)
    assert config_hash(change(named, train={"init_from": str(source) + "2"})) != config_hash(named)


def test_resuming_does_not_need_the_source(data, source, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(source, copy)
    config = other_config(data, copy, train={"checkpoint_every": 2})
    finish(config, tmp_path / "straight")
    run_until(config, tmp_path / "run", 4)
    shutil.rmtree(copy)
    finish(config, tmp_path / "run", resume=True)
    losses = [[row["loss"] for row in rows(tmp_path / name, "train")] for name in ("straight", "run")]
    assert losses[0] == losses[1] and len(losses[0]) == 6
    shutil.rmtree(tmp_path / "run/checkpoints")
    with pytest.raises(ConfigError, match=f"{copy} does not exist"):  # nothing to resume from: it would start anew
        Trainer(config, tmp_path / "run", resume=True)


@pytest.mark.parametrize(
    ("section", "fields", "message"),
    [
        ("model", {"method": "ladder"}, "has model.method grt, this run ladder: set --model.method"),
        ("model", {"layout": "1+1x4+1"}, "has model.layout 1\\+1x3\\+1, this run 1\\+1x4\\+1: set --model.layout"),
        ("model", {"layout": "2L"}, "has model.method grt, this run dense"),
        ("model", {"d_model": 32}, "has model.d_model 16, this run 32: set --model.d-model"),
        ("model", {"n_heads": 4}, "has model.n_heads 2, this run 4"),
        ("model", {"vocab_size": 300}, "has model.vocab_size 257, this run 300"),
        ("model", {"gate_temperature": 2.0}, "has model.gate_temperature 1.0, this run 2.0"),
    ],
    ids=str,
)
def test_another_model_is_refused(data, source, tmp_path, section, fields, message):
    config = other_config(data, source)
    with pytest.raises(ConfigError, match=f"^train.init_from {source} {message}"):
        Trainer(change(config, **{section: fields}), tmp_path / "run")
    assert not (tmp_path / "run" / "config.json").exists()


def test_fields_that_the_weights_do_not_depend_on_may_differ(data, source, tmp_path):
    """Those of other methods; and of a dense model, those of all methods."""
    begin(other_config(data, source, model={"lora_rank": 3, "router": "mlp", "loop_carry": "raw"}), tmp_path / "run")
    dense = {"method": "ladder", "layout": "2L"}
    finish(tiny(data, model=dense, train={"steps": 1}), tmp_path / "dense")
    fields = {"method": "grt", "layout": "2L", "gate_temperature": 2.0, "lora_scale": 1.0}
    begin(other_config(data, tmp_path / "dense", model=fields), tmp_path / "run2")


@pytest.mark.parametrize(
    ("method", "fields"),
    [
        ("poisson", {"start_std": 0.5}),
        ("rrt", {"lora_scale": 1.0}),
        ("rrt", {"lora_rank": 4}),
        ("mor", {"router_scale": 0.2}),
        ("ouro", {"loop_carry": "raw"}),
    ],
    ids=str,
)
def test_fields_of_the_method_are_compared(data, tmp_path, method, fields):
    theirs = tiny(data, model={"method": method})
    config = change(theirs, model=fields, train={"init_from": "there"})
    (name,) = fields
    with pytest.raises(ConfigError, match=f"^train.init_from there has model.{name} "):
        check_source(theirs, config, False, METHODS[method].rule.weights_depend_on)


def test_another_tokenizer_is_refused(data):
    theirs = tiny(data)
    config = change(theirs, data={"tokenizer": "gpt2"}, train={"init_from": "there"})
    with pytest.raises(ConfigError, match="^train.init_from there has data.tokenizer bytes, this run gpt2: set --data"):
        check_source(theirs, config, False, ())
    check_source(theirs, change(theirs, train={"init_from": "there"}), False, ())


def test_another_context_is_refused(data, source, tmp_path):
    config = other_config(data, source, model={"context": 8})
    with pytest.raises(ConfigError, match="has model.context 16, this run 8"):
        Trainer(config, tmp_path / "run")


def test_padding_may_differ(data, source, tmp_path):
    trainer = Trainer(other_config(data, source, model={"vocab_multiple": 64}), tmp_path / "run")
    trainer.log.close()
    assert trainer.model.embed.tokens.weight.shape == (320, 16)
    want, _ = load_model(source)
    assert torch.equal(trainer.model.embed.tokens.weight[:257], want.embed.tokens.weight)


def test_damaged_weights_are_refused(data, source, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(source / "checkpoints/step-00000030", copy)
    shutil.copy(source / "config.json", copy)
    with (copy / "model.safetensors").open("ab") as file:
        file.write(b"x")
    with pytest.raises(ConfigError, match=r"model.safetensors has \d+ bytes"):
        Trainer(other_config(data, copy), tmp_path / "run")
