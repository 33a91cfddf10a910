"""`grt eval`, as a user calls it."""

import json
import math
import shutil
import warnings
from pathlib import Path

import pytest
import torch
from tiny_run import TINY, R

from grt import cli
from grt.backbone.context import LoopContext
from grt.config import load
from grt.data.prepare import load_prepared
from grt.data.tokenizer import ByteTokenizer
from grt.model.depth import Depth
from grt.runs.checkpoint import load_model

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
    assert half["dtype"] == "bf16" and half["loss"] != one["loss"]
    assert half["loss"] == pytest.approx(one["loss"], abs=1e-4)


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
