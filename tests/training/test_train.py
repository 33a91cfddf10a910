"""Training: what a step computes and what it logs."""

import importlib.util
import itertools
import json
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny import finish, rows, run_until

import grt
from grt.config import OptimConfig
from grt.data.loader import batch
from grt.errors import ConfigError
from grt.methods import build_model
from grt.model.cost import training_forward_flops
from grt.presets import change, grt_nano
from grt.train.loop import Trainer, slot_seed
from grt.train.optim import learning_rate, make_optimizer

TRAIN = "kind step tokens loss loss_lm aux lr grad_norm depth tokens_per_s mfu seconds peak_bytes"
EVAL = "kind step split tokens loss loss_by_depth bits_per_byte"
MONITOR = "kind step warnings gate_mean gate_sd gate_saturation noise_to_signal state_change token_correlation"


# The log


def no_nan(name: str) -> float:
    raise AssertionError(f"{name} in metrics.jsonl")


def test_the_log_has_the_defined_fields_and_no_nan(config, trained):
    lines = (trained[0] / "metrics.jsonl").read_text().splitlines()
    logged = [json.loads(line, parse_constant=no_nan) for line in lines]
    fields = {
        "train": TRAIN.split(),
        "eval": EVAL.split(),
        "monitor": MONITOR.split(),
        "event": ["kind", "step", "event"],
    }
    for row in logged:
        assert sorted(row) == sorted(fields[row["kind"]]), row
    steps = {kind: [row["step"] for row in logged if row["kind"] == kind] for kind in fields}
    assert steps["train"] == list(range(1, 31))  # finished steps: the first is 1
    assert steps["eval"] == steps["monitor"] == [10, 20, 30]
    assert steps["event"] == [5, 10, 15, 20, 25, 30]
    for row in rows(trained[0], "train"):
        assert row["tokens"] == row["step"] * config.train.tokens_per_step
        assert row["loss"] == row["loss_lm"] and row["aux"] == 0
        assert len(row["depth"]) == 2 and set(row["depth"]) <= {1, 2, 3}
        assert 10**5 < row["peak_bytes"] < 10**7 and row["seconds"] > 0
    val = trained[1].val_split
    for row in rows(trained[0], "eval"):
        assert row["loss_by_depth"].keys() == {"0", "1", "2", "3"} and row["loss"] == row["loss_by_depth"]["3"]
        assert row["split"] == "val" and row["tokens"] == 8 * 16
        per_byte = val.n_tokens / val.n_bytes  # end-of-text is no byte of the text
        assert row["bits_per_byte"] == pytest.approx(row["loss"] / math.log(2) * per_byte, rel=1e-12)
    for row in rows(trained[0], "monitor"):
        assert all(len(row[key]) == 3 for key in MONITOR.split()[3:])


def test_training_learns(trained):
    losses = [row["loss"] for row in rows(trained[0], "train")]
    assert losses[0] > 5.5 and np.mean(losses[-5:]) < 3.6  # log 257 is 5.549


def test_speed_follows_from_time_and_flops(config, trained):
    row, model = rows(trained[0], "train")[-1], trained[1].model
    before = rows(trained[0], "train")[-2]["seconds"]
    assert row["tokens_per_s"] == pytest.approx(128 / (row["seconds"] - before), rel=1e-6)
    per_token = [training_forward_flops(model, depth, 16) for depth in row["depth"]]
    assert row["mfu"] == pytest.approx(3 * np.mean(per_token) * row["tokens_per_s"] / 1e12, rel=1e-9)


def test_utilisation_counts_what_truncation_skips_as_not_done(config, tmp_path):
    """By hand for Poisson of R = 3 whose last step alone learns: blocks 24 d^2 + 4 T d, A 2 d^2 for each half."""
    model = {"method": "poisson", "grad_steps": 1}
    trainer = Trainer(change(config, model=model, train={"depth": "fixed"}), tmp_path / "run")
    row = trainer.optimizer_step()
    trainer.close()
    block, half = 24 * 16**2 + 4 * 16 * 16, 2 * 16**2
    forward = 5 * block + 4 * half + 2 * 16 * 257
    flops = 3 * forward - 2 * (2 * block + 2 * half)
    assert row["depth"] == [3, 3] and row["mfu"] == pytest.approx(flops * row["tokens_per_s"] / 1e12, rel=1e-9)


@pytest.mark.parametrize(("batch_size", "slots"), [(8, 1), (4, 2), (1, 8)])
def test_tokens_per_step_is_what_the_config_says(config, tmp_path, batch_size, slots):
    config = change(config, train={"batch_size": batch_size, "steps": 3})
    assert config.n_slots == slots
    finish(config, tmp_path / "run")
    logged = rows(tmp_path / "run", "train")
    assert [row["tokens"] for row in logged] == [128, 256, 384] and len(logged[0]["depth"]) == slots
    assert [row["lr"] for row in logged] == [learning_rate(config.optim, step, 3) for step in range(3)]
    with pytest.raises(ConfigError, match="is not a multiple of one slot"):
        change(config, train={"tokens_per_step": 128 + 8})


def test_every_slot_has_a_seed_of_its_own():
    """And always the same one: runs are resumed across versions. sha256 of slot/1337/2/3/0, its first 7 bytes."""
    assert slot_seed(1337, 2, 3) == 52382648079679569
    seeds = {slot_seed(*at) for at in itertools.product((1, 2), (0, 1, 11), (0, 1, 11), (0, 1))}
    assert len(seeds) == 2 * 3 * 3 * 2


def test_auxiliary_losses_are_logged(config, tmp_path):
    trainer = Trainer(change(config, model={"method": "mor"}), tmp_path / "run")
    with torch.no_grad():
        losses = [trainer.slot_loss(0, slot) for slot in (0, 1)]
    row = trainer.optimizer_step()
    trainer.close()
    assert row["aux"] == pytest.approx(np.mean([(loss.total - loss.lm).item() for loss in losses]), rel=1e-5)
    assert row["aux"] > 1e-5


# One optimizer step, done by hand


def slot_losses(trainer: Trainer) -> list[torch.Tensor]:
    """The cross-entropy of each slot of the next step, from windows, depth and seed."""
    config, step, losses = trainer.config, trainer.state.step, []
    for slot in range(config.n_slots):
        ids, targets = batch(trainer.train_split, seed=1337, step=step, slot=slot, rows=range(4), context=16)
        torch.manual_seed(slot_seed(1337, step, slot))
        logits = trainer.model(ids, trainer.sampler(1337, step, slot))
        picked = logits.log_softmax(-1).gather(-1, targets[..., None])
        losses.append(-picked.mean())
    return losses


def test_the_logged_loss_is_the_mean_over_all_slots(config, tmp_path):
    trainer = run_until(config, tmp_path / "run", 7)
    trainer.log = type(trainer.log)(tmp_path / "more.jsonl")
    with torch.no_grad():
        losses = [loss.item() for loss in slot_losses(trainer)]
    row = Trainer.optimizer_step(trainer)
    trainer.log.close()
    assert row["loss"] == pytest.approx(np.mean(losses), rel=1e-6)
    assert abs(row["loss"] - losses[-1]) > 1e-3  # the last slot alone would show


@pytest.mark.parametrize("clip", [0.05, 1.0, 1e6])
def test_three_steps_of_adamw_by_hand(config, tmp_path, clip):
    """Accumulation, clipping, schedule, betas, decay of matrices: in float64, from the formulas."""
    config = change(config, optim={"grad_clip": clip, "weight_decay": 0.5})
    trainer = Trainer(config, tmp_path / "run")
    model = trainer.model
    ours = {name: p.detach().double().clone() for name, p in model.named_parameters()}
    m = {name: torch.zeros_like(p) for name, p in ours.items()}
    v = {name: torch.zeros_like(p) for name, p in ours.items()}
    for step in range(3):
        total = sum(slot_losses(trainer)) / 2
        grads = dict(zip(ours, torch.autograd.grad(total, list(model.parameters())), strict=True))
        norm = math.sqrt(sum(g.double().square().sum().item() for g in grads.values()))
        lr = 1e-2 * (step + 1) / 5
        for name, p in ours.items():
            g = grads[name].double() * min(1.0, clip / norm)
            m[name] = 0.9 * m[name] + 0.1 * g
            v[name] = 0.95 * v[name] + 0.05 * g**2
            p *= 1 - lr * (0.5 if p.ndim >= 2 else 0.0)
            p -= lr * (m[name] / (1 - 0.9 ** (step + 1))) / ((v[name] / (1 - 0.95 ** (step + 1))).sqrt() + 1e-8)
        row = trainer.optimizer_step()
        assert row["lr"] == pytest.approx(lr, rel=1e-12)
        assert row["grad_norm"] == pytest.approx(norm, rel=1e-4)  # before clipping
        for name, p in model.named_parameters():
            assert (p.double() - ours[name]).abs().max() < 3e-5, name
            p.data.copy_(ours[name])  # so that errors do not pile up
    trainer.log.close()


def test_the_recipe_of_the_presets():
    assert grt_nano().optim == OptimConfig(
        lr=4e-3, warmup_steps=100, beta1=0.9, beta2=0.95, weight_decay=0.1, grad_clip=1.0
    )


def test_only_matrices_decay(config):
    model = build_model(config.model)
    optimizer = make_optimizer(model, OptimConfig(lr=0.1, weight_decay=0.3, beta1=0.8, beta2=0.7))
    decayed, kept = optimizer.param_groups
    names = {id(p): name for name, p in model.named_parameters()}
    assert {names[id(p)] for p in decayed["params"]} == {n for n, p in model.named_parameters() if p.ndim == 2}
    assert {names[id(p)] for p in kept["params"]} == {n for n, p in model.named_parameters() if p.ndim == 1}
    assert (decayed["weight_decay"], kept["weight_decay"]) == (0.3, 0.0)
    assert all(group["betas"] == (0.8, 0.7) and group["lr"] == 0.1 for group in optimizer.param_groups)


# The learning rate


def naive_rate(lr: float, ratio: float, warmup: int, step: int, steps: int) -> float:
    if step < warmup:
        return lr * (step + 1) / warmup
    return lr * (ratio + (1 - ratio) * math.cos(math.pi / 2 * (step - warmup) / (steps - warmup)) ** 2)


@given(
    lr=st.floats(1e-6, 1), ratio=st.floats(0, 1), warmup=st.integers(0, 50), more=st.integers(1, 200),
    where=st.floats(0, 1),
)  # fmt: skip
def test_the_schedule(lr, ratio, warmup, more, where):
    optim, steps = OptimConfig(lr=lr, min_lr_ratio=ratio, warmup_steps=warmup), warmup + more
    step = round(where * steps)
    assert learning_rate(optim, step, steps) == pytest.approx(naive_rate(lr, ratio, warmup, step, steps), rel=1e-9)


def test_the_ends_of_the_schedule(trained):
    optim = OptimConfig(lr=6e-4, warmup_steps=10)
    assert learning_rate(optim, 0, 100) == pytest.approx(6e-5)
    assert [learning_rate(optim, step, 100) for step in (9, 10)] == pytest.approx([6e-4, 6e-4])
    assert learning_rate(optim, 55, 100) == pytest.approx((6e-4 + 6e-5) / 2)
    assert learning_rate(optim, 100, 100) == pytest.approx(6e-5)
    assert learning_rate(OptimConfig(lr=1.0), 0, 100) == 1.0
    assert learning_rate(OptimConfig(lr=1.0, warmup_steps=200), 99, 100) == 0.5  # a warm-up longer than the run
    assert [row["lr"] for row in rows(trained[0], "train")] == [
        pytest.approx(naive_rate(1e-2, 0.1, 5, step, 30), rel=1e-12) for step in range(30)
    ]


# Other models and precisions


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("model", [{}, {"layout": "2L"}, {"method": "ladder"}], ids=["grt", "dense", "ladder"])
def test_every_kind_trains_in_both_precisions(config, tmp_path, model, dtype):
    config, out = change(config, model=model, train={"steps": 3, "dtype": dtype}), tmp_path / "run"
    trainer = finish(config, out)
    assert trainer.state.dtype == dtype
    assert all(p.dtype == torch.float32 for p in trainer.model.parameters())
    dense = config.model.blocks.is_dense
    assert all(row["depth"] == [0, 0] if dense else max(row["depth"]) for row in rows(out, "train"))
    assert list(rows(out, "eval")[0]["loss_by_depth"]) == (["0"] if dense else ["0", "1", "2", "3"])
    monitors = [set(row) - {"kind", "step", "warnings"} for row in rows(out, "monitor")]
    named = set(MONITOR.split()[3:])
    assert monitors == ([] if dense else [named] if not model else [{"state_change", "token_correlation"}])
    fresh = Trainer(config, tmp_path / "fresh")
    fresh.close()
    with torch.no_grad():
        want = np.mean([loss.item() for loss in slot_losses(fresh)])
    rounded = {"fp32": 1e-6, "bf16": 1e-3}[dtype]
    assert rows(out, "train")[0]["loss"] == pytest.approx(want, rel=rounded)  # a mean of logits of three digits


def test_bf16_computes_something_else(config, tmp_path):
    first = {}
    for dtype in ("fp32", "bf16"):
        finish(change(config, train={"steps": 1, "dtype": dtype}), tmp_path / dtype)
        first[dtype] = rows(tmp_path / dtype, "train")[0]["loss"]
    assert first["fp32"] != first["bf16"] and first["bf16"] == pytest.approx(first["fp32"], rel=1e-4)


def test_dtype_auto_measures_once(config, tmp_path, monkeypatch):
    """A resumed run keeps the first choice, although a new measurement would fall differently."""
    measured = []

    def faster(winner: torch.dtype):
        def speed(device, dtype, width, seconds=0.1):
            measured.append(dtype)
            return 2.0 if dtype == winner else 1.0

        return speed

    config, out = change(config, train={"dtype": "auto"}), tmp_path / "run"
    monkeypatch.setattr("grt.device.matmul_speed", faster(torch.bfloat16))
    assert run_until(config, out, 6).dtype == torch.bfloat16 and len(measured) == 2
    assert json.loads((out / "env.json").read_text())["dtype"] == "bf16"
    monkeypatch.setattr("grt.device.matmul_speed", faster(torch.float32))
    assert run_until(config, out, 7, resume=True).dtype == torch.bfloat16 and len(measured) == 2
    assert run_until(config, tmp_path / "new", 1).dtype == torch.float32 and len(measured) == 4


def test_fixed_depth(config, tmp_path):
    finish(change(config, train={"depth": "fixed", "steps": 4}), tmp_path / "run")
    assert all(row["depth"] == [3, 3] for row in rows(tmp_path / "run", "train"))


def test_train_from_python(config, tmp_path):
    finish(change(config, train={"steps": 2}), tmp_path / "run")
    model, _ = grt.load_model(tmp_path / "run")
    assert model.config == config.model


@pytest.mark.parametrize("name", grt.__all__)
def test_no_package_takes_the_place_of_a_public_name(name):
    assert getattr(grt, name) is not None and importlib.util.find_spec(f"grt.{name}") is None
