"""Checkpoints: what is on disk, which one a run goes on from, which are kept, and a disk that says no."""

import errno
import hashlib
import json
import resource
import shutil
import struct
from pathlib import Path

import pytest
import safetensors.torch
import torch
from damage import FILES, NEW, OLD, cut, folder_instead, refused, resumes_from
from tiny import finish, grt, run_until

from grt import files
from grt.config import config_hash
from grt.methods import build_model
from grt.presets import change
from grt.runs import checkpoint
from grt.runs.checkpoint import CheckpointError, Checkpoints, find_checkpoint, load_model
from grt.train.loop import Trainer

# What is on disk


def test_files_and_manifest(config, new):
    assert {path.name for path in new.iterdir()} == set(FILES)
    manifest = json.loads((new / "manifest.json").read_text())
    contents = {name: (new / name).read_bytes() for name in FILES[:3]}
    assert manifest == {
        "format": 1,
        "config_hash": config_hash(config),
        "step": 10,
        "files": {n: {"sha256": hashlib.sha256(b).hexdigest(), "bytes": len(b)} for n, b in contents.items()},
    }
    state = json.loads(contents["state.json"])
    assert state["step"] == 10 and state["dtype"] == "fp32" and state["best_step"] == 10


def header(path: Path) -> dict:
    content = path.read_bytes()
    return json.loads(content[8 : 8 + struct.unpack("<Q", content[:8])[0]])


def test_each_tensor_is_stored_once_in_fp32(config, new):
    model = build_model(config.model)
    stored = header(new / "model.safetensors")
    assert {name: tuple(entry["shape"]) for name, entry in stored.items()} == {
        name: tuple(p.shape) for name, p in model.named_parameters()
    }
    assert {entry["dtype"] for entry in stored.values()} == {"F32"}
    assert {n.split(".")[0] for n in stored} == {"embed", "prelude", "core", "coda", "ln_f", "rule"}  # no head: tied
    assert {n.split(".")[1] for n in stored if n.startswith("core.")} == {"0"}  # once, not three times
    assert stored["rule.proj.weight"]["shape"] == [16, 32]
    moments = header(new / "optimizer.safetensors")
    assert moments.keys() == {f"{name}.{key}" for name in stored for key in ("exp_avg", "exp_avg_sq")}


def test_a_run_a_checkpoint_and_best_load(config, run, new):
    model, loaded = load_model(run)
    assert loaded == config and not model.training and model.rule.gate.down.bias.dtype == torch.float32
    for name, tensor in safetensors.torch.load_file(new / "model.safetensors").items():
        assert torch.equal(model.state_dict()[name], tensor)
    old, _ = load_model(run / "checkpoints" / OLD)
    assert not torch.equal(old.ln_f.weight, model.ln_f.weight)
    (run / "checkpoints/best").write_text(OLD + "\n")
    assert find_checkpoint(run / "checkpoints/best")[0].name == OLD and find_checkpoint(run)[0].name == NEW


def test_loading_draws_nothing_from_the_callers_generator(run):
    before = torch.get_rng_state()
    load_model(run)
    assert torch.equal(torch.get_rng_state(), before)


# Which checkpoint, of which run


def test_a_checkpoint_of_another_config(config, run, new, tmp_path, capsys):
    other = change(config, optim={"lr": 0.02})
    run_until(other, tmp_path / "other", 10)
    shutil.rmtree(new)
    shutil.copytree(tmp_path / "other/checkpoints" / NEW, new)
    refused(new, new / "manifest.json", "another config")
    with pytest.warns(UserWarning, match="passed over a checkpoint"):
        assert find_checkpoint(run)[0].name == OLD
    resumes_from(config, run, 5, new / "manifest.json", capsys=capsys)


def test_a_checkpoint_under_another_steps_name(run, new):
    shutil.copytree(new, run / "checkpoints/step-00000020")
    refused(run / "checkpoints/step-00000020", "another step")


def test_no_sound_checkpoint_at_all(config, run, new, capsys):
    for name in (OLD, NEW):
        cut(run / "checkpoints" / name / "model.safetensors")
    refused(run, new / "model.safetensors")
    with pytest.raises(CheckpointError, match="can be resumed: put back the config.json or the checkpoint"):
        Trainer(config, run, resume=True)
    told = capsys.readouterr().err
    assert all(f"skipped a checkpoint: {run / 'checkpoints' / name}" in told for name in (OLD, NEW))


def test_a_run_without_checkpoints_and_what_is_no_run(run, tmp_path):
    shutil.rmtree(run / "checkpoints")
    refused(run, run, "no checkpoint yet")
    refused(tmp_path / "nowhere", tmp_path / "nowhere", "does not exist")
    refused(tmp_path, tmp_path / "config.json")
    (tmp_path / "file").write_text("x")
    refused(tmp_path / "file", tmp_path / "file")


@pytest.mark.parametrize(
    "content",
    ["", "{", "[]", "null", "[" * 100_000, '{"model": 3}', '{"modle": {}}', '{"model": {"d_model": "x"}}', "1" * 5000,
     '{"optim": {"lr": %s}}' % ("1" * 400), '{"optim": {"lr": NaN}}', '{"model": {"layout": "%s"}}' % ("1" * 5000),
     '{"train": {"dtype": []}}', "{}"],
    ids=lambda content: content[:30],
)  # fmt: skip
def test_a_damaged_config(run, content):
    (run / "config.json").write_text(content)
    refused(run)
    refused(run / "checkpoints" / NEW)


def test_a_config_that_is_a_folder(run):
    folder_instead(run / "config.json")
    refused(run, run / "config.json")


# Keeping and pointing


def names(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "checkpoints").iterdir() if path.is_dir())


def pointer(run: Path, name: str) -> str:
    return (run / "checkpoints" / name).read_text().strip()


@pytest.mark.parametrize("keep", [1, 2, 3])
def test_the_last_ones_and_the_best_are_kept(config, tmp_path, monkeypatch, keep):
    """Losses are scripted, so that step 4 is the best: of all steps, of fewer it is the worst."""
    from grt.train import loop

    losses = iter([3.0, 1.0, 2.0, 2.0, 2.0])
    real = loop.evaluate

    def evaluate(*arguments, **options):
        result = real(*arguments, **options)
        loss = next(losses)
        return type(result)({k: loss if k == 3 else 9.0 - loss for k in result.loss_by_depth}, 1, 1, 1.0)

    monkeypatch.setattr(loop, "evaluate", evaluate)
    every_step = {"steps": 10, "checkpoint_every": 1, "eval_every": 2, "keep": keep}
    finish(change(config, train=every_step), tmp_path / "run")
    newest = [f"step-{step:08d}" for step in range(11 - keep, 11)]
    assert names(tmp_path / "run") == ["step-00000004", *newest]
    assert (
        pointer(tmp_path / "run", "latest") == "step-00000010" and pointer(tmp_path / "run", "best") == "step-00000004"
    )


def test_leftovers_of_a_killed_writer_go_at_the_next_save(config, run):
    folder = run / "checkpoints"
    (folder / ".step-00000015.99.tmp").mkdir()
    (folder / ".step-00000015.99.tmp/model.safetensors").write_bytes(b"half")
    (folder / ".latest.99.tmp").write_text("step-")
    run_until(config, run, 15, resume=True)
    assert not list(folder.glob(".*")) and pointer(run, "latest") == "step-00000015"


@pytest.mark.parametrize("content", [None, b"", b"step-00000099", b"\xff", b"a\0b", b"x" * 5000])
def test_pointers_are_put_right_at_a_resume(config, run, content):
    for name in ("latest", "best"):
        path = run / "checkpoints" / name
        path.unlink() if content is None else path.write_bytes(content)
    load_model(run)  # a run needs none of its pointers
    Trainer(config, run, resume=True).log.close()
    assert pointer(run, "latest") == NEW and pointer(run, "best") == NEW


# A disk that says no


def snapshot(run: Path) -> dict[str, bytes]:
    folder = run / "checkpoints"
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@pytest.mark.parametrize("call", range(6))
def test_a_full_disk_leaves_earlier_checkpoints_alone(config, run, monkeypatch, call):
    """call: which of the writes of one save fails: weights, moments, state, manifest, latest, best."""
    before, calls = snapshot(run), iter(range(100))

    def write_file(path: Path, content: bytes) -> None:
        real(path, content[: len(content) // 2] if (full := next(calls) == call) else content)
        if full:
            raise OSError(errno.ENOSPC, "No space left on device")

    real = checkpoint.write_file
    trainer = Trainer(change(config, train={"eval_every": 5}), run, resume=True)
    trainer.state.best_loss = 99.0
    for module in (files, checkpoint):
        monkeypatch.setattr(module, "write_file", write_file)
    with pytest.raises(CheckpointError) as caught:
        trainer.run()
    monkeypatch.undo()
    message = str(caught.value)
    assert "step-00000015 cannot be written (No space left on device)" in message and "\n" not in message
    after = snapshot(run)
    assert {n: b for n, b in after.items() if n.startswith((OLD, NEW))} == {
        n: b for n, b in before.items() if n.startswith((OLD, NEW))
    }
    load_model(run / "checkpoints" / NEW)
    assert find_checkpoint(run)[0].name == (NEW if call < 4 else "step-00000015")
    assert not [n for n in after if n.startswith(".step")]


def test_a_file_limit_ends_with_code_2(run):
    """A real refusal by the system, through the command line."""
    before = snapshot(run)
    limit = (50_000, 50_000)  # the moments are larger, the weights and the log are not
    assert (run / "checkpoints" / NEW / "optimizer.safetensors").stat().st_size > limit[0]
    done = grt("train", "--out", run, "--resume", preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, limit))
    assert done.returncode == 2, done.stderr
    resuming, error = done.stderr.splitlines()
    assert resuming.startswith("resuming from") and error.startswith("grt: ") and "cannot be written" in error
    assert snapshot(run) == before


def test_checkpoints_of_an_empty_folder(tmp_path):
    checkpoints = Checkpoints(tmp_path, "", keep=1)
    assert checkpoints.newest_sound() == (None, []) and checkpoints.pointer("best") is None
