"""Training: what a step computes, what it logs, and what the monitors say about it."""

import errno
import importlib.util
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from matplotlib import pyplot
from matplotlib.figure import Figure
from PIL import Image
from tiny import finish, quick, rows, run_until, tiny, write_text
from torch.nn import functional as F

import grt
from grt.config import ConfigError, OptimConfig
from grt.data.loader import batch
from grt.evals.loss import Evaluation
from grt.methods import build_model
from grt.model.cost import training_forward_flops
from grt.presets import change, grt_nano
from grt.train.log import MetricsLog, read_metrics
from grt.train.loop import Trainer, slot_seed
from grt.train.monitor import monitor, warnings_for
from grt.train.optim import learning_rate, make_optimizer
from grt.train.plots import draw_curve

TRAIN = "kind step tokens loss loss_lm aux lr grad_norm depth tokens_per_s mfu seconds peak_bytes"
EVAL = "kind step split tokens loss loss_by_depth bits_per_byte"
MONITOR = "kind step warnings gate_mean gate_sd gate_saturation noise_to_signal state_change token_correlation"


@pytest.fixture(autouse=True)
def fast(monkeypatch):
    quick(monkeypatch)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_text(tmp_path_factory.mktemp("data"))


@pytest.fixture
def config(data):
    return tiny(data)


@pytest.fixture(scope="module")
def trained(data, tmp_path_factory):
    """A finished run of 30 steps: (folder, trainer)."""
    with pytest.MonkeyPatch.context() as patch:
        quick(patch, curve=True)
        out = tmp_path_factory.mktemp("trained") / "run"
        return out, finish(tiny(data), out)


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
    for row in rows(trained[0], "eval"):
        assert row["loss_by_depth"].keys() == {"0", "1", "2", "3"} and row["loss"] == row["loss_by_depth"]["3"]
        assert row["split"] == "val" and row["tokens"] == 8 * 16
        assert row["bits_per_byte"] == pytest.approx(row["loss"] / math.log(2), rel=0.01)
    for row in rows(trained[0], "monitor"):
        assert all(len(row[key]) == 3 for key in MONITOR.split()[3:])


def test_training_learns(trained):
    losses = [row["loss"] for row in rows(trained[0], "train")]
    assert losses[0] == pytest.approx(math.log(257), abs=0.3) and np.mean(losses[-5:]) < 3.6


def test_speed_follows_from_time_and_flops(config, trained):
    row, model = rows(trained[0], "train")[-1], trained[1].model
    before = rows(trained[0], "train")[-2]["seconds"]
    assert row["tokens_per_s"] == pytest.approx(128 / (row["seconds"] - before), rel=1e-6)
    per_token = [training_forward_flops(model, depth, 16) for depth in row["depth"]]
    assert row["mfu"] == pytest.approx(3 * np.mean(per_token) * row["tokens_per_s"] / 1e12, rel=1e-9)


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
    reference = rows(out, "train")[0]["loss"]
    assert reference == pytest.approx(math.log(257), abs=0.3)


def test_bf16_computes_something_else(config, tmp_path):
    first = {}
    for dtype in ("fp32", "bf16"):
        finish(change(config, train={"steps": 1, "dtype": dtype}), tmp_path / dtype)
        first[dtype] = rows(tmp_path / dtype, "train")[0]["loss"]
    assert first["fp32"] != first["bf16"] and first["bf16"] == pytest.approx(first["fp32"], rel=1e-2)


def test_dtype_auto_measures_once(config, tmp_path, monkeypatch):
    """A resumed run keeps the first choice, although a new measurement would fall differently."""
    measured = []

    def faster(winner: torch.dtype):
        def speed(device, dtype, width, seconds=0.1):
            measured.append(dtype)
            return 2.0 if dtype == winner else 1.0

        return speed

    config, out = change(config, train={"dtype": "auto"}), tmp_path / "run"
    monkeypatch.setattr("grt.model.precision.matmul_speed", faster(torch.bfloat16))
    assert run_until(config, out, 6).dtype == torch.bfloat16 and len(measured) == 2
    assert json.loads((out / "env.json").read_text())["dtype"] == "bf16"
    monkeypatch.setattr("grt.model.precision.matmul_speed", faster(torch.float32))
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


# Monitors


@torch.no_grad()
def naive_monitor(model, ids) -> dict[str, list[float]]:
    """The equations with concatenated inputs, and each statistic from its definition."""
    torch.manual_seed(0)
    rule, config, ctx = model.rule, model.config, grt.LoopContext()
    h = h_pre = model.prelude(model.embed(ids), ctx)
    found: dict[str, list[float]] = {key: [] for key in MONITOR.split()[3:]}
    for _ in range(config.blocks.R):
        eps = config.state_noise * torch.randn_like(h)
        o = model.core(rule.proj(torch.cat([h + eps, h_pre], -1)), ctx)
        z = rule.gate.up(torch.cat([rule.ln_state(h), rule.ln_anchor(h_pre)], -1))
        a = rule.gate.down(F.silu(z)) / config.gate_temperature
        g = torch.sigmoid(a + config.gate_noise * torch.randn_like(a))
        new = g * h + (1 - g) * o
        values = g.flatten().numpy().astype(float)
        found["gate_mean"].append(values.mean())
        found["gate_sd"].append(values.std(ddof=1))
        found["gate_saturation"].append(np.mean((values < 0.01) | (values > 0.99)))
        found["noise_to_signal"].append((eps.square().sum().sqrt() / h.square().sum().sqrt()).item())
        found["state_change"].append(((new - h).norm(dim=-1) / new.norm(dim=-1)).mean().item())
        pairs = [(row[i], row[j]) for row in new for i in range(len(row)) for j in range(i)]
        found["token_correlation"].append(np.mean([F.cosine_similarity(a, b, dim=0).item() for a, b in pairs]))
        h = new
    return found


@pytest.mark.parametrize("bias", [-5.0, 0.0, 4.0])
def test_monitors_by_hand(config, bias):
    torch.manual_seed(0)
    config = change(config, model={"gate_bias": bias, "state_noise": 0.3, "gate_noise": 0.7, "gate_temperature": 1.5})
    model = build_model(config.model).train()
    for p in model.parameters():
        p.data += 0.1 * torch.randn_like(p)
    ids = torch.randint(257, (4, 16))
    before = torch.get_rng_state()
    found = monitor(model, ids, torch.float32)
    assert torch.equal(before, torch.get_rng_state())
    expected = naive_monitor(model, ids)
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        assert len(found[name]) == 3 and found[name] == pytest.approx(values, rel=1e-3, abs=1e-5), name
    assert 0 < found["gate_saturation"][0] < 1 or bias == 0


def test_the_monitors_of_a_run_are_those_of_its_model(trained):
    out, trainer = trained
    ids, _ = batch(trainer.val_split, seed=0, step=0, slot=0, rows=range(4), context=16)
    row = rows(out, "monitor")[-1]
    for name, values in naive_monitor(trainer.model, ids).items():
        assert row[name] == pytest.approx(values, rel=1e-3, abs=1e-5), name


@pytest.mark.parametrize(
    ("losses", "warned"),
    [
        ({0: 5.0, 1: 3.0, 2: 2.0, 3: 3.0}, True), ({0: 5.0, 1: 3.0, 2: 2.0, 3: 3.1}, True),
        ({0: 1.0, 1: 3.0, 2: 3.5, 3: 2.999}, False), ({0: 5.0, 1: 3.0}, False), ({0: 5.0}, False),
    ],
)  # fmt: skip
def test_ignored_depth_is_a_warning(losses, warned):
    assert len(warnings_for(losses, {})) == warned


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"token_correlation": [0.5, 0.992, 0.999]}, "the states of all tokens point in one direction after step 2"),
        ({"token_correlation": [0.5, 0.9]}, None),
        ({"alive_share": [1.0, 0.25, 0.0, 0.0]}, "no token reaches step 3"),
        ({"alive_share": [1.0, 1e-9]}, None),
    ],
)
def test_known_failures_are_warnings(values, told):
    found = warnings_for({0: 5.0, 1: 3.0, 2: 2.0}, values)
    assert [text.startswith(told) for text in found] == [True] if told else found == []


@pytest.mark.parametrize("at_full_depth", [2.0, 3.0])
def test_the_warning_reaches_people_and_the_log(config, tmp_path, monkeypatch, capsys, at_full_depth):
    losses = {0: 5.0, 1: 3.0, 2: 2.5, 3: at_full_depth}
    monkeypatch.setattr("grt.train.loop.evaluate", lambda *a, **k: Evaluation(losses, 1, 16, 1.0))
    finish(change(config, train={"steps": 1}), tmp_path / "run")
    warned = "warning: depth is ignored so far: loss 3.0000 at depth 3 is not below 3.0000" in capsys.readouterr().out
    assert warned == (at_full_depth == 3.0) == bool(rows(tmp_path / "run", "monitor")[0]["warnings"])


# The curve


def test_the_curve_is_a_png(trained, tmp_path):
    with Image.open(trained[0] / "curve.png") as image:
        assert image.format == "PNG" and min(image.size) > 300
        colours = len(image.convert("RGB").getcolors(2**24))
    draw_curve([trained[0], trained[0]], tmp_path / "two.png")
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty/metrics.jsonl").write_text("")
    draw_curve([tmp_path / "empty"], tmp_path / "none.png")
    with Image.open(tmp_path / "none.png") as image:
        assert len(image.convert("RGB").getcolors(2**24)) < colours
    assert not list(tmp_path.glob(".*"))


def test_a_curve_that_cannot_be_written_does_not_end_the_run(config, tmp_path, monkeypatch, capsys):
    def refuse(runs, out):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("grt.train.loop.draw_curve", refuse)
    finish(change(config, train={"steps": 2}), tmp_path / "run")
    told = capsys.readouterr().err
    assert told.count("\n") == 1 and told.startswith(f"warning: {tmp_path / 'run/curve.png'} cannot be drawn")
    assert "No space left" in told


def test_a_curve_that_fails_leaves_nothing_behind(trained, tmp_path, monkeypatch):
    def refuse(figure, path, **options):
        Path(path).write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Figure, "savefig", refuse)
    with pytest.raises(OSError, match="No space"):
        draw_curve([trained[0]], tmp_path / "curve.png")
    assert not list(tmp_path.iterdir()) and not pyplot.get_fignums()


def test_a_finished_run_without_its_curve_gets_it_at_a_resume(config, tmp_path, monkeypatch):
    """A kill may come after the last checkpoint and before its curve."""
    drawn = []
    monkeypatch.setattr("grt.train.loop.draw_curve", lambda runs, out: drawn.append(out))
    config = change(config, train={"steps": 2})
    finish(config, tmp_path / "run")
    assert drawn == [tmp_path / "run/curve.png"]  # once, not twice
    finish(config, tmp_path / "run", resume=True)
    assert len(drawn) == 2


# Damage in the log

GOOD = {
    "train": {"kind": "train", "step": 1, "tokens": 128, "loss_lm": 2.0, "seconds": 1.0, "depth": [1, 2]},
    "eval": {"kind": "eval", "step": 1, "loss": 2.0, "bits_per_byte": 3.0, "loss_by_depth": {"0": 3.0, "1": 2.0}},
    "monitor": {"kind": "monitor", "step": 1},
    "event": {"kind": "event", "step": 1, "event": "save"},
}


def spoilt() -> list[str]:
    """Rows of each kind with each field absent or of a wrong type, and lines of other kinds."""
    bad: list[object] = [[], 3, None, {}, {"kind": "other", "step": 1}, {"kind": ["train"], "step": 1}]
    for row in GOOD.values():
        for name in row:
            bad.append({k: v for k, v in row.items() if k != name})
            bad += [row | {name: value} for value in (None, True, "x", ["x"], {"x": 1}, math.nan, math.inf)]
    bad.remove(GOOD["event"] | {"event": "x"})
    bad += [GOOD["train"] | {"step": 0}, GOOD["eval"] | {"step": -1}, GOOD["train"] | {"depth": [1.5]}]
    lines = [json.dumps(row) for row in bad]
    return [*lines, json.dumps(GOOD["train"]).replace("2.0", "1e999"), "9" * 5000, "[" * 10**5, "half", ""]


@pytest.mark.parametrize("line", spoilt(), ids=lambda line: line[:60])
def test_a_line_of_a_wrong_shape_is_left_out(tmp_path, line):
    path, good = tmp_path / "metrics.jsonl", [json.dumps(row) for row in GOOD.values()]
    path.write_text("\n".join([good[0], line, *good[1:]]) + "\n")
    with pytest.warns(UserWarning, match=r"metrics.jsonl: line 2 cannot be read"):
        assert read_metrics(path) == list(GOOD.values())


def test_validations_at_different_depths_are_drawn(tmp_path):
    other = GOOD["eval"] | {"step": 2, "loss_by_depth": {"3": 1.0}}
    rows = [GOOD["train"], GOOD["eval"], other]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"kind": "tr')
    draw_curve([tmp_path], tmp_path / "curve.png")
    assert (tmp_path / "curve.png").exists()


def test_a_full_disk_names_the_log(config, tmp_path):
    if not Path("/dev/full").exists():
        pytest.skip("there is no /dev/full")
    log = MetricsLog(Path("/dev/full"))
    with pytest.raises(ConfigError, match=r"/dev/full cannot be written \(No space left on device\): make room"):
        log.write("event", 1, event="save")
    log.close()
