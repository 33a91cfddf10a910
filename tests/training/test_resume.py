"""Resuming is exact: a run that was killed, however often and wherever, ends as one that was not."""

import json
import shutil
from pathlib import Path

import pytest
from tiny import finish, grt, kill_at_step, result, rows, run_until

from grt.config import dump, load
from grt.data.prepare import prepare
from grt.errors import ConfigError
from grt.presets import change
from grt.runs.checkpoint import CheckpointError, load_model
from grt.train.loop import Trainer


def test_the_reference_has_noise_drawn_depth_and_two_slots(straight, config, tmp_path):
    """Without these the other tests would show less than they say."""
    depths = {depth for row in straight[0] for depth in eval(row[-1])}
    assert config.n_slots == 2 and depths == {1, 2, 3}
    silent = change(config, model={"state_noise": 0.0, "gate_noise": 0.0})
    finish(silent, tmp_path / "silent")
    other = result(tmp_path / "silent")
    assert other[0][0] != straight[0][0] and other[1] != straight[1]


def test_kill_9_and_resume_on_the_command_line(config, straight, tmp_path):
    out = tmp_path / "run"
    kill_at_step(config, out, 15)
    assert (out / "metrics.jsonl").read_text().endswith('"st')
    done = grt("train", "--out", out, "--resume")
    assert done.returncode == 0, done.stderr
    assert done.stderr.strip() == f"resuming from {out / 'checkpoints/step-00000015'}"
    assert result(out) == straight
    assert rows(out, "event")[-1]["event"] == "save"
    assert [row["step"] for row in rows(out, "event") if row["event"] == "resume"] == [15]


def test_two_kills_and_resumes(config, straight, tmp_path):
    out = tmp_path / "run"
    kill_at_step(config, out, 7)  # back to 5
    kill_at_step(config, out, 23, resume=True)  # back to 20
    finish(config, out, resume=True)
    assert result(out) == straight
    assert [row["step"] for row in rows(out, "event") if row["event"] == "resume"] == [5, 20]


def test_killed_before_the_first_checkpoint(config, straight, tmp_path, capsys):
    out = tmp_path / "run"
    kill_at_step(config, out, 3)
    (out / "env.json").unlink()
    finish(config, out, resume=True)
    assert "has no checkpoint yet: starting from step 0" in capsys.readouterr().err
    assert result(out) == straight and (out / "env.json").exists()


@pytest.mark.parametrize("already", [(), ("env.json",), (".env.json.77.tmp",), ("env.json", ".config.json.77.tmp")])
def test_a_folder_killed_before_its_config_was_written_is_free(config, tmp_path, already):
    out = tmp_path / "run"
    out.mkdir()
    for name in already:
        (out / name).write_text("{")
    with pytest.raises(ConfigError, match="no run to resume"):
        Trainer(config, out, resume=True)
    run_until(config, out, 1)


@pytest.mark.parametrize("cut", [1, 20, -1])
def test_every_step_is_logged_once_when_the_last_line_was_cut(config, straight, tmp_path, cut):
    """cut: bytes of the last line that are left; -1: all but its newline."""
    out = tmp_path / "run"
    run_until(config, out, 18)
    lines = (out / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    (out / "metrics.jsonl").write_bytes(b"".join([*lines[:-1], lines[-1][:cut]]))
    finish(config, out, resume=True)
    assert result(out) == straight
    for kind, steps in (("train", range(1, 31)), ("eval", (10, 20, 30)), ("monitor", (10, 20, 30))):
        assert [row["step"] for row in rows(out, kind)] == list(steps)
    assert [row["step"] for row in rows(out, "event") if row["event"] == "save"] == [5, 10, 15, 20, 25, 30]


@pytest.mark.parametrize(
    "changed",
    [{"eval_every": 2}, {"eval_every": 10**6}, {"checkpoint_every": 1}, {"checkpoint_every": 10**6}, {"keep": 1}],
    ids=str,
)
def test_watching_and_saving_change_nothing(config, straight, tmp_path, changed):
    finish(change(config, train=changed), tmp_path / "run")
    assert result(tmp_path / "run") == straight


def test_how_often_one_evaluates_may_change_at_a_resume(config, straight, tmp_path):
    run_until(config, tmp_path / "run", 12)
    finish(change(config, train={"eval_every": 3, "checkpoint_every": 2, "keep": 5}), tmp_path / "run", resume=True)
    assert result(tmp_path / "run") == straight


def test_another_order_would_show(config, straight, tmp_path):
    """The comparison sees a resume that starts one step off."""
    out = tmp_path / "run"
    run_until(config, out, 12)
    trainer = Trainer(config, out, resume=True)
    trainer.model.ln_f.bias.data[0] += 1e-7
    trainer.run()
    assert result(out)[0][:10] == straight[0][:10] and result(out)[0][10:] != straight[0][10:]


@pytest.mark.parametrize("keep", [1, 2])
def test_a_damaged_newest_checkpoint_is_named_and_passed_over(config, straight, tmp_path, capsys, keep):
    config, out = change(config, train={"keep": keep, "checkpoint_every": 1, "eval_every": 3}), tmp_path / "run"
    run_until(config, out, 16)
    weights = out / "checkpoints/step-00000016/model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    run_until(config, out, 15, resume=True)
    told = capsys.readouterr().err.splitlines()
    assert len(told) == 2 and told[0].startswith(f"skipped a checkpoint: {weights} ")
    assert told[1] == f"resuming from {out / 'checkpoints/step-00000015'}"
    skipped = rows(out, "event")[-1]["skipped"]
    assert len(skipped) == 1 and str(weights) in skipped[0]
    finish(config, out, resume=True)
    assert result(out) == straight


def damage_manifests(out: Path) -> str:
    for path in out.glob("checkpoints/step-*/manifest.json"):
        path.write_text("{")
    return "manifest.json is damaged"


def raise_steps(out: Path) -> str:
    path = out / "config.json"
    assert '"steps": 30' in path.read_text()
    path.write_text(path.read_text().replace('"steps": 30', '"steps": 60'))
    return "is of another config than the run's"


@pytest.mark.parametrize("spoil", [damage_manifests, raise_steps])
def test_a_run_none_of_whose_checkpoints_can_be_used_is_left_as_it_is(config, tmp_path, spoil):
    out = tmp_path / "run"
    run_until(config, out, 12)
    says = spoil(out)
    before = {p: p.read_bytes() for p in out.rglob("*") if p.is_file()}
    with pytest.raises(CheckpointError) as caught:
        Trainer(load(out / "config.json"), out, resume=True)
    message = str(caught.value)
    assert "step-00000010" in message and says in message and "put back the config.json or the checkpoint" in message
    assert {p: p.read_bytes() for p in out.rglob("*") if p.is_file()} == before


def test_a_resume_tells_what_has_changed_since(config, tmp_path, capsys):
    out = tmp_path / "run"
    run_until(config, out, 6)
    run_until(config, out, 6, resume=True)
    assert rows(out, "event")[-1]["changed"] == {} and "warning" not in capsys.readouterr().err
    env = json.loads((out / "env.json").read_text())
    (out / "env.json").write_text(json.dumps(env | {"torch": "1.0", "threads": 7, "commit": "0"}))
    run_until(config, out, 6, resume=True)
    changed = next(row for row in rows(out, "event")[::-1] if row["event"] == "resume")["changed"]
    assert changed == {"torch": ["1.0", env["torch"]], "threads": [7, 1]}
    warned = [line for line in capsys.readouterr().err.splitlines() if line.startswith("warning: ")]
    assert warned == [
        f"warning: torch 1.0 then, {env['torch']} now, threads 7 then, 1 now: "
        "steps from here on may differ in their last bits"
    ]
    (out / "env.json").write_text("[")
    run_until(config, out, 6, resume=True)


def test_a_damaged_line_in_the_log_is_all_that_a_resume_drops(config, straight, tmp_path):
    """Its step is finished, and not done again: the others stay."""
    out = tmp_path / "run"
    run_until(config, out, 12)
    lines = (out / "metrics.jsonl").read_text().splitlines(keepends=True)
    assert '"step": 3,' in lines[2]
    (out / "metrics.jsonl").write_text("".join([*lines[:2], lines[2][:30] + "\n", *lines[3:]]))
    with pytest.warns(UserWarning, match=r"metrics.jsonl: line 3 cannot be read"):
        trainer = Trainer(config, out, resume=True)
    trainer.run()
    assert [row["step"] for row in rows(out, "train")] == [1, 2, *range(4, 31)]
    assert result(out)[1] == straight[1]


def test_rotation_keeps_what_was_just_saved_although_a_damaged_one_is_newer(config, tmp_path):
    config, out = change(config, train={"keep": 1, "checkpoint_every": 4, "eval_every": 10**6}), tmp_path / "run"
    run_until(config, out, 8)
    shutil.copytree(out / "checkpoints/step-00000008", out / "checkpoints/step-00000012")
    (out / "checkpoints/step-00000012/manifest.json").write_text("")
    run_until(change(config, train={"checkpoint_every": 3}), out, 9, resume=True)
    assert (out / "checkpoints/latest").read_text() == "step-00000009\n"
    load_model(out / "checkpoints/step-00000009")


def test_resume_with_another_config_is_refused(config, tmp_path):
    out = tmp_path / "run"
    run_until(config, out, 6)
    before = {p: p.read_bytes() for p in out.rglob("*") if p.is_file()}
    with pytest.raises(ConfigError, match=r"optim.lr 0.01 there, 0.02 here"):
        Trainer(change(config, optim={"lr": 0.02}), out, resume=True)
    assert {p: p.read_bytes() for p in out.rglob("*") if p.is_file()} == before


def test_resume_on_another_text_is_refused(config, data, tmp_path):
    shutil.copytree(data, tmp_path / "data")
    config, out = change(config, data={"path": str(tmp_path / "data")}), tmp_path / "run"
    run_until(config, out, 6)
    shutil.rmtree(tmp_path / "data")
    (tmp_path / "other.txt").write_text("another text\n" * 1000)
    checkpoint_before = (out / "checkpoints/step-00000005/manifest.json").read_bytes()
    prepare(tmp_path / "other.txt", out=tmp_path / "data")
    with pytest.raises(ConfigError, match="is not the text"):
        Trainer(config, out, resume=True)
    assert (out / "checkpoints/step-00000005/manifest.json").read_bytes() == checkpoint_before


def test_resuming_a_finished_run_changes_nothing(config, straight, tmp_path):
    finish(config, tmp_path / "run")
    finish(config, tmp_path / "run", resume=True)
    assert result(tmp_path / "run") == straight


def test_config_file_of_a_run_can_start_another(config, straight, tmp_path):
    """The config.json of a run says all there is to say."""
    (tmp_path / "config.json").write_text(dump(config))
    finish(load(tmp_path / "config.json"), tmp_path / "run")
    assert result(tmp_path / "run") == straight
