"""`grt prepare` and `grt train`, as a user calls them."""

import json
import re
from pathlib import Path

import pytest
import torch
from tiny_run import OPTIONS, TINY

from grt.config import config_hash, load
from grt.data.prepare import load_prepared
from grt.runs.checkpoint import load_model


def test_prepare_prints_the_folder_and_train_reads_it(grt, texts, tmp_path):
    out = grt("prepare", texts, "--out", tmp_path / "shards", "--val-fraction", "0.2", "--tokenizer", "bytes")
    assert out == f"{tmp_path / 'shards'}\n"
    data = load_prepared(tmp_path / "shards")
    assert {name: data.split(name).n_documents > 0 for name in ("train", "val")} == {"train": True, "val": True}
    grt("train", "grt-nano", *TINY, "--data.path", tmp_path / "shards", "--out", tmp_path / "run")
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if row["kind"] == "train"] == [1, 2, 3, 4]


def test_a_run_explains_itself(run):
    names = {path.relative_to(run).as_posix() for path in run.rglob("*")}
    assert {"config.json", "env.json", "metrics.jsonl", "curve.png", "sample.txt", "checkpoints/latest"} <= names
    checkpoint = (run / "checkpoints" / "latest").read_text().strip()
    assert {f"checkpoints/{checkpoint}/{n}.safetensors" for n in ("model", "optimizer")} <= names


def test_training_says_where_it_stands(grt, texts, tmp_path):
    out = grt("train", "grt-nano", *TINY, "--data.path", texts, "--out", tmp_path / "run")
    assert re.search(r"^grt-nano: grt 1\+1x6\+1, [\d,]+ parameters, fp32 on cpu \(1 threads\)", out)
    assert re.search(r"^step 4/4  loss \d\.\d+  [\d,]+ tokens/s  MFU [\d.]+%$", out, re.M)
    assert re.search(r"^step 4  validation loss \d\.\d+  bits per byte \d\.\d+  by depth  0: \d", out, re.M)
    assert "bits per byte" in out and f"curve: {tmp_path / 'run' / 'curve.png'}" in out
    assert max(map(len, out.splitlines())) < 500  # no line padded to a made-up width


def test_documented_options_exist_and_take_effect(grt, texts, tmp_path):
    out = tmp_path / "run"
    given = [str(part) for option, (_, _, value) in OPTIONS.items() for part in (option, value)]
    others = [part for pair in zip(TINY[::2], TINY[1::2], strict=True) if pair[0] not in OPTIONS for part in pair]
    torch.set_num_threads(2)
    grt("train", "grt-nano", *others, *given, "--train.keep", 9, "--data.path", texts, "--out", out)
    config = load(out / "config.json")
    assert {o: getattr(getattr(config, s), f) for o, (s, f, _) in OPTIONS.items()} == {
        option: value for option, (_, _, value) in OPTIONS.items()
    }
    assert config.data.path == str(texts)
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    train = [row for row in rows if row["kind"] == "train"]
    assert [row["step"] for row in train] == [1, 2, 3] and train[-1]["tokens"] == 3 * 96
    assert all(len(row["depth"]) == 96 // 32 for row in train)
    assert [row["step"] for row in rows if row["kind"] == "eval"] == [2, 3]
    assert [row["step"] for row in rows if row.get("event") == "save"] == [2, 3]
    assert torch.get_num_threads() == 1
    assert [row["lr"] for row in train] == [0.0125 * step / 100 for step in (1, 2, 3)]  # a warm-up of 100 steps
    model, _ = load_model(out)
    moved = (model.rule.gate.down.bias - 0.5).abs().max()
    assert 0 < moved < 7.6e-4  # a step of AdamW is of the rate at most: 6 times 0.0125 / 100


def test_the_seed_decides_the_losses(grt, texts, tmp_path, run):
    def losses(folder: Path) -> list[float]:
        rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        return [row["loss"] for row in rows if row["kind"] == "train"]

    seeded = [*TINY, "--data.path", texts, "--train.seed"]
    grt("train", "grt-nano", *seeded, 1337, "--out", tmp_path / "same")
    grt("train", "grt-nano", *seeded, 1338, "--out", tmp_path / "other")
    assert losses(tmp_path / "same") == losses(run) != losses(tmp_path / "other")


@pytest.mark.parametrize("form", ["file", "folder", "glued"])
def test_a_config_reproduces_the_run(grt, run, tmp_path, form):
    out = tmp_path / "again"
    source = run if form == "folder" else run / "config.json"
    grt("train", *([f"--config={source}", f"--out={out}"] if form == "glued" else ["--config", source, "--out", out]))
    assert config_hash(load(out / "config.json")) == config_hash(load(run / "config.json"))
    checkpoint = Path("checkpoints") / "step-00000004" / "manifest.json"
    ours, theirs = (json.loads((folder / checkpoint).read_text())["files"] for folder in (out, run))
    assert ours["model.safetensors"] == theirs["model.safetensors"]  # the same sha256: the same weights, bit for bit


def test_options_override_a_config(grt, run, tmp_path):
    grt("train", "--config", run / "config.json", "--out", tmp_path / "longer", "--train.steps", "5")
    assert load(tmp_path / "longer" / "config.json").train.steps == 5


@pytest.mark.parametrize("form", ["preset", "out only", "glued", "preset last"])
def test_resume_goes_on_from_the_last_checkpoint(grt, run, texts, tmp_path, form):
    out = tmp_path / "run"
    options = [*TINY, "--data.path", texts]
    said = grt("train", "grt-nano", *options, "--train.checkpoint-every", "1", "--out", out, "--max-time", "0.0001s")
    assert f"saved step 1; go on with --resume (grt train --resume --out {out})" in said
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    event = next(row for row in rows if row["kind"] == "event" and row["event"] == "signal")
    assert event["step"] == 1 and rows[-1]["early"] and not (out / "sample.txt").exists()
    grt("train", *{
        "preset": ["grt-nano", *options, "--resume", "--out", out],
        "out only": ["--resume", "--out", out],
        "glued": [f"--out={out}", "--resume"],
        "preset last": ["--out", out, *options, "--resume", "grt-nano"],
    }[form])  # fmt: skip
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if row["kind"] == "train"] == [1, 2, 3, 4]
    assert any(row.get("event") == "resume" for row in rows)
    model = Path("checkpoints") / "step-00000004" / "model.safetensors"
    assert (out / model).read_bytes() == (run / model).read_bytes()  # as if it had never stopped
