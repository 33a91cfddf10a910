"""`grt compare`: costs from the log alone, curves over each axis, and logs that hold only a part."""

import json
import shutil

import pytest
import torch
from PIL import Image
from tiny import finish, quick, rows, tiny, write_text

from grt import cli
from grt.errors import ConfigError
from grt.methods import build_model
from grt.model.cost import training_flops
from grt.model.depth import Depth
from grt.presets import change
from grt.runs import compare
from grt.runs.compare import Finished, comparison_report


@pytest.fixture(autouse=True)
def fast(monkeypatch):
    quick(monkeypatch)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A GRT and a dense run on the same text; tests only read them."""
    with pytest.MonkeyPatch.context() as patch:
        quick(patch)
        folder = tmp_path_factory.mktemp("runs")
        config = tiny(write_text(folder / "data"))
        finish(config, folder / "grt")
        finish(change(config, model={"layout": "5L"}, train={"steps": 20}), folder / "dense")
        return [folder / "grt", folder / "dense"]


def thinned(run, folder, keep):
    """As a committed model folder: the config, the validations and some of the training steps."""
    folder.mkdir()
    shutil.copy(run / "config.json", folder)
    lines = (run / "metrics.jsonl").read_text().splitlines()
    kept = [line for line in lines if (row := json.loads(line))["kind"] != "train" or row["step"] in keep]
    (folder / "metrics.jsonl").write_text("".join(line + "\n" for line in kept))
    return folder


def naive_flops(run) -> float:
    """Token by token: each slot at its own depth, three passes' worth."""
    trained = Finished(run)
    model, config = build_model(trained.config.model), trained.config
    total = 0.0
    for row in rows(run, "train"):
        for depth in row["depth"]:
            tokens = config.train.batch_size * config.model.context
            total += tokens * training_flops(model, Depth(depth), config.model.context)
    return total


def test_rows_say_what_was_run(runs, tmp_path):
    report = comparison_report(runs, "tokens", tmp_path / "c.png")
    assert report.keys() == {"x", "y", "plot", "rows"} and (report["x"], report["y"]) == ("tokens", "loss")
    for run, row, method, layout, steps in zip(
        runs, report["rows"], ("grt", "dense"), ("1+1x3+1", "5L"), (30, 20), strict=True
    ):
        assert (row["run"], row["name"], row["method"], row["layout"]) == (str(run), "tiny", method, layout)
        assert row["parameters"] == sum(p.numel() for p in build_model(Finished(run).config.model).parameters())
        assert row["tokens"] == steps * 128
        assert row["training_flops"] == pytest.approx(naive_flops(run), rel=1e-12)
        assert row["seconds"] == pytest.approx(rows(run, "train")[-1]["seconds"])
        evals = rows(run, "eval")
        assert (row["loss"], row["bits_per_byte"]) == (evals[-1]["loss"], evals[-1]["bits_per_byte"])
        best = min(evals, key=lambda e: e["loss"])
        assert (row["best_loss"], row["best_step"]) == (best["loss"], best["step"])
        assert row["validation_text"] == json.loads((run / "env.json").read_text())["data"]["val"]
    with Image.open(tmp_path / "c.png") as image:
        assert image.format == "PNG" and min(image.size) > 300


@pytest.mark.parametrize("keep", [(), (30,), (1, 7, 30), range(1, 31)], ids=str)
def test_unlogged_steps_cost_what_they_cost(runs, tmp_path, keep):
    """Their depths are drawn again, exactly; seconds are known as far as the log goes."""
    folder = thinned(runs[0], tmp_path / "model", keep)
    whole, part = Finished(runs[0]).row(), Finished(folder).row()
    assert part["training_flops"] == whole["training_flops"] and part["tokens"] == whole["tokens"]
    assert part["seconds"] == (whole["seconds"] if keep else None)
    assert part["validation_text"] is None  # there is no env.json
    report = comparison_report([runs[1], folder], "flops", tmp_path / "c.png")
    assert [row["run"] for row in report["rows"]] == [str(runs[1]), str(folder)]


def test_the_logged_depths_count(runs, tmp_path):
    """What was run, where a log says something else than the sampler would draw."""
    folder = thinned(runs[0], tmp_path / "model", range(1, 31))
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for row in lines:
        if row["kind"] == "train":
            row["depth"] = [3, 3]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in lines))
    with torch.device("meta"):
        each = training_flops(build_model(Finished(folder).config.model), Depth(3), 16)
    assert Finished(folder).row()["training_flops"] == pytest.approx(30 * 128 * each)


def test_the_axis_of_the_curves(runs, tmp_path, monkeypatch):
    drawn = {}
    monkeypatch.setattr(compare, "draw_comparison", lambda curves, label, *_: drawn.update({label: curves}))
    for axis in ("tokens", "flops", "seconds"):
        comparison_report(runs, axis, tmp_path / "c.png")
    assert list(drawn) == ["training tokens", "training FLOPs", "seconds of training"]
    train = rows(runs[0], "train")
    by_tokens, by_flops, by_seconds = (curves[0] for curves in drawn.values())
    assert [curve.label for curve in drawn["training tokens"]] == ["grt", "dense"]
    assert by_tokens.eval_x == [1280, 2560, 3840] and by_tokens.train_x == [row["tokens"] for row in train]
    assert by_seconds.eval_x == pytest.approx([train[step - 1]["seconds"] for step in (10, 20, 30)])
    assert by_flops.eval_x[-1] == pytest.approx(naive_flops(runs[0]))
    assert by_flops.eval_x == sorted(set(by_flops.eval_x)) and len(by_flops.train_x) == 30
    for curve in (by_tokens, by_flops, by_seconds):
        assert curve.eval_loss == [row["loss"] for row in rows(runs[0], "eval")]
        assert curve.train_loss == [row["loss_lm"] for row in train]


def test_runs_of_other_tokenizers_are_drawn_in_bits_per_byte(runs, tmp_path, monkeypatch, capsys):
    other = thinned(runs[1], tmp_path / "other", ())
    env = json.loads((runs[1] / "env.json").read_text())
    env["tokenizer"]["sha256"], env["data"]["val"] = "another", "other ids of the same text"
    (other / "env.json").write_text(json.dumps(env))
    drawn = []
    monkeypatch.setattr(compare, "draw_comparison", lambda curves, _, label, out: drawn.append((label, curves)))
    report = comparison_report([runs[0], other], "tokens", tmp_path / "c.png")
    ((label, curves),) = drawn
    assert report["y"] == "bits_per_byte" and label == "bits per byte"
    assert [c.eval_loss for c in curves] == [
        [r["bits_per_byte"] for r in rows(run, "eval")] for run in (runs[0], other)
    ]
    assert all(curve.train_x == curve.train_loss == [] for curve in curves)
    compare.show_comparison(report)
    said = capsys.readouterr().out
    assert "the runs have different tokenizers: bits per byte compare" in said and "different texts" not in said


def test_runs_of_one_name_are_told_apart(runs, tmp_path, monkeypatch):
    labels = []
    monkeypatch.setattr(compare, "draw_comparison", lambda curves, *_: labels.extend(c.label for c in curves))
    twin = thinned(runs[0], tmp_path / "grt", ())
    comparison_report([runs[0], twin, runs[1]], "tokens", tmp_path / "c.png")
    assert labels == [str(runs[0]), str(twin), "dense"]


def test_the_command(runs, tmp_path, capsys):
    out = tmp_path / "c.svg"
    arguments = ["compare", *map(str, runs), "--x", "flops", "--out", str(out)]
    assert cli.main(arguments) == 0
    said = capsys.readouterr().out
    assert "bits per byte" in said and "training FLOPs" in said and f"plot: {out}" in said
    assert all(f"│ {run} " in said for run in runs)  # the folder tells runs of one preset apart
    assert "1+1x3+1" in said and "5L" in said and "different texts" not in said
    assert "<svg" in out.read_text()
    assert cli.main([*arguments, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report == comparison_report(runs, "flops", out)
    report["rows"][0]["validation_text"] = "another"
    compare.show_comparison(report)
    assert "validated on different texts" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda run, to: [], "no run is named"),
        (lambda run, to: [to / "none"], "none/config.json does not exist"),
        (lambda run, to: [(to / "run", shutil.copytree(run, to / "run"), (to / "run/metrics.jsonl").unlink())[0]],
         "metrics.jsonl does not exist: give a run's folder"),
        (lambda run, to: [(to / "run", shutil.copytree(run, to / "run"), (to / "run/metrics.jsonl").write_text(""))[0]],
         "holds no validation yet: train the run further"),
    ],
)  # fmt: skip
def test_what_cannot_be_compared_is_named(runs, tmp_path, make, message):
    with pytest.raises(ConfigError, match=message):
        comparison_report(make(runs[0], tmp_path), "tokens", tmp_path / "c.png")


def test_time_that_nobody_logged_is_named(runs, tmp_path):
    folder = thinned(runs[0], tmp_path / "model", ())
    with pytest.raises(ConfigError, match="logs no time of training: leave --x seconds out"):
        comparison_report([folder], "seconds", tmp_path / "c.png")
    with pytest.raises(ConfigError, match="c.txt is no picture"):
        comparison_report(runs, "tokens", tmp_path / "c.txt")
