"""Monitors of a run, by hand, and the warnings that they give."""

import numpy as np
import pytest
import torch
from tiny import finish, rows
from torch.nn import functional as F

import grt
from grt.data.loader import batch
from grt.evals.loss import Evaluation
from grt.methods import build_model
from grt.presets import change
from grt.train.monitor import monitor, warnings_for

VALUES = "gate_mean gate_sd gate_saturation noise_to_signal state_change token_correlation"


@torch.no_grad()
def naive_monitor(model, ids) -> dict[str, list[float]]:
    """The equations with concatenated inputs, and each statistic from its definition."""
    torch.manual_seed(0)
    rule, config, ctx = model.rule, model.config, grt.LoopContext()
    h = h_pre = model.prelude(model.embed(ids), ctx)
    found: dict[str, list[float]] = {key: [] for key in VALUES.split()}
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
        assert len(found[name]) == 3 and found[name] == pytest.approx(values, rel=1e-5, abs=1e-6), name
    assert 0 < found["gate_saturation"][0] < 1 or bias == 0


def test_the_monitors_of_a_run_are_those_of_its_model(trained):
    out, trainer = trained
    ids, _ = batch(trainer.val_split, seed=0, step=0, slot=0, rows=range(4), context=16)
    row = rows(out, "monitor")[-1]
    for name, values in naive_monitor(trainer.model, ids).items():
        assert row[name] == pytest.approx(values, rel=1e-5, abs=1e-6), name


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
