"""`grt bench serve`: what is counted, who takes turns, what the document holds. tests/serving runs it in vLLM; speeds
are not tested."""

import json

import pytest
import torch

from grt import cli
from grt.bench import serve
from grt.bench.latency import pair_of
from grt.model import cost


class Fake:
    """An engine that writes down who was asked, and for what."""

    asked: list[tuple[str, list[list[int]]]] = []

    def __init__(self, document: dict, config: object, **options: object) -> None:
        self.name = document["name"]

    def generate(self, prompts: list[list[int]], new: int) -> list[list[int]]:
        self.asked.append((self.name, prompts))
        return [[0] * new for _ in prompts]


def test_a_request_costs_its_tokens_and_its_readouts():
    config = pair_of("nano")[1]  # dense: the sum by hand
    d, layers = config.d_model, config.blocks.n_executions()
    linears, attention = 24 * d * d * layers, 4 * 24 * d * layers
    assert serve.request_flops(config, 16, 8) == 23 * (linears + attention) + 8 * cost.head_flops(config)
    assert serve.request_flops(pair_of("nano")[0], 16, 8) > serve.request_flops(config, 16, 8)


def test_turns_alternate_over_the_same_prompts():
    Fake.asked = []
    prompts = [serve.prompts_of(turn, 2, 3, 257) for turn in range(3)]
    seconds = serve.take_turns({name: Fake({"name": name}, None) for name in "ab"}, prompts, 4)
    assert [name for name, _ in Fake.asked] == ["a", "b", "b", "a", "a", "b"]
    assert [asked for _, asked in Fake.asked] == [prompts[turn] for turn in (0, 0, 1, 1, 2, 2)]
    assert {name: len(times) for name, times in seconds.items()} == {"a": 2, "b": 2}  # the first warms up
    assert prompts[0] != prompts[1]


def test_the_document(monkeypatch, capsys):
    monkeypatch.setattr(serve, "contestants", lambda *_: {name: {"name": name} for name in ("grt", "gpt2")})
    monkeypatch.setattr(serve, "engine_class", lambda: Fake)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    arguments = [
        "bench",
        "serve",
        "--size",
        "nano",
        "--requests",
        "2",
        "--prompt",
        "4",
        "--new",
        "2",
        "--compile",
        "off",
    ]
    assert cli.main(arguments) == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert {"bench", "device", "threads", "dtype", "rows", "ratios", "ratio_spreads"} <= report.keys()
    assert [row["name"] for row in report["rows"]] == ["grt", "gpt2"]
    flops = report["flops_per_request"]
    ((name, ratio),) = report["ratios"].items()
    assert report["of_flops"][name] == pytest.approx(ratio * flops["grt"] / flops["dense"])


def test_what_cannot_be(capsys):
    assert cli.main(["bench", "serve", "--size", "nano", "--prompt", "250"]) == 2
    assert "--prompt 250 and --new 64 are more than the context, 256: ask for fewer." in capsys.readouterr().err
    assert cli.main(["bench", "serve", "--requests", "0"]) == 2


def test_without_vllm_one_is_told_where_it_is(monkeypatch, capsys):
    monkeypatch.setitem(__import__("sys").modules, "vllm", None)
    assert cli.main(["bench", "serve", "--size", "nano"]) == 2
    assert "vLLM is not installed here: make vllm, then .venv-vllm/bin/grt bench serve." in capsys.readouterr().err
