"""`grt paper`: what finished runs leave behind, what is named as damaged, and the same runs as a Slurm array."""

import contextlib
import json
import os
import shutil
import subprocess
import zipfile

import pytest
from test_paper import refused
from tiny import finish, quick, tiny, write_text

from grt import cli
from grt.config import config_hash, dump, load
from grt.presets import change
from grt.runs.metrics import read_metrics
from grt.study import slurm
from grt.study.results import LOGGED, Result, Results, collect


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A finished run; tests only read it."""
    folder = tmp_path_factory.mktemp("paper")
    with pytest.MonkeyPatch.context() as patch:
        quick(patch)
        finish(tiny(write_text(folder), train={"steps": 45}), folder / "run")
    return folder / "run"


@pytest.fixture
def config(run):
    return load(run / "config.json")


def test_collecting(run, config, tmp_path):
    folder = collect(run, tmp_path / "nano")
    assert folder == tmp_path / "nano" / "runs" / f"tiny-1337-{config_hash(config)[:8]}"
    assert {p.name for p in folder.iterdir()} == {"config.json", "env.json", "metrics.jsonl", "result.json"}
    steps = [row["step"] for row in read_metrics(folder / "metrics.jsonl") if row["kind"] == "train"]
    assert steps == [1, LOGGED, LOGGED + 1, 2 * LOGGED, 2 * LOGGED + 1]
    found = Results(tmp_path, "nano", [1337]).get(config)
    assert found is not None and found.loss == found.by_depth[3] == found.evaluation["depths"]["3"]["loss"]
    assert found.cost["tokens"] == 45 * 128 and found.cost["seconds"] > 0 and found.inference_flops > 0
    evals = [row for row in read_metrics(folder / "metrics.jsonl") if row["kind"] == "eval"]
    assert [row["step"] for row in evals] == [10, 20, 30, 40, 45]
    assert str(run.parent) not in (folder / "result.json").read_text().replace(config.data.path, "")
    before = {p.name: p.read_bytes() for p in folder.iterdir()}
    assert collect(run, tmp_path / "nano") == folder  # once more: replaced by the same
    assert {p.name: p.read_bytes() for p in folder.iterdir()} == before


def test_what_is_collected_is_whole_or_not_there(run, config, tmp_path, monkeypatch):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("grt.study.results.os.rename", lambda *paths: exec("raise OSError(28, 'No space left')"))
        with pytest.raises(OSError, match="No space left"):
            collect(run, tmp_path / "nano")
    assert not list((tmp_path / "nano" / "runs").iterdir())
    folder = collect(run, tmp_path / "nano")
    folder.rename(folder.with_name(".half.0a1b2c3d"))  # as a kill -9 would leave it
    assert Results(tmp_path, "nano", [1337]).get(config) is None


def test_seeds_are_those_asked_for(run, config, tmp_path):
    collect(run, tmp_path / "nano")
    assert list(Results(tmp_path, "nano", [1337, 42]).by_seed(config)) == [1337]
    assert Results(tmp_path, "nano", [42]).losses(config) == {}
    assert Results(tmp_path, "small", [1337]).runs == {}


def test_two_folders_of_one_run_are_named(run, tmp_path, capsys):
    folder = collect(run, tmp_path / "nano")
    shutil.copytree(folder, tmp_path / "nano" / "runs" / "a copy")
    said = refused(capsys, "build", "tab_seeds", "--results", tmp_path)
    assert said == f"{folder.parent / 'a copy'} and {folder} are the same run: remove one of them."


def cut(text):
    return text[: len(text) // 2]


def with_value(section: str, *keys: str, value=None):
    """Spoils result.json: that value there, or nothing at all."""

    def spoil(text):
        document = json.loads(text)
        at = document[section]
        for key in keys[:-1]:
            at = at[key]
        del at[keys[-1]]
        if value is not None:
            at[keys[-1]] = value
        return json.dumps(document)

    return spoil


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (cut, ""),
        (lambda text: "[" * 100_000, "maximum recursion"),
        (lambda text: "[]", "list indices must be"),
        (lambda text: "{}", "it has no 'evaluation'"),
        (with_value("cost", "parameters"), "it has no 'parameters'"),
        (with_value("cost", "seconds", value="1"), "seconds is '1', no finite number"),
        (with_value("cost", "training_flops", value=10**400), "training_flops is 1000"),
        (with_value("evaluation", "loss", value=float("nan")), "loss is nan, no finite number"),
        (with_value("evaluation", "loss_by_depth", "1", value=float("inf")), "the loss at depth 1 is inf"),
        (with_value("evaluation", "loss_by_depth", "2"), "loss_by_depth is not of the depths 0 to 3"),
        (with_value("evaluation", "loss_by_depth"), "it has no 'loss_by_depth'"),
        (with_value("evaluation", "depths", "3", "flops_per_token"), "it has no 'flops_per_token'"),
        (with_value("evaluation", "data", value=5), "'int' object is not subscriptable"),
        (with_value("evaluation", "data", "sha256", value=5), "data.sha256 is no text"),
    ],
)
def test_a_damaged_result_is_named(run, tmp_path, capsys, spoil, says):
    path = collect(run, tmp_path / "nano") / "result.json"
    path.write_text(spoil(path.read_text()))
    for action in ("build", "run"):
        said = refused(capsys, action, "tab_seeds", "--results", tmp_path)
        assert said.startswith(f"{path} is damaged ({says}") and said.endswith("): remove its folder and run it again.")


@pytest.mark.parametrize("name", ["env.json", "config.json"])
def test_damage_beside_a_result_is_named(run, tmp_path, capsys, name):
    path = collect(run, tmp_path / "nano") / name
    texts = [cut(path.read_text()), "5", "{}", None]
    if name == "env.json":
        texts += ['["cpu", "threads", "torch"]', path.read_text().replace('"torch": "', '"torch": "\\udc80')]
    for text in texts:
        path.unlink() if text is None else path.write_text(text)
        if (name, text) == ("config.json", "{}"):  # a config by defaults, of which the losses are not
            path = path.with_name("result.json")
        said = refused(capsys, "build", "study", "--results", tmp_path)
        assert said.startswith(str(path)) and said.endswith(": remove its folder and run it again.")
        assert said.count(": remove") == 1 and ": give" not in said and ": restore" not in said
        path = path.with_name(name)


def test_accuracy_of_a_depth_task_belongs_to_its_result(run, config):
    document = json.loads((collect(run, run.parent / "collected") / "result.json").read_text())
    task = change(config, data={"path": "task:addition:2"})
    accuracy = {str(k): {"2 operands": 0.5} for k in range(4)}
    for by_depth, says in [
        (accuracy, ""),
        (accuracy | {"0": {}}, "accuracy_by_depth is not of the depths 0 to 3"),
        ({"3": accuracy["3"]}, "accuracy_by_depth is not of the depths 0 to 3"),
        (accuracy | {"1": {"2 operands": None}}, "accuracy at depth 1 of 2 operands is None, no finite number"),
    ]:
        found = Result(run, task, document["evaluation"] | {"accuracy_by_depth": by_depth}, document["cost"], {})
        with pytest.raises(ValueError, match=says) if says else contextlib.nullcontext():
            found.check()


@pytest.mark.parametrize("text", ['{"sharing": {"mean": {}}}', '{"sharing": {"full": {"loss": NaN}}}', "[]"])
def test_damaged_numbers_of_sharing_are_named(tmp_path, capsys, text):
    path = tmp_path / "nano" / "kvcache_bar.json"
    path.parent.mkdir()
    path.write_text(text)
    assert refused(capsys, "build", "fig_kvcache_bar", "--results", tmp_path).startswith(f"{path} is damaged (")


@pytest.mark.parametrize("action", ["list", "build tab_seeds", "run tab_seeds"])
def test_results_are_no_file(tmp_path, capsys, action):
    for path in (tmp_path / "nano", tmp_path / "results"):
        path.write_text("")
        root = tmp_path if path.name == "nano" else path
        said = refused(capsys, *action.split(), "--results", root)
        assert said == f"--results: {path} is a file: give a folder."
        path.unlink()


# Slurm


@pytest.fixture
def sweep(run, config, tmp_path):
    """A file with two runs, one of which is in the results."""
    (tmp_path / "config.json").write_text(dump(config))
    file = tmp_path / "a sweep.py"
    file.write_text(
        "from pathlib import Path\nfrom grt.config import load\nfrom grt.presets import change\n"
        "def RUNS(scale, seeds):\n"
        "    config = load(Path(__file__).parent / 'config.json')\n"
        "    return [change(config, train={'seed': seed, 'steps': 5}) for seed in seeds]\n"
    )
    return file


def asked(sweep, *more) -> list[str]:
    folder = sweep.parent
    return ["paper", "run", str(sweep), "--seeds", "7,8", "--results", str(folder / "results"),
            "--runs", str(folder / "runs"), *more]  # fmt: skip


def test_a_slurm_array_of_what_is_missing(sweep, config, capsys, monkeypatch):
    quick(monkeypatch)
    seven, eight = (config_hash(change(config, train={"seed": seed, "steps": 5}))[:12] for seed in (7, 8))
    assert cli.main(asked(sweep, "--sbatch")) == 0
    script = capsys.readouterr().out
    assert f"RUNS=(\n  {seven}  # tiny, seed 7\n  {eight}  # tiny, seed 8\n)" in script
    assert "#SBATCH --array=0-1\n" in script
    assert "#SBATCH --signal=B:TERM@120\n" in script and not (sweep.parent / "runs").exists()
    fake = sweep.parent / "bin" / "grt"
    fake.parent.mkdir()
    fake.write_text('#!/bin/sh\nfor argument in "$@"; do echo "$argument"; done\n')
    fake.chmod(0o755)
    environment = {"PATH": f"{fake.parent}{os.pathsep}{os.environ['PATH']}", "SLURM_ARRAY_TASK_ID": "1"}
    task = subprocess.run(["bash"], input=script, env=environment, capture_output=True, text=True, check=True)
    assert task.stdout.splitlines() == asked(sweep, "--only", eight)
    assert cli.main(task.stdout.splitlines()) == 0  # what the task does
    assert list(Results(sweep.parent / "results", "nano", [7, 8]).losses(change(config, train={"steps": 5}))) == [8]
    capsys.readouterr()
    assert cli.main(asked(sweep, "--sbatch")) == 0
    script = capsys.readouterr().out
    assert "#SBATCH --array=0-0\n" in script and eight not in script
    assert cli.main(asked(sweep, "--only", eight, seven[:4])) == 0
    assert cli.main(asked(sweep, "--sbatch")) == 2
    assert capsys.readouterr().err == "grt: nothing is missing: all runs are in the results.\n"
    assert cli.main(asked(sweep)) == 0
    assert capsys.readouterr().out == f"All 2 runs of {sweep} are done: nothing to train.\n"


def test_one_time_limit_for_all_that_are_named(config, tmp_path, monkeypatch):
    configs = [change(config, train={"seed": seed}) for seed in range(3)]
    given, clock = [], iter([100.0, 100.0, 104.0, 110.0])
    monkeypatch.setattr(slurm.time, "monotonic", lambda: next(clock))
    monkeypatch.setattr(slurm, "train_and_collect", lambda c, runs, out, left: given.append((c.train.seed, left)) or 0)
    prefixes = [config_hash(c)[:12] for c in configs]
    assert slurm.train_only(configs, prefixes, Results(tmp_path, "nano", [0]), tmp_path, 10.0) == 0
    assert given == [(0, 10.0), (1, 6.0)]


def test_threads_of_those_that_are_named(sweep, config, monkeypatch):
    given = []
    monkeypatch.setattr(slurm, "train_and_collect", lambda c, *where: given.append(c.train.threads) or 0)
    seven = config_hash(change(config, train={"seed": 7, "steps": 5}))
    for more in (["--threads", "3"], []):
        assert cli.main(asked(sweep, "--only", seven, *more)) == 0
    assert given == [3, config.train.threads] == [3, 1]


def test_a_prefix_of_several_trains_none(config, tmp_path, monkeypatch):
    monkeypatch.setattr(slurm, "train_and_collect", None)
    configs = [change(config, train={"seed": seed}) for seed in range(17)]  # of 17 hashes two begin alike
    hashes = [config_hash(c) for c in configs]
    twice = next(h[0] for h in hashes if sum(other[0] == h[0] for other in hashes) > 1)
    n = sum(h[0] == twice for h in hashes)
    with pytest.raises(ValueError, match=f"--only '{twice}' names {n} runs"):
        slurm.train_only(configs, [hashes[0], twice], Results(tmp_path, "nano", [0]), tmp_path, None)


# Archives


@pytest.fixture
def packed(run, config, tmp_path):
    """Results of one run, packed as the study `mine`."""
    collect(run, tmp_path / "nano")
    assert Results(tmp_path, "nano", [1337]).pack("mine", [config]) == 1
    return tmp_path


def test_a_packed_run_is_read_as_its_folder_was(run, config, packed, tmp_path_factory):
    loose = tmp_path_factory.mktemp("loose")
    folder = collect(run, loose / "nano")
    before, after = (Results(root, "nano", [1337]).get(config) for root in (loose, packed))
    assert (before.document, before.environment, before.gate_mean) == (
        after.document,
        after.environment,
        after.gate_mean,
    )
    assert [path.name for path in (packed / "nano" / "runs").iterdir()] == ["mine.zip"]
    with zipfile.ZipFile(packed / "nano" / "runs" / "mine.zip") as archive:
        assert {name: archive.read(name) for name in archive.namelist()} == {
            f"{folder.name}/{path.name}": path.read_bytes() for path in folder.iterdir()
        }
    assert Results(packed, "nano", [1337]).pack("mine", [config]) == 0


def test_packing_adds_to_an_archive_the_same_bytes_in_any_order(run, config, packed, tmp_path_factory):
    other = tmp_path_factory.mktemp("other") / "run"
    finish(change(config, train={"seed": 7}), other)
    collect(other, packed / "nano")
    both, archive = [config, change(config, train={"seed": 7})], packed / "nano" / "runs" / "mine.zip"
    assert Results(packed, "nano", [7]).pack("mine", both) == 1
    bytes_ = archive.read_bytes()
    shutil.unpack_archive(archive, archive.parent)
    archive.unlink()
    assert Results(packed, "nano", [7]).pack("mine", both) == 2 and archive.read_bytes() == bytes_
    assert len(Results(packed, "nano", [7]).runs) == 2


def test_what_a_killed_pack_leaves_is_read_and_packed_on(run, config, packed):
    """Killed between the archive and the folder's removal: both are there, and say the same."""
    folder = collect(run, packed / "nano")
    assert Results(packed, "nano", [1337]).get(config) is not None
    assert Results(packed, "nano", [1337]).pack("mine", [config]) == 1 and not folder.exists()
    path = collect(run, packed / "nano") / "result.json"
    path.write_text(with_value("cost", "seconds", value=1.5)(path.read_text()))
    with pytest.raises(ValueError, match=r"mine\.zip.* are the same run: remove one of them"):
        _ = Results(packed, "nano", [1337]).runs


@pytest.mark.parametrize("damage", ["cut", "flipped", "empty"])
def test_a_damaged_archive_is_named(packed, capsys, damage):
    path = packed / "nano" / "runs" / "mine.zip"
    content = bytearray(path.read_bytes())
    if damage == "flipped":
        content[200] ^= 255
    path.write_bytes({"cut": content[: len(content) // 2], "flipped": content, "empty": b""}[damage])
    said = refused(capsys, "build", "tab_seeds", "--results", packed)
    assert said.startswith(str(path)) and ("restore it" in said or "restore the archive" in said), said


def test_packing_by_the_command_line(sweep, config, capsys):
    quick_asked = asked(sweep)
    assert cli.main(quick_asked) == 0
    capsys.readouterr()
    options = ["paper", "pack", str(sweep), "--seeds", "7,8", "--results", str(sweep.parent / "results")]
    assert cli.main(options) == 0 and capsys.readouterr().out == "a sweep: 2 runs packed\n"
    assert cli.main(["paper", "build", *options[2:]]) == 0
    assert (sweep.parent / "results" / "nano" / "runs" / "a sweep.zip").exists()
