"""What a user may get wrong, and how it is said: one sentence, no traceback."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from tiny_run import TINY, write_texts

from grt import cli
from grt.config import load
from grt.errors import ConfigError
from grt.runs.checkpoint import load_model

WRONG = [
    ([], "name a command first"),
    (["--verbose"], "name a command first"),
    (["trian"], "unknown command 'trian': did you mean train?"),
    (["train"], "name a preset"),
    (["train", "--config"], "name a preset"),
    (["train", "grt-nanoo", "--out", "{new}"], "unknown preset 'grt-nanoo': did you mean grt-nano?"),
    (["train", "grt-nano"], "missing: --out PATH"),
    (["generate", "x", "--weights", "int4"], "--weights is 'int4': choose one of 'bf16', 'fp32', 'int8'."),
    (["import", "llama", "x", "--out", "{new}"], "kind is 'llama': choose one of 'gpt2'."),
    (["train", "grt-nano", "--out"], "--out has no value"),
    (["train", "grt-nano", "--out", "{new}", "--steps", "3"], "unknown option --steps: did you mean --train.steps?"),
    (["train", "grt-nano", "--out", "{new}", "--optim.Ir=3"], "unknown option --optim.Ir: did you mean --optim.lr?"),
    (["train", "grt-nano", "--out", "{new}", "--zzz"], "unknown option --zzz: --help shows all."),
    (["train", "grt-nano", "--out", "{new}", "--repeats", "3"], "unknown option --repeats: --help shows all."),
    (
        ["train", "grt-nano", "--out", "{new}", "--optim.larning-rate", "3"],
        "unknown option --optim.larning-rate: did you mean --optim.lr?",
    ),
    (["train", "grt-nano", "--out", "{new}", "--modell.layout=8L"], "did you mean --model.layout?"),
    (["train", "grt-nano", "--out", "{new}", "--lr=1"], "unknown option --lr: did you mean --optim.lr?"),
    (["generate", "{run}", "--exit", "foo"], "exit is 'foo': there are fixed, state, kl, entropy, top1, q."),
    (["generate", "{run}", "--exit", "entrpy"], "exit is 'entrpy': did you mean entropy?"),
    (["zzz"], "unknown command 'zzz': `grt --help` shows all."),
    (["info", "zzz"], "unknown preset 'zzz': `grt list` shows all."),
    (["train", "grt-nano", "--out", "{new}", "--block_size=64"], "did you mean --model.context?"),
    (["train", "grt-nano", "--out", "{new}", "--train.steps", "many"], "--train.steps is 'many': give a whole number."),
    (["train", "grt-nano", "--out", "{new}", "--optim.lr", "fast"], "--optim.lr is 'fast': give a number."),
    (["train", "grt-nano", "--out", "{new}", "--optim.lr", "-1"], "optim.lr is -1.0: it must be above 0"),
    (["train", "grt-nano", "--out", "{new}", "--train.steps", "0"], "train.steps is 0: it must be at least 1"),
    (["train", "grt-nano", "--out", "{new}", "--train.dtype", "fp8"], "--train.dtype is 'fp8': choose one of"),
    (
        ["train", "grt-nano", "--out", "{new}", "--train.dtype", "fp16"],
        "--train.dtype fp16 is not supported: choose bf16 or fp32.",
    ),
    (["eval", "{run}", "--dtype", "fp16"], "--dtype fp16 is not supported: choose bf16 or fp32."),
    (["bench", "training", "--dtype", "float16"], "--dtype float16 is not supported: choose bf16 or fp32."),
    (["train", "grt-nano", "--out", "{new}", "--device", "tpu"], "--device is 'tpu': choose one of"),
    (
        ["train", "grt-nano", "--out", "{new}", "--data.path", "{texts}", "--init-from", "{no}"],
        "{no} does not exist: give a run's folder",
    ),
    (
        ["train", "dense-nano", "--out", "{new}", "--data.path", "{texts}", "--init-from", "{run}"],
        "train.init_from {run} has model.method grt, this run dense: start from a dense model of 8 layers (8L)",
    ),
    (["train", "grt-nano", "--out", "{new}", "--model.layout", "2+2"], "model.layout is '2+2', which is not a layout"),
    (["train", "grt-nano", "--out", "{new}", "--train.tokens-per-step", "100"], "is not a multiple of one slot"),
    (["train", "grt-nano", "--out", "{new}", "--model.method", "gtr", "--data.path", "{texts}"], "did you mean grt?"),
    (["train", "grt-nano", "--out", "{new}", "--data.path", "{no}"], "No file or folder {no}"),
    (["train", "grt-nano", "--out", "{new}", "--max-time", "3 parsecs"], "--max-time is '3 parsecs': write it as"),
    (["train", "grt-nano", "--out", "{new}", "--resume"], "{new} holds no run to resume: leave --resume out"),
    (["train", "--resume", "--out", "{no}"], "{no} does not exist"),
    (["train", "--config", "{no}", "--out", "{new}"], "{no} does not exist"),
    (["train", "--config", "{run}/metrics.jsonl", "--out", "{new}"], "metrics.jsonl is not JSON"),
    (["train", "grt-nano", "demo", "--out", "{new}"], "unexpected argument 'demo'"),
    (["train", "demo", "--out", "{run}"], "{run} holds another run"),
    (["train", "--config", "{run}", "--out", "{run}"], "add --resume to go on"),
    (["train", "demo", "--out", "{texts}"], "is not empty and holds no run"),
    (["train", "demo", "--out", "{texts}/00.txt"], "is a file: give --out a folder"),
    (["eval"], "missing: RUN (A run's folder"),
    (["eval", "{no}"], "{no} does not exist: give a run's folder"),
    (["eval", "{texts}"], "{texts}/config.json does not exist"),
    (["eval", "{run}", "{run}"], "unexpected argument '{run}'"),
    (["eval", "{run}", "--depht", "2"], "unknown option --depht: did you mean --depth?"),
    (["eval", "{run}", "--depth", "two"], "--depth is 'two': give whole numbers."),
    (["eval", "{run}", "--depth", "-1"], "depth is -1: give at least 0"),
    (["eval", "{run}", "--windows", "0"], "windows is 0: it must be at least 1"),
    (["eval", "{run}", "--windows", "few"], "--windows is 'few': give a whole number."),
    (["eval", "{run}", "--batch-size", "0"], "batch_size is 0: it must be at least 1"),
    (["eval", "{run}", "--device", "tpu"], "--device is 'tpu': choose one of 'auto', 'cpu', 'cuda', 'mps'."),
    (["eval", "{run}", "--data", "{no}", "--json"], "No file or folder {no}"),
    (["eval", "{run}", "--data", "{short}", "--json"], "give more text or a smaller context"),
    (["generate", "{no}"], "{no} does not exist"),
    (["generate", "{run}", "--prompt"], "--prompt has no value: give one (as --prompt=VALUE"),
    (["generate", "{run}", "--prompt", "hi", "--depth", "0"], "depth is 0: give at least 1"),
    (["generate", "{run}", "--prompt", "hi", "--temperature", "nan"], "temperature is nan"),
    (["generate", "{run}", "--temperature", "-1"], "temperature is -1.0: it must be at least 0"),
    (["generate", "{run}", "--top-p", "0"], "top_p is 0.0: it must be above 0"),
    (["generate", "{run}", "--top-k", "-1"], "top_k is -1: it must be at least 0"),
    (["generate", "{run}", "--max-new-tokens", "-1"], "max_new_tokens is -1: it must be at least 0"),
    (["generate", "{run}", "--max-new-tokens", "many"], "--max-new-tokens is 'many': give a whole number."),
    (["generate", "{run}", "--max-new-tokens", "99"], "at most 15 new tokens, shorten the prompt, or let the window"),
    (["generate", "{run}", "--min-p", "2"], "min_p is 2.0: it must lie between 0 and 1"),
    (["generate", "{run}", "--repetition-penalty", "0"], "repetition_penalty is 0.0: it must lie between 0.01 and 100"),
    (["generate", "{run}", "--kv", "furst"], "kv is 'furst': choose one of full, first"),
    (["generate", "{run}", "--kv", "first", "--crop"], "crop decodes without a cache"),
    (["generate", "{run}", "--stop", ""], "a stop string is empty"),
    (["generate", "{run}", "--dtype", "fp16"], "--dtype fp16 is not supported: choose bf16 or fp32."),
    (["generate", "{run}", "--prompt", "\udcff"], "the prompt is not UTF-8"),
    (["info"], "name a preset or a run's folder, or ask for --table1 alone"),
    (["info", "grt-nanno"], "did you mean grt-nano?"),
    (["info", "{texts}"], "{texts}/config.json does not exist"),
    (["list", "a", "b"], "unexpected argument 'b'"),
    (["prepare", "{texts}"], "missing: --out PATH"),
    (["prepare", "{no}", "--out", "{new}"], "No file or folder {no}"),
    (["prepare", "{texts}", "--out", "{new}", "--tokenizer", "byte"], "unknown tokenizer 'byte': did you mean bytes?"),
    (["prepare", "{texts}", "--out", "{new}", "--val-fraction", "2"], "val_fraction is 2.0"),
    (["demo", "now"], "unexpected argument 'now'"),
]


@pytest.mark.parametrize(("arguments", "message"), WRONG, ids=[" ".join(a)[:70] or "nothing" for a, _ in WRONG])
def test_a_mistake_is_one_sentence(refused, run, texts, tmp_path, arguments, message):
    (tmp_path / "short.txt").write_text("short")
    places = {name: tmp_path / name for name in ("no", "new")}
    places |= {"run": run, "texts": texts, "short": tmp_path / "short.txt"}

    def fill(text: str) -> str:
        for name, place in places.items():
            text = text.replace("{" + name + "}", str(place))
        return text

    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    assert fill(message) in refused(*map(fill, arguments))
    assert before == {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    assert not (tmp_path / "new" / "config.json").exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
@pytest.mark.parametrize(
    "command",
    [
        ("train", "grt-nano", *TINY, "--data.path", "{texts}", "--out", "{new}"), ("eval", "{run}"),
        ("generate", "{run}"), ("bench", "training"), ("demo", "--out", "{new}"),
    ],
    ids=lambda command: command[0],
)  # fmt: skip
def test_a_missing_device_is_named(refused, run, texts, tmp_path, command):
    """Every command that computes has --device, and says so where the device is not there."""
    given = [part.format(texts=texts, new=tmp_path / "new", run=run) for part in command]
    line = refused(*given, "--device", "cuda")
    assert line == "grt: device 'cuda' is not available on this machine: choose one of auto, cpu.\n"


@pytest.mark.parametrize("device", ["auto", "cpu"])
def test_train_on_a_device(grt, texts, tmp_path, device):
    grt("train", "grt-nano", *TINY, "--data.path", texts, "--out", tmp_path / "run", "--device", device)
    assert load(tmp_path / "run" / "config.json").train.device == device


def damage_weights(run: Path) -> None:
    with (run / "checkpoints" / "step-00000004" / "model.safetensors").open("ab") as file:
        file.write(b"x")


def damage_config(run: Path) -> None:
    config = json.loads((run / "config.json").read_text())
    config["optim"]["lr"] = 0.5
    (run / "config.json").write_text(json.dumps(config))


BROKEN = {
    "no checkpoint": (lambda run: shutil.rmtree(run / "checkpoints"), "holds no checkpoint yet: train it first"),
    "damaged weights": (damage_weights, "model.safetensors has .* bytes, not .*: use another checkpoint"),
    "no weights": (
        lambda run: (run / "checkpoints" / "step-00000004" / "model.safetensors").unlink(),
        "model.safetensors cannot be read",
    ),
    "no config": (lambda run: (run / "config.json").unlink(), "config.json does not exist"),
    "broken config": (lambda run: (run / "config.json").write_text("{"), "config.json is not JSON"),
    "another config": (damage_config, "manifest.json is of another config"),
    "empty folder": (lambda run: (shutil.rmtree(run), run.mkdir()), "config.json does not exist"),
}


@pytest.mark.parametrize("what", BROKEN)
def test_a_broken_run_is_one_sentence(refused, run, tmp_path, what):
    damage, message = BROKEN[what]
    copy = tmp_path / "run"
    shutil.copytree(run, copy)
    damage(copy)
    for command in ("eval", "generate"):
        line = refused(command, copy)
        assert str(copy) in line and re.search(message, line)


def test_weights_that_are_not_finite_are_refused(refused, run, monkeypatch):
    from grt.evals import report as eval_report

    def broken(path, device):
        model, config = load_model(path, device)
        model.ln_f.weight.data.fill_(float("nan"))
        return model, config

    monkeypatch.setattr(eval_report, "load_model", broken)
    assert f"the loss of {run} is not finite" in refused("eval", run, "--json")


def test_a_run_whose_text_is_gone_says_what_to_do(refused, grt, tmp_path, monkeypatch):
    texts = write_texts(tmp_path / "here")
    grt("train", "grt-nano", *TINY, "--data.path", texts, "--out", tmp_path / "run")
    texts.rename(tmp_path / "there")
    monkeypatch.setenv("GRT_CACHE", str(tmp_path / "cache"))  # what was prepared of it is gone too
    line = refused("eval", tmp_path / "run")
    assert f"No file or folder {texts}" in line and "--data evaluates on another" in line
    grt("eval", tmp_path / "run", "--data", tmp_path / "there", "--windows", 1)


def test_a_text_that_changed_since_training_is_a_warning(grt, tmp_path):
    texts = write_texts(tmp_path / "texts")
    grt("train", "grt-nano", *TINY, "--data.path", texts, "--out", tmp_path / "run")
    for path in texts.iterdir():
        path.write_text(path.read_text().replace("line", "lane"))
    for place in (tmp_path / "run", tmp_path / "run" / "checkpoints" / "step-00000004"):
        with pytest.warns(UserWarning, match="has changed since it was trained"):
            grt("eval", place, "--windows", 1)


def test_an_error_of_the_system_names_the_file(refused, monkeypatch):
    def fail(arguments):
        raise PermissionError(13, "Permission denied", "/secret")

    monkeypatch.setattr("grt.cli.info.run_info", fail)
    assert (
        refused("info")
        == "grt: /secret: permission denied: check the path, its permissions and the space on its disk.\n"
    )


def test_a_defect_of_ours_keeps_its_traceback(monkeypatch):
    def fail(arguments):
        raise ValueError("a bug")

    monkeypatch.setattr("grt.cli.info.run_info", fail)
    with pytest.raises(ValueError, match="a bug"):
        cli.main(["info"])
    assert cli.exit_code(ConfigError("")) == 2


def test_a_loss_that_is_not_finite_is_3(capsys, texts, tmp_path):
    options = ["--optim.lr", "1e30", "--optim.warmup-steps", "0", "--optim.grad-clip", "1e30"]
    out = tmp_path / "run"
    assert cli.main(["train", "grt-nano", *TINY, *options, "--data.path", str(texts), "--out", str(out)]) == 3
    err = capsys.readouterr().err.splitlines()[-1]
    assert err.startswith("grt: the ") and "is not finite at step" in err and "try a smaller --optim.lr" in err
