"""The benches of generation: who takes turns, what is counted, what the documents hold. Speeds are not tested."""

import json
from functools import partial

import pytest
import torch

from grt import cli
from grt.bench import decoding, latency, memory
from grt.config import ModelConfig
from grt.decode.stream import generate
from grt.errors import ConfigError
from grt.methods import build_model
from grt.model import cost

SHAPE = {"d_model": 16, "n_heads": 2, "context": 12, "vocab_size": 23}
ROW = {
    "name",
    "protocol",
    "batch",
    "prompt",
    "new",
    "prefill_ms",
    "ms_per_token",
    "tokens_per_s",
    "spread",
    "compile_s",
}


@pytest.fixture(autouse=True)
def tiny_sizes(monkeypatch):
    pair = ModelConfig(method="grt", layout="1+2x3+1", **SHAPE), ModelConfig(layout="8L", **SHAPE)
    real = latency.pair_of
    for module in (latency, memory):
        monkeypatch.setattr(module, "pair_of", lambda size: pair if size == "small" else real(size))
    monkeypatch.setattr(latency, "READ", 1 << 16)


def small(**options):
    fixed = {"sizes": ["small"], "new": 4, "compiled": False, "alternations": 2, "dtype": "fp32", "device": "cpu"}
    return latency.bench_latency(**(fixed | options))


def test_two_protocols_and_two_batches():
    pytest.importorskip("transformers")
    report = small(kv="mean", prompt=6)
    cached, paper = ["grt small", "dense small", "transformers small"], ["grt small", "dense small"]
    assert [row["name"] for row in report["rows"]] == cached * 2 + paper * 2
    assert [row["batch"] for row in report["rows"]] == [1] * 3 + [4] * 3 + [1] * 2 + [4] * 2
    for row in report["rows"]:
        assert row.keys() >= ROW and row["compile_s"] is None
        assert row["spread"][0] <= row["ms_per_token"] <= row["spread"][1]
        assert row["tokens_per_s"] == pytest.approx(1e3 * row["batch"] / row["ms_per_token"])
        is_cached = row["protocol"] == "cached"
        assert (row["prefill_ms"] is not None) == is_cached == ("share_of_peak" in row)
        assert (row["prompt"], row["new"]) == (6 if is_cached else 12, 4)
    where = [f"{protocol}, batch {B}" for protocol in ("cached", "paper") for B in (1, 4)]
    ours = [f"ms per token, grt small / dense small, {w}" for w in where]
    theirs = [f"tokens/s, dense small / transformers small, {w}" for w in where[:2]]
    assert list(report["ratios"]) == [ours[0], theirs[0], ours[1], theirs[1], *ours[2:]]
    assert {"bench", "device", "threads", "dtype", "rows", "ratios", "ratio_spreads", "roofline"} <= report.keys()


def test_the_roofline_follows_from_the_rows():
    report = small(protocols=["cached"], peers=["dense"], batches=[2], alternations=1)
    grt, dense = report["rows"]
    assert list(report["ratios"].values()) == [pytest.approx(grt["ms_per_token"] / dense["ms_per_token"])]
    peak = report["roofline"]["peak_gb_per_s"]
    for row in report["rows"]:
        assert row["gb_per_s"] == pytest.approx(row["bytes_per_token"] / (row["ms_per_token"] * 1e6))
        assert row["share_of_peak"] == pytest.approx(row["gb_per_s"] / peak)
        for key in ("bytes_per_token", "gb_per_s", "share_of_peak"):
            assert report["roofline"][key][f"{row['name']}, batch 2"] == row[key]
    # a prompt of 8 and 4 new tokens: those that are decoded see 9, 10 and 11
    d = 16
    assert dense["bytes_per_token"] == 4 * (8 * 12 * d**2 + 23 * d + 2 * 8 * 2 * d * 10)


@pytest.mark.parametrize(
    ("method", "once", "a_step"),
    [("grt", 2, 3), ("ladder-inject", 1, 1), ("ladder", 0, 0), ("ouro", 0, 1 / 16), ("rrt", 0, 2 * 16 * 8 / 16)],
)
def test_bytes_read_for_a_token(method, once, a_step):
    """By hand, in units of d^2: 12 an execution; for GRT the anchor's halves of both projections once, the state's
    halves and the gate's second layer at each step; then the head, and all keys and values for each row."""
    with torch.device("meta"):
        model = build_model(ModelConfig(method=method, layout="1+2x3+1", **SHAPE))
    d, V = 16, 23
    for k in (1, 2, 3):
        executions = 2 + 2 * k
        a_pass = 12 * executions + once + a_step * k
        want = 2 * (a_pass * d**2 + V * d + 5 * executions * 2 * d * 7)
        assert cost.decode_bytes(model, k, 7, batch=5) == want
        assert cost.decode_bytes(model, k, 7, batch=5, itemsize=4) == 2 * want


def test_all_contestants_write_the_same_text():
    """Dense with our cache, with theirs and without any, from the same weights; GRT with a cache and without."""
    pytest.importorskip("transformers")
    models = {}
    for name, config in zip(("grt", "dense"), latency.pair_of("small"), strict=True):
        models[name] = decoding.on(torch.device("cpu"), torch.float32, config)
        for p in models[name].parameters():
            p.data += 0.3 * torch.randn_like(p) * (p.ndim > 1)
    cached, paper = (decoding.Task(protocol, 3, 6, 6) for protocol in ("cached", "paper"))
    ticks = []

    def texts(task):
        contestants = latency.contestants_of(models, task, models["dense"])
        return [c.generate(6, partial(ticks.append, c.name)) for c in contestants]

    with_cache, without = texts(cached), texts(paper)
    assert (len(with_cache), len(without)) == (3, 2)
    assert torch.equal(with_cache[1], with_cache[2]) and len(set(with_cache[1][0].tolist())) > 1
    assert all(torch.equal(a, b) for a, b in zip(with_cache, without, strict=False))
    assert ticks == ["grt"] * 2 + ["dense"] * 2 + ["transformers"] * 6 + ["grt", "dense"]
    _, cropped = latency.contestants_of(models, decoding.Task("paper", 1, 12, 6), None)
    text = list(generate(models["dense"], cropped.prompts[0].tolist(), max_new_tokens=6, temperature=0, crop=True))
    assert cropped.generate(6, lambda: None)[0].tolist() == text and len(set(text)) > 1


class Fake:
    few, compiled = 3, False

    def __init__(self, name, told, ticks=2):
        self.name, self.told, self.ticks = name, told, ticks

    def generate(self, new, tick):
        self.told.append((self.name, new))
        for _ in range(self.ticks):
            tick()


def test_everybody_begins_once():
    told = []
    times = decoding.take_turns([Fake("a", told), Fake("b", told), Fake("c", told)], 5, 4)
    assert "".join(name for name, _ in told) == "abc" + "bca" + "cab" + "abc"
    assert {new for _, new in told} == {5} and {len(of_turns) for of_turns in times.values()} == {4}


def test_the_prompt_is_left_out_and_compilation_apart(monkeypatch):
    clock = iter([10.0, 13.0, 19.0, 20.0, 28.0, 30.0, 31.0, 32.0, 36.0])
    monkeypatch.setattr(decoding.time, "perf_counter", lambda: next(clock))
    told = []
    assert decoding.timed(Fake("cached", told), 4) == (3.0, 2.0)
    assert decoding.timed(Fake("paper", told, ticks=1), 4) == (None, 2.0)
    assert decoding.timed(Fake("transformers", told, ticks=3), 3) == (1.0, 2.5)
    clock = iter([0.0, 1.0, 7.0] * 2)
    monkeypatch.setattr(decoding.time, "perf_counter", lambda: next(clock))
    fake = Fake("cached", told)
    assert decoding.warm_up(fake, 9) is None and told[-1] == ("cached", 3)
    fake.compiled = True
    assert decoding.warm_up(fake, 2) == 6.0 and told[-1] == ("cached", 2)


def test_ratios_are_within_turns():
    report = {"ratios": {}, "ratio_spreads": {}}
    a, b = ([decoding.Timed(1.0, x) for x in times] for times in ((2.0, 6.0, 3.0), (4.0, 3.0, 9.0)))
    decoding.add_ratio(report, "a / b", a, b)
    assert report == {"ratios": {"a / b": 0.5}, "ratio_spreads": {"a / b": [1 / 3, 2.0]}}


def test_each_contestant_compiles_once_and_before_its_turns(monkeypatch):
    made, calls = [], []

    def compile_(function, **_):
        made.append(function)
        return lambda *args: calls.append(function) or function(*args)

    monkeypatch.setattr(torch, "compile", compile_)
    report = small(peers=["dense"], batches=[1], compiled=True, alternations=2)
    assert len(made) == 4 and all(row["compile_s"] > 0 for row in report["rows"])
    assert [calls.count(function) for function in made] == [3 * 3] * 2 + [1 + 2 * 4] * 2


def plan(**options):
    fixed = {"sizes": (), "protocols": latency.PROTOCOLS, "batches": [1], "prompt": None, "new": None, "kv": "full"}
    notes = []
    return latency.plan(**(fixed | {"compiled": False, "on_cpu": True} | options), notes=notes), notes


def test_a_cpu_measures_less_without_a_cache_and_says_so(monkeypatch):
    monkeypatch.undo()
    planned, notes = plan()
    assert {size: [(t.protocol, t.prompt, t.new) for t in tasks] for size, tasks in planned} == {
        "small": [("cached", 896, 128), ("paper", 1024, 4)],
        "medium": [("cached", 896, 128)],
        "large": [("cached", 896, 128)],
    }
    assert notes == ["paper on a CPU: small only, 4 new tokens (--sizes, --new: others)"]
    planned, notes = plan(on_cpu=False)
    assert [(t.protocol, t.new) for _, tasks in planned for t in tasks] == [("cached", 128), ("paper", 128)] * 3
    assert notes == []
    assert plan(sizes=["medium"], new=8)[1] == []
    for size in latency.SIZES:
        grt, dense = latency.pair_of(size)
        assert grt.blocks.n_executions() == dense.blocks.n_executions() and dense.n_padding == grt.n_padding == 0


def test_only_those_asked_for_take_part():
    pytest.importorskip("transformers")
    report = small(protocols=["cached"], peers=["transformers"], batches=[1], alternations=1)
    assert [row["name"] for row in report["rows"]] == ["dense small", "transformers small"]
    dense, theirs = report["rows"]
    ratio = pytest.approx(dense["tokens_per_s"] / theirs["tokens_per_s"])
    assert report["ratios"] == {"tokens/s, dense small / transformers small, cached, batch 1": ratio}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sizes": ["huge"]}, "size is 'huge': choose among small, medium, large, nano"),
        ({"prompt": 9, "new": 4}, "--prompt 9 and --new 4 are more than the context of small, 12: ask for fewer"),
        ({"new": 1}, "--new is 1: it must be at least 2"),
        ({"kv": "some"}, "kv is 'some': choose one of full, first"),
        ({"batches": [0]}, "--batch is 0"),
    ],
)
def test_wrong_options_are_named_before_anything_is_built(monkeypatch, options, message):
    monkeypatch.setattr(latency, "on", lambda *_: pytest.fail("built a model"))
    with pytest.raises(ConfigError, match=message):
        small(**options)


def beside_keys_and_values(config, kv, B):
    """Bytes: rows of padding; of each token how many steps it ran, and whether it is seen; of each row where it stands;
    where the token in progress goes; and of that token what K_1, or the sum so far in float32, takes."""
    own = {"first": 2, "mean": 4}.get(kv, 0) * 2 * config.blocks.n * B * config.d_model
    return 2 * config.n_padding * config.d_model + B * config.context * (8 + 1) + 8 * B + 8 + own


def check_rows(report, rows, size):
    assert [(row["name"], row["kv"], row["batch"]) for row in report["rows"]] == rows
    grt, dense = latency.pair_of(size)
    for row in report["rows"]:
        own = beside_keys_and_values(grt if "grt" in row["name"] else dense, row["kv"], row["batch"])
        assert row["bytes"] == row["closed_form_bytes"] + own
        assert row["difference"] == pytest.approx(row["bytes"] / row["closed_form_bytes"] - 1)
        assert row["prompt_phase_bytes"] >= row["bytes"]


def test_memory_is_the_closed_form():
    strategies = ["full", "mean", "first", "last", "first:all", "mod:2", "mod:9"]
    report = memory.bench_memory("nano", [1, 4], strategies)
    grt = [("grt nano", kv, B) for kv in strategies for B in (1, 4)]
    check_rows(report, [("dense nano", "full", 1), ("dense nano", "full", 4), *grt], "nano")
    by = {(row["kv"], row["batch"]): row for row in report["rows"][2:]}
    # the prompt phase of a strategy that shares has six slots for the core's block beside the one that remains
    slots = 4 * 128 * 256 * 4
    assert by["mean", 4]["prompt_phase_bytes"] - by["mean", 4]["bytes"] == 6 * slots
    sums = 4 * 2 * 4 * 128
    assert by["mod:2", 4]["bytes"] - by["mean", 4]["bytes"] == slots - sums  # one more of them, and no sums
    assert by["mod:9", 4]["bytes"] == by["full", 4]["bytes"] == by["full", 4]["prompt_phase_bytes"]
    ratio = report["ratios"]["memory, grt nano mean / dense nano, batch 4"]
    assert ratio == by["mean", 4]["bytes"] / report["rows"][1]["bytes"]
    with pytest.raises(ConfigError, match="kv is 'mod:0': choose one of full, first, last, mean, mod:K, first:all"):
        memory.bench_memory("nano", kv=["mod:0"])


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_memory_is_tab_decode_mem():
    report = memory.bench_memory()
    rows = [("dense", "full"), ("grt", "full"), ("grt", "mean")]
    check_rows(report, [(f"{name} medium", kv, B) for name, kv in rows for B in (1, 32)], "medium")
    assert [row["paper_gib"] for row in report["rows"]] == [0.75, 3.66, 0.41, 3.32, 0.35, 1.44]
    for row in report["rows"]:
        assert row["bytes"] / 2**30 == pytest.approx(row["paper_gib"], abs=0.0075)  # printed with two digits


def test_the_commands(monkeypatch, capsys):
    report, given = small(peers=["dense"], batches=[1]), {}
    monkeypatch.setattr(latency, "bench_latency", lambda *a, **k: given.update(k, a=a) or report)
    arguments = ["bench", "latency", "--sizes", "medium", "--protocol", "paper", "--compile", "off", "--kv", "mean"]
    assert cli.main([*arguments, "--peers", "dense", "--new", "7"]) == 0
    out = capsys.readouterr().out
    assert json.loads(out.splitlines()[-1]) == report and "paper, batch 1, 12 tokens and 4 new ones" in out
    assert given["a"] == (["medium"], ["paper"], [1, 4])
    assert (given["compiled"], given["kv"], given["new"], given["prompt"]) == (False, "mean", 7, None)
    assert cli.main(["bench", "memory", "--size", "nano", "--batch", "2", "--kv", "first"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [row["batch"] for row in json.loads(lines[-1])["rows"]] == [2, 2]
    assert cli.main(["bench", "latency", "--sizes", "huge"]) == 2
    assert "--sizes is 'huge': choose one of 'nano', 'small', 'medium', 'large'." in capsys.readouterr().err
    assert cli.main(["bench", "speed"]) == 2
    assert "'speed' is none of the benches: choose one of training, latency" in capsys.readouterr().err
    assert cli.main(["bench"]) == 2 and cli.main(["bench", "--help"]) == 0
    assert "loss against time per token" in capsys.readouterr().out
