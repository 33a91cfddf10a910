"""The tasks of lm-evaluation-harness through our own model and caches."""

import json
import math
import re

import numpy as np
import pytest
import torch
from lm_eval.api.instance import Instance
from nano_tasks import ITEMS, NANO, TASKS, harness_model

from grt import cli
from grt.errors import ConfigError
from grt.evals.continuations import AtOnce
from grt.evals.harness import HarnessModel
from grt.evals.loss import evaluate
from grt.evals.scores import ScoreFile
from grt.evals.sharing import forced_log_probs
from grt.runs.checkpoint import load_model


@pytest.fixture(scope="module")
def nano():
    return load_model(NANO)[0].eval()


def ask(model: HarnessModel, kind: str, *arguments: tuple) -> list:
    requests = [Instance(request_type=kind, doc={}, arguments=a, idx=i) for i, a in enumerate(arguments)]
    return getattr(model, kind)(requests, disable_tqdm=True)


def log_prob(model, context: list[int], text: list[int]) -> float:
    """By one plain pass over at most T tokens."""
    with torch.inference_mode():
        logits = model(torch.tensor([[*context, *text[:-1]]]))[0].log_softmax(-1)
    return sum(logits[len(context) - 1 + i, token].item() for i, token in enumerate(text))


# What is asked of a model


def test_requests_are_read_as_lm_eval_prescribes(nano, tmp_path):
    model, T = harness_model(nano, tmp_path), nano.config.context
    short, long = "The old mill", "".join(chr(97 + i * i % 26) for i in range(400))
    got = ask(model, "loglikelihood", (short, " by"), ("", "by the river"), (long, " by"), (short + " ", "by"))
    want = [
        log_prob(nano, [*short.encode()], [*b" by"]),
        log_prob(nano, [256], [*b"by the river"]),  # end-of-text stands for a context that there is none of
        log_prob(nano, [*long.encode()][-(T + 1 - 3) :], [*b" by"]),  # the context's first tokens are lost
        log_prob(nano, [*short.encode()], [*b" by"]),  # spaces belong to the text
    ]
    assert [nats for nats, _ in got] == pytest.approx(want, abs=1e-4)
    assert (model.truncated, model.tokens) == (1, 3 + 12 + 3 + 3) and model.steps == 6 * model.tokens
    next_byte = nano(torch.tensor([[*short.encode()]]))[0, -1].argmax().item()
    likeliest, another = ask(model, "loglikelihood", (short, chr(next_byte)), (short, "\x7f"))
    assert (likeliest[1], another[1]) == (True, False)


def test_rolling_predicts_each_token_once_with_all_the_context_there_is(nano, tmp_path):
    T, text = nano.config.context, [i * i % 251 for i in range(600)]
    cuts = [(0, T), (T, 2 * T), (2 * T, 600)]
    read = [256, *text]  # what text[i] is predicted from ends at read[i]
    want = sum(log_prob(nano, read[max(0, stop - T) : start + 1], text[start:stop]) for start, stop in cuts)
    model = harness_model(nano, tmp_path)
    model.encode = lambda string: torch.tensor(text)
    assert ask(model, "loglikelihood_rolling", ("any",)) == pytest.approx([want], rel=1e-6)


def letters_and(tokens: list[str]):
    """Ids of a text, the first of the tokens before single letters: 0, 1, ... and the letter's code."""
    pattern = re.compile("|".join([*map(re.escape, tokens), "."]), re.S)

    def encode(text: str) -> np.ndarray:
        found = pattern.findall(text)
        return np.array([tokens.index(one) if one in tokens else ord(one) for one in found if one != "~"], np.uint16)

    return encode


@pytest.mark.parametrize(
    ("context", "answer", "context_ids", "answer_ids"),
    [
        ("a mil", "l", "a mil", "l"),  # one token holds both: there is nothing left of the answer
        ("a mil", "lx", "a mil", "lx"),  # more of the answer is left, but not all
        ("a mi", "ll", "a mi", "ll"),
        ("a mil ", "lx", "a mil", " lx"),  # no token spans them
        ("   ", "x", [256], "   x"),  # a context that has no ids but spaces
        ("~", "x", [256], "x"),  # or none at all
    ],
)
def test_a_token_that_spans_context_and_answer(nano, tmp_path, context, answer, context_ids, answer_ids):
    model = harness_model(nano, tmp_path)
    model.encode = encode = letters_and(["mill", "llx"])
    before = context_ids if isinstance(context_ids, list) else encode(context_ids).tolist()
    [(nats, greedy)] = ask(model, "loglikelihood", (context, answer))
    assert nats == pytest.approx(log_prob(nano, before, encode(answer_ids).tolist()), abs=1e-4)
    assert nats < 0 and not greedy


@pytest.mark.parametrize("kind", ["loglikelihood", "loglikelihood_rolling"])
@pytest.mark.parametrize("text", ["", "~"])
def test_a_text_without_a_token_is_no_certainty(nano, tmp_path, kind, text):
    model = harness_model(nano, tmp_path)
    model.encode = letters_and([])
    for arguments in [("", text), ("a mill", text)] if kind == "loglikelihood" else [(text,)]:
        request = Instance(request_type=kind, doc={}, arguments=arguments, idx=0, metadata=("mills", 3, 1))
        with pytest.raises(ConfigError, match=f"tasks has 'mills', whose item 3 .* of '{text}', which has no token"):
            getattr(model, kind)([request], disable_tqdm=True)


# The tasks


def evaluated(capsys, *arguments: object) -> dict:
    assert cli.main(["eval", *map(str, arguments), "--json"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    return json.loads(out)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A document of four windows as a task of one's own, and as validation text."""
    folder, T = tmp_path_factory.mktemp("whole"), 256
    text = "".join(f"{i}: the mill, the river, the owl; " for i in range(200))[: 4 * T]
    (folder / "whole.jsonl").write_text(json.dumps({"text": text}) + "\n")
    metrics = "".join(f"  - metric: {m}\n" for m in ("word_perplexity", "byte_perplexity", "bits_per_byte"))
    fields = "task: whole\noutput_type: loglikelihood_rolling\ndoc_to_text: ''\ndoc_to_target: text\n"
    (folder / "whole.yaml").write_text(f"{fields}metric_list:\n{metrics}")
    return folder, text


@pytest.mark.parametrize("depth", [0, 2, 6])
def test_lm_eval_and_our_own_loss_agree(nano, whole, split_of, capsys, tmp_path, depth):
    folder, text = whole
    split = split_of([256, *text.encode()], vocab_size=257)
    want = evaluate(nano, split, depths=[depth]).loss_by_depth[depth]
    common = (NANO, "--tasks", "whole", "--data-dir", folder, "--cache", tmp_path / "cache", "--depth", depth)
    [row] = evaluated(capsys, *common)["results"]
    assert math.log(row["byte_perplexity"]) == pytest.approx(want, abs=1e-6)
    assert row["bits_per_byte"] * math.log(2) == pytest.approx(want, abs=1e-6)
    assert row["word_perplexity"] == pytest.approx(math.exp(want * len(text) / len(text.split(" "))), rel=1e-5)


@pytest.fixture(scope="module")
def nine(tmp_path_factory):
    """The report on all tasks at two depths, batches of four, and where its scores are."""
    folder = tmp_path_factory.mktemp("nine")
    command = ["eval", NANO, "--tasks", ",".join(TASKS), "--data-dir", ITEMS, "--cache", folder, "--depths", 1, 6]
    with pytest.MonkeyPatch.context() as patch:
        printed = []
        patch.setattr("builtins.print", lambda *text, **options: printed.append(text[0]))
        assert cli.main([*map(str, command), "--batch-size", "4", "--json"]) == 0
    return json.loads(printed[-1]), folder


def test_the_nine_tasks_on_items_of_our_own(nine):
    report, _ = nine
    assert list(report["tasks"]) == list(TASKS) and len(report["results"]) == 2 * len(TASKS)
    for row in report["results"]:
        assert report["tasks"][row["task"]]["items"] == 3
        metrics = {name.removesuffix("_stderr") for name in row if name.endswith("_stderr")}
        usual = {"perplexity", "acc"} if "lambada" in row["task"] else {"acc", "acc_norm"}
        assert metrics == usual - ({"acc_norm"} if row["task"] in ("boolq", "winogrande") else set())
        for metric in metrics - {"perplexity"}:
            p, n = row[metric], 3
            assert row[f"{metric}_stderr"] == pytest.approx(math.sqrt(p * (1 - p) / (n - 1)), abs=1e-12)
        assert (row["truncated_requests"] > 0) == (row["task"] in ("boolq", "piqa"))
    for mean in report["averages"]:
        of_depth = [row for row in report["results"] if row["depth"] == mean["depth"]]
        assert mean["acc"] == pytest.approx(sum(row["acc"] for row in of_depth) / 9)
        assert mean["acc_norm"] == pytest.approx(sum(row.get("acc_norm", row["acc"]) for row in of_depth) / 9)


def items(name: str) -> list[dict]:
    return [json.loads(line) for line in (ITEMS / f"{name}.jsonl").read_text("utf-8").splitlines()]


def test_accuracies_are_those_of_the_likeliest_answers(nano, nine):
    """ARC by hand: raw, and per byte of the answer; LAMBADA: the last word is what the model would write."""
    rows = {row["task"]: row for row in nine[0]["results"] if row["depth"] == 6}
    right, right_norm = 0, 0
    for item in items("arc_easy"):
        context = [*f"Question: {item['question']}\nAnswer:".encode()]
        gold, answers = item["choices"]["label"].index(item["answerKey"]), item["choices"]["text"]
        nats = [log_prob(nano, context, [*f" {answer}".encode()]) for answer in answers]
        right += max(range(len(nats)), key=lambda i: nats[i]) == gold
        right_norm += max(range(len(nats)), key=lambda i: nats[i] / len(answers[i])) == gold
    assert (rows["arc_easy"]["acc"], rows["arc_easy"]["acc_norm"]) == pytest.approx((right / 3, right_norm / 3))
    nats = []
    for item in items("lambada_openai"):
        context, _, word = item["text"].rpartition(" ")
        nats.append(log_prob(nano, [*context.encode()], [*f" {word}".encode()]))
    assert rows["lambada_openai"]["perplexity"] == pytest.approx(math.exp(-sum(nats) / 3), rel=1e-4)


def same_numbers(a: list[dict], b: list[dict], tolerance: float = 1e-5) -> None:
    assert len(a) == len(b) and tolerance <= 1e-4
    for one, other in zip(a, b, strict=True):
        for name, value in other.items():
            near = value if isinstance(value, str) else pytest.approx(value, rel=tolerance)  # at most 1e-4
            assert one[name] == near, name
        assert one.keys() == other.keys()


def test_batches_of_one_and_four_and_auto_agree(nine, capsys, tmp_path):
    report, folder = nine
    [four] = folder.glob("*.jsonl")
    for size in ("1", "auto"):
        options = ("--data-dir", ITEMS, "--depth", 1, 6, "--batch-size", size, "--cache", tmp_path / size)
        got = evaluated(capsys, NANO, "--tasks", "arc_easy,boolq,piqa", *options)
        same_numbers(got["results"], [r for r in report["results"] if r["task"] in ("arc_easy", "boolq", "piqa")])
        known = ScoreFile(folder, json.loads(four.read_text("utf-8").splitlines()[0])).known
        [path] = (tmp_path / size).glob("*.jsonl")
        assert path.name == four.name, "the size of batches decides nothing"
        mine = ScoreFile(path.parent, json.loads(path.read_text("utf-8").splitlines()[0])).known
        assert len(mine) > 40 and mine.keys() <= known.keys()
        assert all(abs(known[k].log_prob - s.log_prob) < 1e-4 and known[k].greedy == s.greedy for k, s in mine.items())
        assert got["batch_size"] == (1 if size == "1" else size)


def test_a_stopped_run_goes_on_and_a_whole_one_computes_nothing(nine, capsys, tmp_path, monkeypatch):
    report, folder = nine
    really, calls = AtOnce.__call__, []

    def counted(self, pairs, last=3):
        calls.append(len(pairs))
        if len(calls) == last:
            raise KeyboardInterrupt
        return really(self, pairs)

    monkeypatch.setattr(AtOnce, "__call__", counted)
    options = ["--tasks", "arc_easy,openbookqa", "--data-dir", ITEMS, "--depth", 1, 6, "--batch-size", 4]
    command = [str(a) for a in ("eval", NANO, *options, "--cache", tmp_path)]
    assert cli.main(command) == 130
    assert "interrupted" in capsys.readouterr().err
    got = evaluated(capsys, *command[1:])
    same_numbers(got["results"], [r for r in report["results"] if r["task"] in ("arc_easy", "openbookqa")])
    requests = 4 + 4 + 3 + 3 * 4  # choices of the two tasks' items
    assert sum(calls) == requests + calls[2]  # only the batch that was stopped came twice
    calls.clear()
    for cache in (tmp_path, folder):
        evaluated(capsys, *command[1:-1], cache)
    assert calls == []


def test_sharing_keys_and_values(nano, capsys, tmp_path):
    strategies = ["full", "first", "mean"]
    options = ("--data-dir", ITEMS, "--limit", 2, "--cache", tmp_path, "--kv", *strategies, "--depths", 2, 6)
    report = evaluated(capsys, NANO, "--tasks", "lambada_openai", *options)
    rows = report["results"]
    assert [(r["kv"], r["depth"]) for r in rows] == [(kv, depth) for kv in strategies for depth in (2, 6)]
    assert len(list(tmp_path.glob("*.jsonl"))) == 3 and report["kv"] == strategies
    assert report["limit"] == report["tasks"]["lambada_openai"]["items"] == 2
    for row in rows:
        nats = []
        for item in items("lambada_openai")[:2]:
            context, _, word = item["text"].rpartition(" ")
            ids = torch.tensor([[*context.encode()]]), torch.tensor([[*f" {word}".encode()]])
            nats.append(forced_log_probs(nano, *ids, row["kv"], steps=row["depth"]).sum().item())
        assert row["perplexity"] == pytest.approx(math.exp(-sum(nats) / 2), rel=1e-4)
    assert len({row["perplexity"] for row in rows}) == 6


def test_tokens_that_leave_on_their_own(nine, capsys, tmp_path):
    """At a fixed depth, what that depth gives; by their state, with the mean depth told."""
    options = ("--tasks", "arc_easy,lambada_openai", "--data-dir", ITEMS, "--cache", tmp_path, "--exit")
    report = evaluated(capsys, NANO, *options, "fixed:1")
    assert report["exit"] == {"policy": "fixed", "threshold": 1.0, "steps": 6}
    assert report["kv"] == ["full"] and report["depths"] == [6]
    at_1 = [row for row in nine[0]["results"] if row["depth"] == 1 and row["task"] in ("arc_easy", "lambada_openai")]
    assert {row["mean_depth"] for row in report["results"]} == {row["mean_depth"] for row in at_1} == {1.0}
    same_numbers([{**row, "depth": 1} for row in report["results"]], at_1, 1e-4)
    report = evaluated(capsys, NANO, *options, "state:0.2", "--depths", 2, 6, "--kv", "full", "mean", "--limit", 2)
    rows = report["results"]
    assert len(rows) == 8 and report["depths"] == [2, 6] and report["kv"] == ["full", "mean"]
    assert all(1 < row["mean_depth"] <= row["depth"] for row in rows) and rows[1]["mean_depth"] < 6
    assert len({row["perplexity"] for row in rows if row["task"] == "lambada_openai"}) == 4


def test_weights_that_are_kept_have_scores_of_their_own(nine, capsys, tmp_path):
    options = ("--tasks", "arc_easy,lambada_openai", "--data-dir", ITEMS, "--cache", tmp_path, "--kv", "full", "mean")
    reports = {kept: evaluated(capsys, NANO, *options, "--weights", kept) for kept in ("fp32", "bf16", "int8")}
    of = {kept: [row["perplexity"] for row in r["results"] if "perplexity" in row] for kept, r in reports.items()}
    assert [r["kept"] for r in reports.values()] == ["fp32", "bf16", "int8"] and reports["int8"]["dtype"] == "fp32"
    assert of["bf16"] == pytest.approx(of["fp32"], rel=1e-4)  # this model's weights are of bf16 anyway
    assert of["int8"] != of["bf16"]
    assert of["int8"] == pytest.approx(of["fp32"], rel=0.06)  # a hundredth of a nat for each of six bytes
    assert evaluated(capsys, NANO, *options)["results"] == reports["fp32"]["results"]
    assert len(list(tmp_path.iterdir())) == 6


def test_the_report_names_every_setting_and_a_table_shows_it(nine, capsys):
    report, folder = nine
    settings = {
        "run", "step", "tasks", "results", "averages", "data_dir", "limit", "batch_size", "grt", "weights", "model",
        "tokenizer", "context", "exit", "routing", "dtype", "device", "kv", "depths", "seed", "commit", "versions",
        "scores", "seconds", "kept",
    }  # fmt: skip
    assert report.keys() == settings and report["exit"] is None and report["depths"] == [1, 6]
    arc = report["tasks"]["arc_challenge"]
    assert (
        arc["version"] == 1.0 and arc["config"]["num_fewshot"] == 0 and "{{question}}" in arc["config"]["doc_to_text"]
    )
    hashes = {task["items_sha256"] for task in report["tasks"].values()}
    assert len(hashes) == 9
    command = ["eval", NANO, "--tasks", "arc_easy, boolq", "--data-dir", ITEMS, "--cache", folder, "--depth", 6]
    assert cli.main([*map(str, command)]) == 0
    out = capsys.readouterr().out
    assert "arc_easy" in out and "average" in out and " +- " in out
    assert "requests that lost the start of their context of 256 tokens: boolq 2" in out
