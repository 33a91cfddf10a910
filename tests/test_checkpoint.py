"""Checkpoints: what is on disk, damage of any kind is refused in one sentence, and a failing write harms no other."""

import errno
import hashlib
import json
import pickle
import resource
import shutil
import struct
from pathlib import Path

import pytest
import safetensors.torch
import torch
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import finish, grt, quick, run_until, tiny, write_text

from grt.config import ConfigError, config_hash, dump
from grt.methods import build_model
from grt.presets import change
from grt.train import checkpoint
from grt.train.checkpoint import CheckpointError, Checkpoints, find_checkpoint, load_model, write_folder
from grt.train.loop import Trainer

FILES = ("model.safetensors", "optimizer.safetensors", "state.json", "manifest.json")
OLD, NEW = "step-00000005", "step-00000010"


@pytest.fixture(autouse=True)
def fast(monkeypatch):
    quick(monkeypatch)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_text(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def config(data):
    return tiny(data)


@pytest.fixture(scope="module")
def trained(config, tmp_path_factory):
    """A run with checkpoints at steps 5 and 10, to be copied."""
    with pytest.MonkeyPatch.context() as patch:
        quick(patch)
        out = tmp_path_factory.mktemp("trained") / "run"
        run_until(config, out, 11)
        return out


@pytest.fixture
def run(trained, tmp_path):
    shutil.copytree(trained, tmp_path / "run")
    return tmp_path / "run"


@pytest.fixture
def new(run):
    return run / "checkpoints" / NEW


def seal(folder: Path, **changed) -> None:
    """Make the manifest true again of what lies in the folder, so that no hash gives the damage away."""
    manifest = json.loads((folder / "manifest.json").read_text())
    for name in manifest["files"]:
        content = (folder / name).read_bytes()
        manifest["files"][name] = {"sha256": hashlib.sha256(content).hexdigest(), "bytes": len(content)}
    (folder / "manifest.json").write_text(json.dumps({**manifest, **changed}))


def refused(path: Path, *named: object) -> str:
    """The one sentence with which load_model refuses `path`."""
    with pytest.raises(ConfigError) as caught:
        load_model(path)
    message = str(caught.value)
    assert "\n" not in message and message.endswith(".") and len(message) < 600
    for name in named:
        assert str(name) in message, message
    return message


def resumes_from(config, run: Path, step: int, *named: object, capsys) -> None:
    capsys.readouterr()
    trainer = Trainer(config, run, resume=True)
    trainer.log.close()
    told = capsys.readouterr().err
    assert trainer.state.step == step, told
    for name in named:
        assert f"skipped a checkpoint: {name}" in told


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


# Damage that the hashes show


@pytest.mark.parametrize("at", [0, 9, "middle", -1])
@pytest.mark.parametrize("name", FILES)
def test_a_flipped_byte(config, run, new, capsys, name, at):
    content = bytearray((new / name).read_bytes())
    content[len(content) // 2 if at == "middle" else at] ^= 0x80
    (new / name).write_bytes(content)
    refused(new, new)
    resumes_from(config, run, 5, new, capsys=capsys)
    with pytest.warns(UserWarning, match="passed over a checkpoint"):
        fallback, _ = load_model(run)
    assert torch.equal(fallback.ln_f.weight, load_model(run / "checkpoints" / OLD)[0].ln_f.weight)


@pytest.fixture(scope="module")
def shared_copy(trained, tmp_path_factory):
    return shutil.copytree(trained, tmp_path_factory.mktemp("shared") / "run") / "checkpoints" / NEW


@settings(max_examples=150, deadline=None, database=None, derandomize=True)
@given(name=st.sampled_from(FILES), where=st.floats(0, 1, exclude_max=True), change=st.integers(1, 255))
def test_no_changed_byte_passes(shared_copy, name, where, change):
    path = shared_copy / name
    sound = path.read_bytes()
    content = bytearray(sound)
    content[int(where * len(content))] ^= change
    try:
        path.write_bytes(content)
        if name == "manifest.json" and _json(bytes(content)) == _json(sound):  # one kind of white space for another
            load_model(shared_copy)
        else:
            refused(shared_copy, shared_copy)
    finally:
        path.write_bytes(sound)


def _json(content: bytes) -> object:
    try:
        return json.loads(content)
    except ValueError:
        return None


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def remove(path: Path) -> None:
    path.unlink()


def longer(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"}")


def folder_instead(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize("damage", [cut, longer, empty, remove, folder_instead])
@pytest.mark.parametrize("name", FILES)
def test_a_file_that_is_not_whole(config, run, new, capsys, name, damage):
    damage(new / name)
    if name == "manifest.json" and damage is cut:  # only the newline is gone
        load_model(new)
        return
    if name != "manifest.json" or damage is not remove:
        says = " bytes, not " if name != "manifest.json" and damage in (cut, empty, longer) else ""
        refused(new, new / name, says)
    resumes_from(config, run, 5, new / name, capsys=capsys)


def test_without_any_manifest_a_folder_is_no_checkpoint(run, new):
    (new / "manifest.json").unlink()
    with pytest.warns(UserWarning, match="passed over a checkpoint"):
        assert find_checkpoint(run)[0].name == OLD
    refused(new, new / "config.json")


@pytest.mark.parametrize(
    "content",
    [
        b"", b"{", b"[]", b"null", b"1", b"\xff\xfe", b"[" * 100_000, b"1" * 5000, b'{"format": 1}',
        b'{"format": 1, "files": [], "step": 10, "config_hash": ""}',
    ],
    ids=lambda content: repr(content[:12]),
)  # fmt: skip
def test_a_manifest_that_is_none(config, run, new, capsys, content):
    (new / "manifest.json").write_bytes(content)
    refused(new, new / "manifest.json", "damaged")
    resumes_from(config, run, 5, new / "manifest.json", capsys=capsys)


@pytest.mark.parametrize(
    "changed",
    [
        {"format": 2}, {"step": "10"}, {"step": True}, {"step": None}, {"config_hash": None}, {"files": {}},
        {"files": None}, {"files": {"remodel": {"sha256": "", "bytes": 0}}}, {"files": {"model.safetensors": None}},
        {"files": {"model.safetensors": {"sha256": ""}}}, {"files": ["model.safetensors"]},
    ],
    ids=str,
)  # fmt: skip
def test_a_manifest_of_wrong_types(config, run, new, capsys, changed):
    manifest = json.loads((new / "manifest.json").read_text())
    (new / "manifest.json").write_text(json.dumps({**manifest, **changed}))
    refused(new, new / "manifest.json", "damaged")
    resumes_from(config, run, 5, new / "manifest.json", capsys=capsys)


@pytest.mark.parametrize("name", ["../../config.json", "/etc/hostname", "x" * 5000, "a\0b", ""])
def test_a_manifest_that_lists_what_is_no_file_of_the_folder(new, name):
    manifest = json.loads((new / "manifest.json").read_text())
    manifest["files"][name] = {"sha256": "", "bytes": 0}
    (new / "manifest.json").write_text(json.dumps(manifest))
    refused(new, new)


# Damage that only a look inside shows


def rewrite(path: Path, edit) -> None:
    tensors = safetensors.torch.load_file(path)
    edit(tensors)
    safetensors.torch.save_file(tensors, path)
    seal(path.parent)


def lose(tensors: dict) -> None:
    del tensors[min(tensors)]


def add(tensors: dict) -> None:
    tensors["lm_head.weight"] = torch.zeros(2)


def widen(tensors: dict) -> None:
    tensors["ln_f.bias"] = torch.zeros(17)


def transpose(tensors: dict) -> None:
    name = next(n for n in tensors if "rule.proj.weight" in n)
    tensors[name] = tensors[name].T.contiguous()


def compiled(tensors: dict) -> None:
    for name in list(tensors):
        tensors[f"_orig_mod.{name}"] = tensors.pop(name)


@pytest.mark.parametrize(
    ("edit", "says"),
    [
        (lose, "lacks tensor coda.0.attn.out.bias"),
        (add, "has unknown tensor lm_head.weight"),
        (widen, "tensor ln_f.bias has shape (17,), the model wants (16,)"),
        (transpose, "tensor rule.proj.weight has shape (32, 16)"),
        (compiled, "lacks tensor coda.0.attn.out.bias"),
    ],
)
def test_tensors_of_another_model(config, run, new, capsys, edit, says):
    rewrite(new / "model.safetensors", edit)
    refused(new, new / "model.safetensors", says)
    resumes_from(config, run, 5, new / "model.safetensors", capsys=capsys)


@pytest.mark.parametrize("edit", [lose, add, transpose])
def test_moments_of_another_model(config, run, new, capsys, edit):
    rewrite(new / "optimizer.safetensors", edit)
    load_model(new)  # which needs none
    resumes_from(config, run, 5, new / "optimizer.safetensors", capsys=capsys)


HUGE = struct.pack("<Q", 2**62)
UNKNOWN = b'{"a":{"dtype":"F99","shape":[0],"data_offsets":[0,0]}}'


@pytest.mark.parametrize(
    "content",
    [b"", b"\0" * 7, HUGE, HUGE + b"{}", struct.pack("<Q", 2) + b"{}", struct.pack("<Q", len(UNKNOWN)) + UNKNOWN],
    ids=["empty", "short", "huge", "huge header", "no tensor", "unknown type"],
)
def test_weights_that_are_no_safetensors(config, run, new, capsys, content):
    (new / "model.safetensors").write_bytes(content)
    seal(new)
    refused(new, new / "model.safetensors")
    resumes_from(config, run, 5, new / "model.safetensors", capsys=capsys)


STATE = {"step": 10, "seconds": 1.0, "best_loss": None, "dtype": "fp32", "peak": 1.0, "peak_source": ""}


@pytest.mark.parametrize(
    "state",
    [{}, [], None, {**STATE, "step": 9}, {**STATE, "step": "10"}, {**STATE, "more": 1}, {**STATE, "dtype": 1},
     {**STATE, "best_loss": "x"}, {**STATE, "seconds": None}],
    ids=str,
)  # fmt: skip
def test_a_state_that_is_none(config, run, new, capsys, state):
    (new / "state.json").write_text(json.dumps(state))
    seal(new)
    resumes_from(config, run, 5, new / "state.json", capsys=capsys)
    (new / "state.json").write_text(json.dumps(STATE))
    seal(new)
    resumes_from(config, run, 10, capsys=capsys)


@pytest.mark.parametrize("name", FILES[1:3])
def test_resume_needs_more_than_weights(config, run, new, capsys, name):
    (new / name).unlink()
    manifest = json.loads((new / "manifest.json").read_text())
    del manifest["files"][name]
    (new / "manifest.json").write_text(json.dumps(manifest))
    load_model(new)
    resumes_from(config, run, 5, new / "manifest.json", capsys=capsys)


class Trap:
    """Leaves a file behind when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def test_nothing_is_unpickled(run, new, tmp_path):
    trap = pickle.dumps(Trap(tmp_path / "sprung"))
    pickle.loads(trap)
    assert (tmp_path / "sprung").exists()
    (tmp_path / "sprung").unlink()
    for name in FILES[:3]:
        (new / name).write_bytes(trap)
    torch.save(Trap(tmp_path / "sprung"), new / "model.pt")
    seal(new)
    refused(new, new / "model.safetensors")
    load_model(run / "checkpoints" / OLD)
    assert not (tmp_path / "sprung").exists()
    source = "".join(p.read_text() for p in Path(checkpoint.__file__).parent.parent.rglob("*.py"))
    assert "torch.load(" not in source.replace("safetensors.torch.load(", "") and "import pickle" not in source


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


# Model folders


@pytest.fixture
def model_folder(config, new, tmp_path):
    """Makes a model folder: config, weights (plain or compressed, fp32 or bf16) and manifest side by side."""

    def make(dtype: torch.dtype = torch.float32, compress: bool = False) -> Path:
        tensors = {k: v.to(dtype) for k, v in safetensors.torch.load_file(new / "model.safetensors").items()}
        content, name = safetensors.torch.save(tensors), "model.safetensors"
        if compress:
            content, name = zstandard.ZstdCompressor().compress(content), name + ".zst"
        files = {"config.json": dump(config).encode(), name: content}
        write_folder(tmp_path / "model", files, config_hash(config), 10)
        return tmp_path / "model"

    return make


@pytest.mark.parametrize("compress", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_folder_loads(config, run, model_folder, dtype, compress):
    folder = model_folder(dtype, compress)
    (model, loaded), (original, _) = load_model(folder), load_model(run)
    assert loaded == config
    for name, tensor in model.state_dict().items():
        assert tensor.dtype == torch.float32
        assert torch.equal(tensor, original.state_dict()[name].to(dtype).float())


@pytest.mark.parametrize("damage", [cut, empty, remove, longer])
@pytest.mark.parametrize("name", ["model.safetensors.zst", "config.json"])
def test_a_damaged_model_folder(model_folder, name, damage):
    folder = model_folder(compress=True)
    damage(folder / name)
    refused(folder, folder)


@pytest.mark.parametrize("content", [b"", b"no frame", None])
def test_weights_that_are_no_zstd(model_folder, content):
    weights = model_folder(compress=True) / "model.safetensors.zst"
    weights.write_bytes(weights.read_bytes()[:-20] if content is None else content)
    seal(weights.parent)
    refused(weights.parent, weights)


def test_only_listed_weights_are_read(run, model_folder):
    folder = model_folder(compress=True)
    zeros = {k: torch.zeros_like(v) for k, v in load_model(run)[0].state_dict().items()}
    safetensors.torch.save_file(zeros, folder / "model.safetensors")
    assert torch.equal(load_model(folder)[0].ln_f.weight, load_model(run)[0].ln_f.weight)


# Keeping and pointing


def names(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "checkpoints").iterdir() if path.is_dir())


def pointer(run: Path, name: str) -> str:
    return (run / "checkpoints" / name).read_text().strip()


@pytest.mark.parametrize("keep", [1, 2, 3])
def test_the_last_ones_and_the_best_are_kept(config, tmp_path, monkeypatch, keep):
    """Losses are scripted, so that step 4 is the best."""
    from grt.train import loop

    losses = iter([3.0, 1.0, 2.0, 2.0, 2.0])
    real = loop.evaluate

    def evaluate(*arguments, **options):
        result = real(*arguments, **options)
        loss = next(losses)
        return type(result)(dict.fromkeys(result.loss_by_depth, loss), 1, 1, 1.0)

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
    monkeypatch.setattr(checkpoint, "write_file", write_file)
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
