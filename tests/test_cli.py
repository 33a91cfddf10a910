"""The path of a user, from text to a trained model, and what is said where something is wrong.

In one process: `grt` is called as grt.cli.main([...]), which is what the console script calls.
"""

import importlib
import json
import math
import re
import shutil
import warnings
from dataclasses import fields, is_dataclass
from pathlib import Path

import pytest
import torch

from grt import cli
from grt.commands.bench import BENCHES
from grt.commands.paper import ACTIONS
from grt.commands.train import Train
from grt.config import ConfigError, RunConfig, config_hash, dump, load
from grt.data.prepare import load_prepared
from grt.data.tokenizer import ByteTokenizer
from grt.infer.generate import Drawn
from grt.model.context import LoopContext
from grt.model.depth import Depth
from grt.options import Run
from grt.presets import PRESETS, preset
from grt.train.checkpoint import load_model

TINY = [
    *("--model.d-model", "16", "--model.n-heads", "2", "--model.context", "16"),
    *("--train.tokens-per-step", "64", "--train.batch-size", "2", "--train.steps", "4", "--train.eval-windows", "4"),
    *("--train.dtype", "fp32", "--train.threads", "1"),
]
R = 6


def write_texts(folder: Path) -> Path:
    folder.mkdir()
    for i in range(30):
        (folder / f"{i:02}.txt").write_text("".join(f"page {i}, line {j}: größer, naïve, 東京\n" for j in range(9)))
    return folder


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory):
    """A cache of prepared text for this file, no warning format that outlives it, and no timing of the machine."""
    shown = warnings.formatwarning
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("grt.train.loop.peak_flops", lambda device, dtype: (1e11, "made up"))
        patch.setenv("GRT_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield
    warnings.formatwarning = shown


@pytest.fixture(autouse=True)
def threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    return write_texts(tmp_path_factory.mktemp("text") / "texts")


@pytest.fixture(scope="module")
def run(tmp_path_factory, texts):
    """A finished run of four steps; tests only read it."""
    out = tmp_path_factory.mktemp("runs") / "tiny"
    assert cli.main(["train", "grt-nano", *TINY, "--data.path", str(texts), "--out", str(out)]) == 0
    return out


@pytest.fixture
def grt(capsys):
    """Call a command that must work; returns what it printed on stdout."""

    def call(*arguments) -> str:
        capsys.readouterr()
        code = cli.main([str(a) for a in arguments])
        out, err = capsys.readouterr()
        assert code == 0, err
        return out

    return call


@pytest.fixture
def document(grt):
    """Call a command with --json; stdout must be one JSON document without NaN, in one line."""

    def call(*arguments) -> dict:
        out = grt(*arguments, "--json")
        assert out.count("\n") == 1

        def refuse(constant: str) -> None:
            raise AssertionError(f"{constant} is no JSON")

        return json.loads(out, parse_constant=refuse)

    return call


@pytest.fixture
def refused(capsys):
    """Call a command that must be refused: exit code 2, one line on stderr, nothing on stdout. Returns the line."""

    def call(*arguments) -> str:
        capsys.readouterr()
        code = cli.main([str(a) for a in arguments])
        out, err = capsys.readouterr()
        assert (code, out) == (2, ""), (code, out, err)
        assert err.startswith("grt: ") and err.count("\n") == 1, err
        return err

    return call


# Prepare and train


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
    assert re.search(r"^step 4/4  loss \d\.\d+  [\d,]+ tokens/s  MFU [\d.]+%  left 0 s$", out, re.M)
    assert re.search(r"^step 4  validation loss \d\.\d+  bits per byte \d\.\d+  by depth  0: \d", out, re.M)
    assert "bits per byte" in out and f"curve: {tmp_path / 'run' / 'curve.png'}" in out
    assert max(map(len, out.splitlines())) < 500  # no line padded to a made-up width


OPTIONS = {  # option -> (section, field, a value that is not the preset's)
    "--train.steps": ("train", "steps", 3),
    "--train.seed": ("train", "seed", 7),
    "--train.checkpoint-every": ("train", "checkpoint_every", 2),
    "--train.eval-every": ("train", "eval_every", 2),
    "--train.tokens-per-step": ("train", "tokens_per_step", 96),
    "--train.threads": ("train", "threads", 1),
    "--optim.lr": ("optim", "lr", 0.0125),
    "--model.gate-bias": ("model", "gate_bias", 0.5),
}


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
    assert train[0]["lr"] == pytest.approx(0.0125 / 100, rel=0.5)  # a warm-up of 100 steps in the preset
    model, _ = load_model(out)
    assert model.rule.gate.down.bias.mean().item() == pytest.approx(0.5, abs=0.01)


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
    assert rows[-1]["event"] == "signal" and rows[-1]["step"] == 1 and not (out / "sample.txt").exists()
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


# Evaluate

EVAL_KEYS = {
    "run", "step", "data", "windows", "dtype", "device", "loss", "loss_by_depth", "depths", "kv", "exit", "routing",
    "seed", "commit", "seconds", "weights",
}  # fmt: skip


def naive_loss(run: Path, ids: list[int], depth: int) -> tuple[float, int]:
    """Mean loss of non-overlapping windows from the start, one window and one token at a time; and the windows."""
    model, config = load_model(run)
    T, total, n = config.model.context, 0.0, 0
    with torch.no_grad():
        while (n + 1) * T + 1 <= len(ids):
            window = torch.tensor(ids[n * T : n * T + T + 1])
            states = list(model.states(window[None, :-1], LoopContext(), Depth(depth)))
            logits = model.logits(states[-1], LoopContext())[0].double()
            for t in range(T):
                total -= (logits[t, window[t + 1]] - logits[t].logsumexp(-1)).item()
            n += 1
    return total / (n * T), n


@pytest.mark.parametrize("depth", [0, 2, R])
def test_loss_of_a_text_file_is_what_a_plain_loop_computes(document, run, tmp_path, depth):
    text = tmp_path / "new.txt"
    text.write_text("Une phrase toute neuve, à évaluer d'un bout à l'autre: 東京.\n" * 5)
    tokenizer = ByteTokenizer()
    loss, n = naive_loss(run, [*map(int, tokenizer.encode(text.read_text())), tokenizer.eot], depth)
    report = document("eval", run, "--data", text, "--depth", depth)
    assert report["loss"] == pytest.approx(loss, abs=1e-5) and report["windows"] == n
    assert report["loss_by_depth"] == {str(depth): report["loss"]}
    n_bytes = len(text.read_bytes())
    assert report["data"]["tokens"] == n_bytes + 1
    bits = report["loss"] / math.log(2) * (n_bytes + 1) / n_bytes
    assert report["depths"][str(depth)]["bits_per_byte"] == pytest.approx(bits)
    assert report["depths"][str(depth)]["perplexity"] == pytest.approx(math.exp(report["loss"]))


def test_eval_without_data_reads_the_runs_validation_split(document, run):
    report = document("eval", run)
    assert report.keys() - {"bigram_entropy"} == EVAL_KEYS
    assert report["loss_by_depth"].keys() == report["depths"].keys() == {str(k) for k in range(R + 1)}
    assert report["loss"] == report["loss_by_depth"][str(R)]
    for k, row in report["depths"].items():
        assert row.keys() == {"loss", "perplexity", "bits_per_byte", "flops_per_token"}
        assert row["loss"] == report["loss_by_depth"][k]
    costs = [report["depths"][str(k)]["flops_per_token"] for k in range(R + 1)]
    assert costs == sorted(set(costs))
    config = load(run / "config.json")
    assert report["data"].keys() == {"path", "sha256", "tokens"} and report["data"]["path"] == config.data.path
    env = json.loads((run / "env.json").read_text())
    assert report["data"]["sha256"] == env["data"]["val"]
    assert (report["step"], report["seed"], report["dtype"], report["device"]) == (4, 1337, "fp32", "cpu")
    assert (report["kv"], report["exit"], report["routing"]) == ("full", None, None)


@pytest.fixture(scope="module")
def routed_run(tmp_path_factory, texts):
    """As `run`, of a method with a router."""
    out = tmp_path_factory.mktemp("runs") / "routed"
    assert cli.main(["train", "mor-nano", *TINY, "--data.path", str(texts), "--out", str(out)]) == 0
    return out


def test_eval_of_a_routed_run_says_both_losses(document, grt, routed_run, capsys):
    """The headline is the threshold's; top-k over the window, which leaks, stands beside it under its own name."""
    report = document("eval", routed_run)
    assert report.keys() - {"bigram_entropy"} == EVAL_KEYS | {"topk_loss", "extras"}
    assert report["routing"] == "threshold" and report["extras"].keys() == {"depth"}
    assert report["loss"] == report["loss_by_depth"][str(R)] != report["topk_loss"]
    one = document("eval", routed_run, "--routing", "threshold")
    assert one.keys() - {"bigram_entropy"} == EVAL_KEYS | {"extras"} and one["routing"] == "threshold"
    assert one["loss_by_depth"] == report["loss_by_depth"]
    shallow = document("eval", routed_run, "--depth", 2)
    with pytest.warns(UserWarning, match="routing topk looks at later tokens"):
        assert shallow["topk_loss"] == document("eval", routed_run, "--depth", 2, "--routing", "topk")["loss"]
    line = f"top-k over the whole sequence (leaks later tokens, not a result): {report['topk_loss']:.4f}"
    assert line in grt("eval", routed_run).splitlines()
    with pytest.warns(UserWarning, match="routing topk looks at later tokens"):
        leaking = document("eval", routed_run, "--routing", "topk")
    assert leaking["routing"] == "topk" and leaking["loss"] == report["topk_loss"]
    assert leaking.keys() - {"bigram_entropy"} == EVAL_KEYS | {"extras"}


def test_routing_of_a_method_without_a_router_is_refused(refused, run):
    assert "routing is 'topk', but grt has no router for it: leave it out." in refused("eval", run, "--routing", "topk")


def test_eval_of_a_prepared_folder_reads_all_of_it(document, grt, run, texts, tmp_path):
    grt("prepare", texts, "--out", tmp_path / "shards", "--val-fraction", "0.3")
    data = load_prepared(tmp_path / "shards")
    ids = [int(i) for name in ("train", "val") for i in data.split(name).read(0, data.split(name).n_tokens)]
    report = document("eval", run, "--data", tmp_path / "shards", "--depth", R)
    loss, n = naive_loss(run, ids, R)
    assert report["loss"] == pytest.approx(loss, abs=1e-5) and report["windows"] == n
    assert report["data"]["tokens"] == len(ids)


def test_eval_options(document, run):
    report = document("eval", run, "--windows", "3", "--batch-size", "2", "--device", "cpu", "--dtype", "fp32")
    assert report["windows"] == 3
    one = document("eval", run, "--windows", "3", "--batch-size", "1")
    assert report["loss"] == pytest.approx(one["loss"], abs=1e-6)
    half = document("eval", run, "--windows", "3", "--dtype", "bf16")
    assert half["dtype"] == "bf16" and half["loss"] == pytest.approx(one["loss"], abs=0.05) and half != one


def test_eval_at_chosen_depths_and_beyond_training(document, run):
    assert list(document("eval", run, "--depth", "0", "2")["loss_by_depth"]) == ["0", "2"]
    with pytest.warns(UserWarning, match=f"depth {R + 2} is beyond the {R} steps") as seen:
        report = document("eval", run, "--depth", R, R + 2)
    assert len(seen) == 1 and list(report["loss_by_depth"]) == [str(R), str(R + 2)]


def test_a_warning_is_one_line(grt):
    grt("--version")
    assert warnings.formatwarning("two\n lines", UserWarning, "file.py", 3) == "warning: two lines\n"


def test_eval_prints_a_table(grt, run):
    out = grt("eval", run, "--depth", "0", R)
    assert f"{run} at step 4 on" in out and "bits per byte" in out and "bigram entropy of this text" in out
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in out.splitlines() if line.startswith("│")]
    assert [row[0] for row in rows] == ["0", str(R)] and all(len(row) == 5 for row in rows)


def test_a_run_a_checkpoint_and_a_model_folder_are_the_same(document, run, tmp_path):
    """A model folder (as committed under models/) is a checkpoint without optimizer, beside its config."""
    checkpoint = run / "checkpoints" / "step-00000004"
    model = tmp_path / "model"
    model.mkdir()
    shutil.copy(run / "config.json", model)
    shutil.copy(checkpoint / "model.safetensors", model)
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    manifest["files"] = {"model.safetensors": manifest["files"]["model.safetensors"]}
    (model / "manifest.json").write_text(json.dumps(manifest))
    losses = [document("eval", place, "--windows", "2")["loss_by_depth"] for place in (run, checkpoint, model)]
    assert losses[0] == losses[1] == losses[2]
    infos = [document("info", place) for place in (run, checkpoint, model)]
    assert infos[0] == infos[1] == infos[2]
    texts = [document("generate", place, "--max-new-tokens", "8")["text"] for place in (run, checkpoint, model)]
    assert texts[0] == texts[1] == texts[2]


# Generate


def test_generate_document(document, run):
    report = document("generate", run, "--prompt", "größe 東", "--max-new-tokens", "5")
    assert report.keys() == {"prompt", "text", "tokens", "finish_reason", "depths", "mean_depth", "tokens_per_s"}
    assert report["prompt"] == "größe 東" and report["text"] == ByteTokenizer().decode(report["tokens"])
    if report["finish_reason"] == "length":
        assert len(report["tokens"]) == 5
    assert report["depths"] == [R] * len(report["tokens"]) and report["mean_depth"] == R
    assert report["tokens_per_s"] > 0


def test_generate_options_take_effect(document, run):
    def text(*options) -> list[int]:
        return document("generate", run, "--prompt", "page", "--max-new-tokens", "12", *options)["tokens"]

    assert text("--seed", "1") == text("--seed", "1") != text("--seed", "2")
    greedy = text("--temperature", "0")
    assert greedy == text("--temperature", "0", "--seed", "5")
    assert greedy == text("--top-k", "1") == text("--top-p", "1e-9")  # one token is left to draw from
    assert greedy == text("--min-p", "1") != text("--min-p", "1", "--repetition-penalty", "9")
    assert text("--temperature", "0.01") != text("--temperature", "3")
    assert greedy != text("--temperature", "0", "--kv", "last") or greedy != text("--temperature", "0", "--kv", "first")
    assert document("generate", run, "--depth", "2", "--max-new-tokens", "3")["depths"] == [2, 2, 2]
    with pytest.warns(UserWarning, match="depth 8 is beyond"):
        assert document("generate", run, "--depth", "8", "--max-new-tokens", "1")["mean_depth"] == 8
    assert text("--device", "cpu") == text()


def test_generate_at_depth_1_differs_from_R(run):
    model, _ = load_model(run)
    ids = torch.arange(8)[None]
    assert not torch.equal(model(ids, Depth(1)), model(ids))


class Scripted:
    """In the place of a Stream: one row of given ids."""

    max_new_tokens = 99

    def __init__(self, ids):
        self.ids = ids

    def __call__(self, *_, **__):
        return self

    def __iter__(self):
        yield from ([Drawn(i, -0.5, R)] for i in self.ids)


@pytest.mark.parametrize(
    "ids", [list("añ東😀z".encode()), [0xE6, 0x9D], [0xFF, 65, 0xC3], list("é\ufffd".encode()), []], ids=str
)
def test_streamed_text_is_the_text_whatever_the_bytes(monkeypatch, grt, document, run, ids):
    monkeypatch.setattr("grt.report.Stream", Scripted(ids))
    assert grt("generate", run, "--prompt", "→") == "→" + bytes(ids).decode(errors="replace") + "\n"
    report = document("generate", run, "--prompt", "→")
    assert report["text"] == bytes(ids).decode(errors="replace") and report["finish_reason"] == "stop"


def test_characters_are_streamed_whole(monkeypatch, run):
    from grt.report import generation_report

    monkeypatch.setattr("grt.report.Stream", Scripted("東é".encode()))
    pieces: list[str] = []
    generation_report(run, "", show=pieces.append)
    assert [piece for piece in pieces if piece] == ["東", "é"]


@pytest.mark.parametrize("stop", [["w\n"], ["zz", "w\n", "\nx"], ["two"]], ids=str)
def test_a_stop_string_ends_the_text(monkeypatch, grt, document, run, stop):
    monkeypatch.setattr("grt.report.Stream", Scripted(b"one tw\nxtwo tail"))
    options = [part for text in stop for part in ("--stop", text)]
    want = "one tw\nx" if stop == ["two"] else "one t"
    assert grt("generate", run, *options) == want + "\n"
    report = document("generate", run, *options, "--logprobs")
    assert report["text"] == want and report["finish_reason"] == "stop"
    assert report["tokens"] == list((want + ("two" if stop == ["two"] else "w\n")).encode())
    assert report["logprobs"] == [-0.5] * len(report["tokens"])


def test_logprobs_of_the_document(document, run):
    report = document("generate", run, "--prompt", "pa", "--max-new-tokens", "5", "--logprobs", "--top-k", "1")
    model, _ = load_model(run)
    ids = torch.tensor([[*b"pa", *report["tokens"]]])
    want = model(ids)[0, 1:-1].log_softmax(-1).gather(1, ids[0, 2:, None]).flatten().tolist()
    assert report["logprobs"] == pytest.approx(want, abs=1e-5)


def test_generate_in_bf16(document, run):
    def logprobs(dtype: str) -> list[float]:
        options = ("--prompt", "page", "--max-new-tokens", "6", "--logprobs", "--temperature", "0")
        return document("generate", run, *options, "--dtype", dtype)["logprobs"]

    assert logprobs("bf16") != logprobs("fp32") and logprobs("bf16") == pytest.approx(logprobs("fp32"), abs=0.1)
    assert logprobs("auto") in (logprobs("bf16"), logprobs("fp32"))


def test_an_empty_prompt_starts_a_document(document, run):
    assert document("generate", run, "--max-new-tokens", "4") == {
        **document("generate", run, "--prompt", "", "--max-new-tokens", "4"),
        "tokens_per_s": pytest.approx(0, abs=1e9),
    }
    nothing = document("generate", run, "--max-new-tokens", "0")
    assert (nothing["text"], nothing["tokens"], nothing["depths"]) == ("", [], [])


def test_a_prompt_that_is_longer_than_the_context(document, refused, run):
    long = ("generate", run, "--prompt", "x" * 100, "--max-new-tokens", "2")
    assert "a prompt of 100 tokens leaves no room for new ones in model.context 16: shorten it" in refused(*long)
    report = document(*long, "--crop")
    assert report["prompt"] == "x" * 100 and len(report["tokens"]) == 2


def test_generate_fills_the_context(document, run):
    report = document("generate", run, "--prompt", "12345", "--temperature", "0")
    assert len(report["tokens"]) == 11 and report["finish_reason"] == "length"
    beyond = document("generate", run, "--prompt", "12345", "--temperature", "0", "--crop", "--max-new-tokens", "30")
    assert len(beyond["tokens"]) == 30 and beyond["tokens"][:11] == report["tokens"]


def test_ctrl_c_while_generating_is_130(monkeypatch, capsys, run):
    def ids():
        yield 65
        raise KeyboardInterrupt

    monkeypatch.setattr("grt.report.Stream", Scripted(ids()))
    assert cli.main(["generate", str(run)]) == 130
    out, err = capsys.readouterr()
    assert out == "A" and err == "grt: interrupted\n"


# Info and list


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


# What is refused, and how it is said

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
    (["train", "grt-nano", "--out", "{new}", "--zzz"], "unknown option --zzz"),
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
    (["prepare", "{texts}", "--out", "{new}", "--tokenizer", "byte"], "Unknown tokenizer 'byte'"),
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
    from grt import eval_report

    def broken(path, device):
        model, config = load_model(path, device)
        model.ln_f.weight.data.fill_(float("nan"))
        return model, config

    monkeypatch.setattr(eval_report, "load_model", broken)
    assert f"the loss of {run} is not finite" in refused("eval", run, "--json")


def test_a_run_whose_text_is_gone_says_what_to_do(refused, grt, tmp_path):
    texts = write_texts(tmp_path / "here")
    grt("train", "grt-nano", *TINY, "--data.path", texts, "--out", tmp_path / "run")
    texts.rename(tmp_path / "there")
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

    monkeypatch.setattr("grt.commands.info.run_info", fail)
    assert (
        refused("info")
        == "grt: /secret: permission denied: check the path, its permissions and the space on its disk.\n"
    )


def test_a_defect_of_ours_keeps_its_traceback(monkeypatch):
    def fail(arguments):
        raise ValueError("a bug")

    monkeypatch.setattr("grt.commands.info.run_info", fail)
    with pytest.raises(ValueError, match="a bug"):
        cli.main(["info"])
    assert cli.exit_code(ConfigError("")) == 2


def test_a_loss_that_is_not_finite_is_3(capsys, texts, tmp_path):
    options = ["--optim.lr", "1e30", "--optim.warmup-steps", "0", "--optim.grad-clip", "1e30"]
    out = tmp_path / "run"
    assert cli.main(["train", "grt-nano", *TINY, *options, "--data.path", str(texts), "--out", str(out)]) == 3
    err = capsys.readouterr().err.splitlines()[-1]
    assert err.startswith("grt: the ") and "is not finite at step" in err and "try a smaller --optim.lr" in err


# Help


def options_of(command: type, prefix: str = "--") -> list[str]:
    """The options that the fields of a command's dataclass stand for, positional ones left out."""
    found = []
    for f in fields(command):
        kind = RunConfig if f.name == "run" and command is Train else f.type
        if "Positional" in str(kind) or kind is Run:
            continue
        if isinstance(kind, type) and is_dataclass(kind):
            found += options_of(kind, prefix if kind is RunConfig else f"{prefix}{f.name}.")
        else:
            found.append(prefix + f.name.replace("_", "-"))
    return found


def help_of(capsys, *arguments: str) -> str:
    with pytest.raises(SystemExit) as stop:
        cli.main([*arguments, "--help"])
    out, err = capsys.readouterr()
    assert not stop.value.code and not err
    return out


PARTS = {"bench": BENCHES, "paper": ACTIONS}  # commands that have commands


@pytest.mark.parametrize("name", [f"{c} {part}".strip() for c in cli.COMMANDS for part in PARTS.get(c, [""])])
def test_help_names_every_option(capsys, name):
    out = help_of(capsys, *name.split())
    assert out.startswith(f"usage: grt {name}")
    file, what = name.split()[0], name.split()[-1]
    command = getattr(importlib.import_module(f"grt.commands.{file}"), what.capitalize())
    missing = [option for option in options_of(command) if not re.search(rf"{re.escape(option)}\b", out)]
    assert not missing
    if name == "train":
        assert {*OPTIONS, "--data.path", "--out", "--resume", "--max-time"} <= {*re.findall(r"--[\w.-]+", out)}


def test_help_of_a_preset_shows_its_values(capsys):
    assert re.search(r"--model\.layout.*?default: 8L", help_of(capsys, "train", "dense-nano"), re.S)


def test_usage_names_every_command(grt):
    out = grt("--help")
    assert out == grt("-h") and all(re.search(rf"^  {name} +\w", out, re.M) for name in cli.COMMANDS)


def test_every_file_of_the_commands_is_a_command():
    folder = Path(cli.__file__).parent / "commands"
    assert {path.stem for path in folder.glob("*.py")} == {"__init__", *cli.COMMANDS}


def test_version(grt):
    assert re.fullmatch(r"grt \d+\.\d+\.\d+\n", grt("--version"))


def test_demo_replaces_an_earlier_demo_and_nothing_else(monkeypatch, capsys, run, tmp_path):
    calls = []
    monkeypatch.setattr("grt.commands.demo.train_and_show", lambda *a, **k: calls.append((a, k)) or 0)
    out = tmp_path / "demo"
    shutil.copytree(run, out)
    before = sorted(out.rglob("*"))
    assert cli.main(["demo", "--out", str(out)]) == 0 and sorted(out.rglob("*")) == before  # train will refuse it
    (out / "config.json").write_text(dump(preset("demo")))
    (out / "notes.txt").write_text("mine")
    assert cli.main(["demo", "--out", str(out)]) == 0 and {path.name for path in out.iterdir()} == {
        ".lock",
        "notes.txt",
    }
    assert len(calls) == 2 and calls[0][0][0].name == "demo"
