"""The training bench: who takes turns, what the ratios are of, and peers that are missing. Speeds are not tested."""

import itertools
import json
from functools import partial

import pytest
import torch

from grt import cli
from grt.bench import peers, training
from grt.bench.turns import alternate
from grt.config import ModelConfig
from grt.errors import ConfigError
from grt.methods import METHODS
from grt.model.depth import Depth, fixed, lognormal_poisson, uniform

SHAPE = {"d_model": 16, "n_heads": 2, "context": 16}

# A stand-in with the names of nanoGPT's model.py; the tests must not need a checkout of it.
STAND_IN = """
from dataclasses import dataclass
from torch import nn
from torch.nn import functional as F

@dataclass
class GPTConfig:
    block_size: int
    vocab_size: int
    n_layer: int
    n_head: int
    n_embd: int
    dropout: float
    bias: bool

class GPT(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocab_size, config.n_embd)
        self.gelu = nn.GELU()
        print("number of parameters: some")

    def forward(self, ids, targets):
        logits = self.gelu(self.embed(ids)) @ self.embed.weight.T
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())
"""


@pytest.fixture
def stand_in(tmp_path):
    (tmp_path / "model.py").write_text(STAND_IN)
    return tmp_path / "model.py"


def small(**options):
    fixed = {"shape": SHAPE, "peer_shape": SHAPE, "peer_layout": "2L", "batch_size": 2, "dtype": "fp32"}
    return training.bench_training("1+1x2+1", 2, device="cpu", **fixed, **options)


def test_the_default_pair_is_recurrent_and_dense():
    report = small()
    assert [row["name"] for row in report["rows"]] == ["grt 1+1x2+1", "dense 4L"]
    name = "time per token, grt 1+1x2+1 / dense 4L"
    assert list(report["ratios"]) == [name]
    low, high = report["ratio_spreads"][name]
    assert 0 < low <= report["ratios"][name] <= high
    for row in report["rows"]:
        assert row["spread"][0] <= row["us_per_token"] <= row["spread"][1]
        assert row["tokens_per_s"] == pytest.approx(1e6 / row["us_per_token"])
        assert row["shape"] == {**SHAPE, "batch_size": 2}
    assert 0 < report["rows"][0]["loader_share"] < 1 and "loader_share" not in report["rows"][1]


def test_peers_take_turns_with_our_dense(stand_in, capsys):
    pytest.importorskip("transformers")
    report = small(peers=["nanogpt", "transformers"], nanogpt=stand_in)
    assert [row["name"] for row in report["rows"]] == ["grt dense 2L", "nanogpt", "transformers"]
    assert list(report["ratios"]) == ["tokens/s, grt dense 2L / nanogpt", "tokens/s, grt dense 2L / transformers"]
    assert capsys.readouterr().out == ""  # nanoGPT prints while it builds
    training.show(report)
    lines = capsys.readouterr().out.splitlines()
    assert json.loads(lines[-1]) == report and "loader's share of a step, grt dense 2L: " in "\n".join(lines)
    assert len(small(peers=["dense", "nanogpt"], nanogpt=stand_in)["rows"]) == 4


def test_ratios_are_within_turns_and_the_right_way_round(monkeypatch):
    times = {"a": [2.0, 6.0, 3.0], "b": [4.0, 3.0, 9.0]}
    monkeypatch.setattr(training, "alternate", lambda *_, **__: times)
    config = ModelConfig(layout="1L", vocab_size=257, **SHAPE)
    a, b = (training.ours(name, config, [Depth(0)], torch.device("cpu"), torch.float32) for name in "ab")
    for what, want in (("time per token", [0.5, 2.0, 1 / 3]), ("tokens/s", [2.0, 0.5, 3.0])):
        report = {"alternations": 3, "rows": [], "ratios": {}, "ratio_spreads": {}}
        training.measure([a, b], [(a, b)], config, 2, report, what)
        assert report["ratios"] == {f"{what}, a / b": pytest.approx(sorted(want)[1])}
        assert report["ratio_spreads"] == {f"{what}, a / b": pytest.approx([min(want), max(want)])}


def test_the_first_turn_is_left_out_and_everybody_begins():
    order = []

    def turn(name: str) -> float:
        order.append(name)
        return float(len(order))

    times = alternate({name: partial(turn, name) for name in "abc"}, 3, warm=1, seconds=float)
    assert "".join(order) == "abc" + "bca" + "cab" + "abc"
    assert times == {"a": [6.0, 8.0, 10.0], "b": [4.0, 9.0, 11.0], "c": [5.0, 7.0, 12.0]}


def test_a_turn_stands_for_the_drawn_depths():
    """Every depth once where they are equally frequent; else the quantiles, which have nearly the mean."""
    assert training.quantiles(uniform(6), 6) == [Depth(k) for k in range(1, 7)]
    assert training.quantiles(fixed(4, 8), 3) == [Depth(4, 8)] * 3
    tail = lognormal_poisson(9, 0.5, 40, 8)
    depths = training.quantiles(tail, 100)
    assert len(depths) == 100 and all(depth.grad_steps == 8 for depth in depths)
    reached = list(itertools.accumulate(p for _, p in sorted(tail.probabilities.items())))
    assert [d.steps for d in depths] == [1 + sum(p <= (i + 0.5) / 100 for p in reached) for i in range(100)]


def test_every_method_takes_turns_with_dense():
    report = small(methods=list(METHODS))
    names = [f"{method} 1+1x2+1" for method in METHODS]
    assert [row["name"] for row in report["rows"]] == [*names, "dense 4L"]
    assert list(report["ratios"]) == [f"time per token, {name} / dense 4L" for name in names]
    peaks = {row["name"]: row["peak_bytes"] for row in report["rows"]}
    assert min(peaks.values()) > 4 * 4 * 4 * 12 * 16**2  # weights, gradients and moments of three blocks and more
    assert peaks["dense 4L"] > peaks["ladder 1+1x2+1"]


def test_the_sizes_of_a_preset(monkeypatch):
    given = {}
    monkeypatch.setattr(training, "bench_training", lambda layout, n, **rest: given.update(layout=layout, **rest))
    monkeypatch.setattr(training, "show", lambda report: None)
    assert cli.main(["bench", "training", "--methods", "mor", "ouro", "--preset", "grt-nano"]) == 0
    assert (given["layout"], given["methods"], given["batch_size"]) == ("1+1x6+1", ["mor", "ouro"], 4)
    assert given["shape"] == {"d_model": 128, "n_heads": 4, "context": 256}


def test_a_recurrent_turn_runs_every_depth_once(monkeypatch):
    config = ModelConfig(method="grt", layout="1+1x3+1", vocab_size=257, **SHAPE)
    recurrent, dense = training.recurrent_and_dense([config], torch.device("cpu"), torch.float32)
    ran = []
    for contestant in (recurrent, dense):
        real = contestant.model.loss
        contestant.model.loss = lambda *args, real=real: ran.append(args[2]) or real(*args)
        before = [p.detach().clone() for p in contestant.model.parameters()]
        tokens = torch.randint(257, (2, 17))
        assert contestant.turn(tokens[:, :-1], tokens[:, 1:]) > 0
        assert any(not torch.equal(a, b) for a, b in zip(before, contestant.model.parameters(), strict=True))
        assert all(p.grad is None for p in contestant.model.parameters())
    assert ran == [Depth(1), Depth(2), Depth(3), Depth(0), Depth(0), Depth(0)]


def test_nanogpt_is_set_to_our_gelu(stand_in):
    config = ModelConfig(layout="2L", vocab_size=257, **SHAPE)
    model, loss = peers.nanogpt(stand_in, config)
    assert model.gelu.approximate == "tanh"
    settings = {"block_size": 16, "vocab_size": 257, "n_layer": 2, "n_head": 2, "n_embd": 16, "dropout": 0.0}
    assert vars(model.config) == {**settings, "bias": True}
    assert loss(torch.zeros(1, 4, dtype=torch.long), torch.zeros(1, 4, dtype=torch.long)).ndim == 0


def test_transformers_computes_our_loss():
    """From the same weights: it is the same model that is timed."""
    pytest.importorskip("transformers")
    config = ModelConfig(layout="2L", vocab_size=257, **SHAPE)
    theirs, loss = peers.transformers_gpt2(config)
    mine = training.ours("a", config, [Depth(0)], torch.device("cpu"), torch.float32)
    assert sum(p.numel() for p in theirs.parameters()) == sum(p.numel() for p in mine.model.parameters())
    assert theirs.config._attn_implementation == "sdpa"
    peers.copy_weights(theirs, mine.model)
    tokens = torch.randint(257, (2, 17))
    ids, targets = tokens[:, :-1], tokens[:, 1:]
    assert loss(ids, targets).item() == pytest.approx(mine.losses[0](ids, targets).item(), rel=1e-5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"peers": ["nanogpt"]}, "--nanogpt is not given: name the model.py"),
        ({"peers": ["nanogpt"], "nanogpt": "{none}"}, "none.py is no file: name the model.py"),
        ({"peers": ["nanogpt"], "nanogpt": "{other}"}, "other.py is not nanoGPT's model.py"),
    ],
)
def test_missing_peers_are_named(tmp_path, options, message):
    (tmp_path / "other.py").write_text("x = 1")
    if "nanogpt" in options:
        options = {**options, "nanogpt": tmp_path / (options["nanogpt"].strip("{}") + ".py")}
    with pytest.raises(ConfigError, match=message):
        small(**options)


def test_a_dense_layout_has_no_recurrent_pair():
    with pytest.raises(ConfigError, match="--layout 4L has no core to compare with dense"):
        training.bench_training("4L", 1)


def test_the_command(monkeypatch, capsys, stand_in):
    given, report = {}, small()
    monkeypatch.setattr(training, "bench_training", lambda *a, **k: given.update(k, a=a) or report)
    arguments = ["bench", "training", "--peers", "nanogpt", "transformers", "--nanogpt", str(stand_in)]
    assert cli.main([*arguments, "--alternations", "3"]) == 0
    assert (given["peers"], given["nanogpt"], given["a"]) == (["nanogpt", "transformers"], stand_in, ("1+1x10+1", 3))
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["bench"] == "training"
    assert cli.main(["bench", "training", "--peers", "llama"]) == 2
