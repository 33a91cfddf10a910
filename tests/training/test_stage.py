"""The second stage of training: what it trains, what it leaves alone, where it may begin."""

import shutil

import pytest
import torch
from safetensors.torch import load_file
from tiny import finish, quick, result, rows, run_until, tiny

from grt.backbone.context import LoopContext
from grt.errors import ConfigError
from grt.model.cost import training_forward_flops
from grt.presets import change
from grt.train.loop import Trainer

GATE = {"rule.gate.weight", "rule.gate.bias"}


def first(data, method="ouro", **train):
    return tiny(data, model={"method": method}, train={"steps": 6, **train})


@pytest.fixture(scope="module")
def sources(data, tmp_path_factory):
    """Finished runs of one stage by method; tests only read them."""
    folder = tmp_path_factory.mktemp("sources")
    with pytest.MonkeyPatch.context() as patch:
        quick(patch)
        for method in ("ouro", "ladder"):
            finish(first(data, method), folder / method)
    return folder


def second(data, source, **train):
    config = first(data, stage=2, init_from=str(source), **train)
    return change(config, optim={"lr": 1e-2, "warmup_steps": 0})


def weights(out, step=6):
    return load_file(out / f"checkpoints/step-{step:08d}/model.safetensors")


def test_only_the_gate_learns(data, sources, tmp_path):
    config = second(data, sources / "ouro")
    trainer = Trainer(config, tmp_path / "run")
    real = trainer.optimizer.step

    def look(*args, **kwargs):
        have = {name for name, p in trainer.model.named_parameters() if p.grad is not None}
        assert have == GATE
        return real(*args, **kwargs)

    trainer.optimizer.step = look
    assert trainer.run() == 0
    before, after = weights(sources / "ouro"), weights(tmp_path / "run")
    assert before.keys() == after.keys()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == GATE
    moments = load_file(tmp_path / "run/checkpoints/step-00000006/optimizer.safetensors")
    assert moments.keys() == {f"{name}.{key}" for name in GATE for key in ("exp_avg", "exp_avg_sq")}
    losses = [row["loss"] for row in rows(tmp_path / "run", "train")]
    assert losses[-1] < losses[0] and all(row["grad_norm"] > 0 for row in rows(tmp_path / "run", "train"))


def test_a_resumed_second_stage_repeats_it_bit_for_bit(data, sources, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(sources / "ouro", copy)
    config = second(data, copy, checkpoint_every=2)
    finish(config, tmp_path / "straight")
    run_until(config, tmp_path / "run", 3)
    shutil.rmtree(copy)  # no need of it any more
    trainer = finish(config, tmp_path / "run", resume=True)
    assert result(tmp_path / "run", 6) == result(tmp_path / "straight", 6)
    assert [len(p) for p in (trainer.optimizer.state,)] == [len(GATE)]


def test_a_second_stage_may_go_on_from_another(data, sources, tmp_path):
    finish(second(data, sources / "ouro"), tmp_path / "a")
    finish(second(data, tmp_path / "a", seed=2), tmp_path / "b")
    a, b = weights(tmp_path / "a"), weights(tmp_path / "b")
    assert {name for name in a if not torch.equal(a[name], b[name])} == GATE


def test_a_first_stage_trains_everything(data, sources, tmp_path):
    finish(first(data, init_from=str(sources / "ouro")), tmp_path / "run")
    before, after = weights(sources / "ouro"), weights(tmp_path / "run")
    assert not any(torch.equal(before[name], after[name]) for name in before)


def test_what_a_second_stage_costs(data, sources, tmp_path):
    """No moments for what is frozen, and no backward pass to count."""
    rows_of = {}
    for name, config in (("one", first(data)), ("two", second(data, sources / "ouro"))):
        trainer = Trainer(config, tmp_path / name)
        rows_of[name] = trainer.optimizer_step()
        trainer.close()
    forward = training_forward_flops(trainer.model, 3, 16)
    for name, passes in (("one", 3), ("two", 1)):
        row = rows_of[name]
        assert row["mfu"] == pytest.approx(passes * forward * row["tokens_per_s"] / trainer.state.peak, rel=1e-9)
    n = sum(p.numel() for p in trainer.model.parameters())
    assert rows_of["one"]["peak_bytes"] - rows_of["two"]["peak_bytes"] > 3 * 4 * n  # two moments and a gradient each


@pytest.mark.parametrize(("method", "recompute", "want"), [
    ("ouro", "auto", True), ("ouro", "none", False), ("ladder", "auto", False), ("ladder", "readout", True),
])  # fmt: skip
def test_read_outs_are_computed_again_where_there_are_many(data, tmp_path, method, recompute, want):
    trainer, ctx = Trainer(first(data, method, recompute=recompute), tmp_path / "run"), LoopContext()
    trainer.slot_loss(0, 0, ctx)
    trainer.close()
    assert ctx.recompute is want


def refused(config, out, message, monkeypatch):
    def too_late(*args, **kwargs):
        raise AssertionError("text was opened first")

    monkeypatch.setattr("grt.train.loop.open_data", too_late)
    with pytest.raises(ConfigError, match=message):
        Trainer(config, out)
    assert not (out / "config.json").exists()


def test_a_second_stage_needs_a_first(data, tmp_path, monkeypatch):
    message = r"^train.stage is 2, but train.init_from names no run: give that of stage 1, --init-from RUN.$"
    refused(first(data, stage=2), tmp_path / "run", message, monkeypatch)


def test_a_second_stage_needs_a_choice_of_exits(data, sources, tmp_path, monkeypatch):
    config = change(second(data, sources / "ouro"), model={"layout": "1+1x1+1"})
    message = r"^train.stage is 2, but model.layout 1\+1x1\+1 has one recurrence, which leaves no choice: train a"
    refused(config, tmp_path / "run", message, monkeypatch)


@pytest.mark.parametrize(("method", "layout", "named"), [("ladder", "1+1x3+1", "ladder"), ("ouro", "2L", "dense")])
def test_most_methods_have_one_stage(data, sources, tmp_path, monkeypatch, method, layout, named):
    config = change(second(data, sources / "ladder"), model={"method": method, "layout": layout})
    message = rf"^train.stage is 2, but {named} is trained in one stage: leave --train.stage out.$"
    refused(config, tmp_path / "run", message, monkeypatch)


def test_a_second_stage_is_of_the_same_method(data, sources, tmp_path, monkeypatch):
    source = sources / "ladder"
    message = rf"^train.stage is 2, but train.init_from {source} is a run of ladder: give one of ouro.$"
    refused(second(data, source), tmp_path / "run", message, monkeypatch)
