"""`grt info` and `grt list`, as a user calls them."""

import re
import shutil

import pytest

from grt.presets import PRESETS
from grt.runs.checkpoint import load_model


def test_info_of_a_preset(document):
    report = document("info", "grt-nano")
    assert report.keys() == {
        "name", "layout", "method", "parameters", "flops_per_token", "kv_bytes_per_token", "decode_memory_bytes",
        "block_executions",
    }  # fmt: skip
    assert (report["name"], report["layout"], report["method"]) == ("grt-nano", "1+1x6+1", "grt")
    assert report["block_executions"] == 8
    assert report["parameters"].keys() == {"total", "without_positions", "without_embeddings", "padding"}
    assert report["flops_per_token"].keys() == {"paper", "executed", "head", "train_mean", "training"}
    assert report["kv_bytes_per_token"].keys() == report["decode_memory_bytes"].keys()
    assert all(by_batch.keys() == {"1", "32"} for by_batch in report["decode_memory_bytes"].values())


def test_info_counts_the_parameters_of_the_run(document, run):
    model, config = load_model(run)
    report = document("info", run)
    assert report["parameters"]["total"] == sum(p.numel() for p in model.parameters())
    assert report["layout"] == config.model.layout


def test_info_of_a_dense_preset(document):
    assert document("info", "dense-nano")["method"] == "dense"


def test_info_and_list_tables_are_whole_when_piped(grt, run):
    out = grt("info", run)
    assert "parameters, total" in out and "KV bytes per token, full  " in out
    assert out.count("first, last, mean, first:all") == 3 and "first:all, batch 32 (bf16, full context)" in out
    out = grt("list", run.parent)
    assert str(run) in out and "grt-nano" in out and "dense-nano" in out and "ladder" in out
    assert re.search(rf"│ {re.escape(str(run))} +│ grt-nano +│ grt +│ 1\+1x6\+1 │ 4/4 ", out)
    assert max(map(len, out.splitlines())) < 500


def test_list_of_some_presets(grt, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    out = grt("list", "grt-")
    names = re.findall(r"^│ (\S+)", out, re.M)
    assert names[:2] == ["grt-nano", "grt-nano-paper"] and names[-1] == "grt-large-isoparam"
    assert all("grt-" in name for name in names) and "runs" not in out
    assert re.findall(r"^presets, (\w+)", out, re.M) == ["nano", "small", "medium", "large"]
    out = grt("list")
    assert sorted(re.findall(r"^│ (\S+)", out, re.M)) == sorted(PRESETS) and "no runs under runs" in out
    (tmp_path / "grt-").mkdir()  # a folder comes first
    assert "no runs under grt-" in grt("list", "grt-")


def test_list_goes_on_past_broken_runs_and_takes_names_as_they_are(grt, run, tmp_path):
    shutil.copytree(run, tmp_path / "[bold]a :smile:")
    for name, config, metrics in [
        ("broken", "{", "{}"),
        ("unknown", '{"mdoel": 3}', ""),
        ("odd", (run / "config.json").read_text(), '[1]\n{"a": 2}\n3'),
    ]:
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(config)
        (tmp_path / name / "metrics.jsonl").write_text(metrics)
    with pytest.warns(UserWarning, match=r"odd/metrics.jsonl: line 1 and 2 more cannot be read"):
        out = grt("list", tmp_path)
    assert f"│ {tmp_path / '[bold]a :smile:'} │" in out and re.search(rf"{tmp_path / 'odd'} +│.*│ 0/4", out)
    assert f"left out: {tmp_path / 'broken' / 'config.json'} is not JSON" in out
    assert f"left out: {tmp_path / 'unknown' / 'config.json'}: unknown field 'mdoel'" in out


def test_list_without_runs(grt, tmp_path):
    assert f"no runs under {tmp_path / 'none'}" in grt("list", tmp_path / "none")
