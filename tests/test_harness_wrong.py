"""Mistakes with tasks: one sentence each."""

import sys

import pytest
from nano_tasks import NANO

from grt import cli


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--tasks", "arc_esay"], "tasks has 'arc_esay', which lm-eval does not know: did you mean arc_easy?"),
        (["--tasks", ","], "--tasks has no value: name at least one"),
        (["--tasks", "gsm8k", "--data-dir", "{gsm8k}"], "tasks has 'gsm8k', for which a model has to write"),
        (
            ["--tasks", "piqa", "--data-dir", "{empty}"],
            "piqa.jsonl is missing: --data-dir takes a folder with NAME.jsonl",
        ),
        (["--tasks", "piqa", "--data-dir", "{damaged}"], "tasks has 'piqa', which cannot use {damaged}/piqa.jsonl"),
        (["--tasks", "piqa", "--data-dir", "{other}"], "tasks has 'piqa', which cannot use {other}/piqa.jsonl"),
        (["--tasks", "hollow", "--data-dir", "{hollow}"], "tasks has 'hollow', whose item 1 (counted from 0) asks for"),
        (["--tasks", "piqa", "--windows", "3"], "--windows does nothing with --tasks: leave it out."),
        (["--limit", "3"], "--limit does nothing without --tasks: add --tasks."),
        (["--tasks", "piqa", "--limit", "0"], "limit is 0: it must be at least 1"),
        (["--tasks", "piqa", "--batch-size", "0"], "batch_size is 0: it must be at least 1"),
        (["--tasks", "piqa", "--kv", "fist"], "kv is 'fist': choose one of full"),
        (["--tasks", "piqa", "--depth", "-1"], "depth is -1: give at least 0"),
        (["--tasks", "piqa", "--exit", "fixed:2", "--depths", "1", "3"], "exit fixed:2 asks for more than the 1 steps"),
        (["--tasks", "piqa", "--exit", "kl:0.1", "--budget", "2"], "budget is of texts that a model writes"),
    ],
)
def test_mistakes_are_one_sentence(options, told, tmp_path, capsys):
    folders = {name: tmp_path / name for name in ("empty", "damaged", "other", "gsm8k", "hollow")}
    for folder in folders.values():
        folder.mkdir()
    (folders["damaged"] / "piqa.jsonl").write_text('{"goal": "Cut br')
    (folders["other"] / "piqa.jsonl").write_text('{"question": "is it?"}\n')
    (folders["hollow"] / "hollow.jsonl").write_text('{"text": "a mill"}\n{"text": ""}\n')
    fields = "task: hollow\noutput_type: loglikelihood_rolling\ndoc_to_text: ''\ndoc_to_target: text\n"
    (folders["hollow"] / "hollow.yaml").write_text(f"{fields}metric_list:\n  - metric: bits_per_byte\n")
    (folders["gsm8k"] / "gsm8k.jsonl").write_text('{"question": "1 + 1", "answer": "#### 2"}\n')
    assert cli.main(["eval", str(NANO), *(option.format(**folders) for option in options)]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and told.format(**folders) in err


def test_without_lm_eval(monkeypatch, capsys):
    monkeypatch.delitem(sys.modules, "grt.evals.benchmarks")
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    monkeypatch.setitem(sys.modules, "lm_eval.tasks", None)
    assert cli.main(["eval", str(NANO), "--tasks", "piqa"]) == 2
    assert "tasks needs lm-eval, and lm_eval.tasks is missing: pip install" in capsys.readouterr().err
