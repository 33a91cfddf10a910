"""Depth tasks: what is generated is what the definitions say, and accuracy counts what it says."""

import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny import quick, tiny

from grt.cli import main
from grt.data.loader import batch, windows
from grt.data.prepare import open_source
from grt.data.tasks import UNDEFINED, addition, addition_spans, p_hop
from grt.errors import ConfigError
from grt.evals.accuracy import accuracy_by_depth
from grt.methods import build_model


def open_task(source: str):
    return open_source(source, tokenizer="bytes", val_fraction=0.02, field="text")


@pytest.mark.parametrize("hops", [1, 2, 5])
def test_p_hop_is_its_definition(hops):
    for seed in range(5):
        x, labels = p_hop(random.Random(seed), 64, hops)
        for i in range(64):
            at: int | None = i
            for _ in range(hops):
                found = [j for j in range(1, at + 1) if x[j - 1] == x[at]] if at is not None else []
                at = max(found, default=None)
            assert labels[i] == (UNDEFINED if at is None else x[at])


def test_addition_is_text_with_reversed_sums():
    ids, targets = addition(random.Random(1), 200, 4)
    text = bytes([*ids.tolist(), targets[-1]]).decode()
    problems = text.split("\n")[:-1]
    assert len(problems) > 8 and np.array_equal(ids[1:], targets[:-1])
    for problem in problems:
        operands, total = problem.split("=")
        assert int(total[::-1]) == sum(map(int, operands.split("+"))) and 2 <= operands.count("+") + 1 <= 4
    spans = list(addition_spans(ids))
    assert len(spans) in (len(problems), len(problems) - 1)
    for problem, (group, start, stop) in zip(problems, spans, strict=False):
        assert bytes(targets[start:stop].tolist()).decode() == problem.split("=")[1] + "\n"
        assert group == f"{problem.count('+') + 1} operands"


def test_every_answer_that_a_window_holds_is_counted():
    """Its line end may be the window's last target; one digit less, and it is cut off."""
    ending = 0
    for seed in range(40):
        length = 64 + seed % 8
        ids, targets = addition(random.Random(seed), length, 4)
        text = bytes([*ids.tolist(), targets[-1]]).decode()
        spans = list(addition_spans(ids))
        assert len(spans) == text.count("\n")
        assert all(targets[stop - 1] == ord("\n") for _, _, stop in spans)
        if text.endswith("\n"):
            ending += 1
            assert spans[-1].stop == length and len(list(addition_spans(ids[:-1]))) == len(spans) - 1
    assert ending


@pytest.mark.parametrize(
    ("source", "shortest"), [("task:p-hop:3", 21), ("task:addition:2", 9), ("task:addition:11", 37)]
)
def test_a_window_holds_a_whole_problem(source, shortest):
    split = open_task(source).split("val")
    with pytest.raises(
        ConfigError, match=rf"is {shortest - 1}, .* of {source}: take a model of a context of {shortest} or"
    ):
        split.require(shortest)
    split.require(shortest + 1)


def test_the_longest_problem_just_fits():
    most = 11
    ids = np.frombuffer(("99+" * most)[:-1].encode() + b"=9801", np.uint8)[: 3 * most + 4]
    assert [span.group for span in addition_spans(ids)] == ["11 operands"] and not list(addition_spans(ids[:-1]))


def test_splits_are_functions_of_their_name():
    data = open_task("task:p-hop:3")
    train, val = data.split("train"), data.split("val")
    first = batch(train, seed=1, step=0, slot=0, rows=range(4), context=32)
    again = batch(open_task("task:p-hop:3").split("train"), seed=1, step=0, slot=0, rows=range(4), context=32)
    assert torch.equal(first[0], again[0]) and torch.equal(first[1], again[1])
    (ids, _), *rest = windows(val, 32, limit=6, batch_size=4)
    assert ids.shape == (4, 32) and len(rest) == 1 and not torch.equal(ids, first[0])
    assert train.sha256 != val.sha256 != open_task("task:p-hop:4").split("val").sha256


@pytest.mark.parametrize(
    "source", ["task:p-hop", "task:p-hop:0", "task:p-hop:03", "task:p-hop:\u0663", "task:addition:1", "task:sort:3"]
)
def test_other_tasks_are_refused(source):
    with pytest.raises(ConfigError, match=r"data.path is .*write task:p-hop:P"):
        open_task(source)
    with pytest.raises(ConfigError, match="set --data.tokenizer bytes"):
        open_source("task:p-hop:3", tokenizer="gpt2", val_fraction=0.02, field="text")


def test_accuracy_counts_whole_answers(monkeypatch):
    """Readouts: nothing at depth 0, the first digit of every sum wrong at 1, then all right."""
    split = open_task("task:addition:3").split("val")
    model = build_model(replace(tiny(Path("none")).model, context=64))
    [(ids, targets)] = windows(split, 64, limit=8, batch_size=8)
    right = torch.nn.functional.one_hot(targets, 257).float()
    digit_wrong = right.clone()
    digit_wrong[:, :, 256] = 2.0 * (ids == ord("="))
    readouts = iter([torch.zeros_like(right), digit_wrong, right, right])
    monkeypatch.setattr(model, "logits", lambda h, ctx: next(readouts))
    found = accuracy_by_depth(model, split, limit=8)
    assert found[0] == {"2 operands": 0.0, "3 operands": 0.0} == found[1]
    assert found[2] == found[3] == {"2 operands": 1.0, "3 operands": 1.0}


def test_a_run_whose_context_is_too_short_is_refused(tmp_path, monkeypatch, capsys):
    quick(monkeypatch)
    preset = "grt-nano --model.d-model 16 --model.n-heads 2 --data.path task:addition:6 --model.context 16"
    assert main(["train", *preset.split(), "--out", str(tmp_path / "run")]) == 2
    said = capsys.readouterr().err
    assert said.startswith("grt: model.context is 16, too short for one problem of task:addition:6: take a model of")


def test_a_run_on_a_task(tmp_path, monkeypatch, capsys):
    quick(monkeypatch)
    options = "--train.steps 2 --train.tokens-per-step 128 --train.batch-size 2 --model.context 64 --train.threads 1"
    preset = "grt-nano --model.d-model 16 --model.n-heads 2 --data.path task:p-hop:2 --train.dtype fp32"
    assert main(["train", *preset.split(), *options.split(), "--out", str(tmp_path / "run")]) == 0
    told = capsys.readouterr().out
    assert "share of answers that are right" in told and "bigram entropy" not in told
