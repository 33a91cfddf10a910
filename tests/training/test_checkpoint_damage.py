"""Damaged checkpoints: of any kind, in one sentence, and the one before them is used."""

import json
import pickle
import shutil
import struct
from pathlib import Path

import pytest
import safetensors.torch
import torch
from damage import FILES, NEW, OLD, cut, empty, folder_instead, longer, refused, remove, resumes_from, seal
from hypothesis import given, settings
from hypothesis import strategies as st

from grt.runs import checkpoint
from grt.runs.checkpoint import find_checkpoint, load_model

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
def shared_copy(interrupted, tmp_path_factory):
    return shutil.copytree(interrupted, tmp_path_factory.mktemp("shared") / "run") / "checkpoints" / NEW


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
