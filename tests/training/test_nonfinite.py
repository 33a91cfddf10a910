"""Losses and gradients that are not finite end a run, and say where they came from."""

import math
from pathlib import Path

import pytest
import torch
from tiny import finish, grt, rows, run_until

from grt.config import dump
from grt.evals.loss import Evaluation
from grt.runs.checkpoint import load_model
from grt.runs.metrics import MetricsLog
from grt.train.diagnose import NonFiniteError
from grt.train.loop import Trainer


def snapshot(out: Path) -> dict[str, bytes]:
    return {str(p.relative_to(out)): p.read_bytes() for p in (out / "checkpoints").rglob("*") if p.is_file()}


def poison_weights(trainer: Trainer) -> None:
    trainer.model.get_parameter("core.0.mlp.up.weight").data[3, 2] = math.nan


def poison_output(trainer: Trainer) -> None:
    trainer.model.get_submodule("coda.0.attn.out").register_forward_hook(lambda m, i, output: output / 0)


def poison_rule(trainer: Trainer) -> None:
    read = trainer.model.rule.read
    trainer.model.rule.read = lambda h, h_pre, ctx: read(h, h_pre, ctx) + (math.inf if ctx.step == 0 else 0)


def poison_gradient(trainer: Trainer) -> None:
    trainer.model.rule.proj.weight.register_hook(lambda gradient: gradient * math.nan)


def poison_backward(trainer: Trainer) -> None:
    """All gradients of what ran before are spoilt with it."""
    up = trainer.model.get_submodule("coda.0.mlp.up")
    up.register_forward_hook(lambda m, i, output: output.register_hook(lambda g: g * math.nan) and None)


@pytest.mark.parametrize(
    ("poison", "what", "module"),
    [
        (poison_weights, "loss", "core.0.mlp.up.weight (its weights)"),
        (poison_output, "loss", "coda.0.attn.out"),
        (poison_rule, "loss", "rule (input of step 1)"),
        (poison_gradient, "gradient", "rule.proj.weight (its gradient)"),
        (poison_backward, "gradient", "coda.0.mlp.up.bias (its gradient)"),
    ],
)
def test_a_loss_that_is_not_finite_stops_the_run(config, tmp_path, poison, what, module):
    out = tmp_path / "run"
    run_until(config, out, 7)
    before = snapshot(out)
    trainer = Trainer(config, out, resume=True)  # at step 5
    weights = trainer.model.ln_f.weight.detach().clone()
    poison(trainer)
    with pytest.raises(NonFiniteError) as caught:
        trainer.run()
    row = rows(out, "event")[-1]
    drawn = [trainer.sampler(1337, 5, slot).steps for slot in (0, 1)]
    depth, named = (drawn[:1], f"depth {drawn[0]}") if what == "loss" else (drawn, "depths {}, {}".format(*drawn))
    assert row == {"kind": "event", "step": 5, "event": "nonfinite", "what": what, "depth": depth, "module": module}
    assert str(caught.value).startswith(f"the {what} is not finite at step 6 ({named}), first in {module}: ")
    assert "\n" not in str(caught.value) and str(caught.value).endswith("in a new folder.")
    assert [row["step"] for row in rows(out, "train")] == [1, 2, 3, 4, 5]
    assert torch.equal(trainer.model.ln_f.weight, weights)  # the step was not taken
    assert snapshot(out) == before
    load_model(out)


def test_the_slot_that_failed_is_the_one_that_is_named(config, tmp_path):
    """Poisoned in the second slot only, whose depth (3) is not that of the first (2)."""
    trainer = run_until(config, tmp_path / "run", 1)
    step = next(s for s in range(1, 30) if [trainer.sampler(1337, s, a).steps for a in (0, 1)] == [2, 3])
    trainer = run_until(config, tmp_path / "other", step)
    trainer.log = MetricsLog(tmp_path / "more.jsonl")
    transform = trainer.model.rule.transform
    trainer.model.rule.transform = lambda u, core, ctx: transform(u, core, ctx) * (math.nan if ctx.step == 2 else 1)
    with pytest.raises(NonFiniteError, match=rf"at step {step + 1} \(depth 3\), first in rule \(state of step 3\)"):
        Trainer.optimizer_step(trainer)
    trainer.log.close()


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_validation_loss_that_is_not_finite_stops_the_run(config, tmp_path, monkeypatch, bad):
    out = tmp_path / "run"
    run_until(config, out, 6)
    before = snapshot(out)
    losses = {0: 5.0, 1: 3.0, 2: bad, 3: 2.0}
    monkeypatch.setattr("grt.train.loop.evaluate", lambda *a, **k: Evaluation(losses, 1, 16, 1.0))
    with pytest.raises(NonFiniteError, match=r"the validation loss is not finite at step 10 \(depth 2\)"):
        finish(config, out, resume=True)
    assert rows(out, "event")[-1]["event"] == "nonfinite" and snapshot(out) == before


def test_the_command_ends_with_3(config, tmp_path):
    (tmp_path / "config.json").write_text(dump(config))
    out = tmp_path / "run"
    done = grt("train", "--config", tmp_path / "config.json", "--out", out, "--optim.lr", "1e30")
    assert done.returncode == 3, done.stderr
    assert done.stderr.startswith("grt: the loss is not finite at step 2 (depth ") and done.stderr.count("\n") == 1
    assert rows(out, "event")[-1]["event"] == "nonfinite" and not (out / "checkpoints").exists()
