"""Prepared folders: what is promised about splits, damage, kills and processes at once."""

import hashlib
import json
import math
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from grt.data import prepare as prepare_module
from grt.data import shards as shards_module
from grt.data.loader import batch
from grt.data.prepare import load_prepared, prepare
from grt.files import cache_folder, replace_file


def test_tokens_are_the_documents_each_with_end_of_text(texts):
    prepared = prepare(texts, val_fraction=0.2, shard_tokens=1000)
    written = {}
    for name, entry in prepared.meta["splits"].items():
        raw = b"".join((prepared.folder / shard["file"]).read_bytes() for shard in entry["shards"])
        assert hashlib.sha256(raw).hexdigest() == entry["sha256"]
        assert [shard["tokens"] for shard in entry["shards"][:-1]] == [1000] * (len(entry["shards"]) - 1)
        ids = np.frombuffer(raw, "<u2")
        assert np.array_equal(prepared.split(name).read(0, entry["tokens"]), ids)
        documents = [prepared.tokenizer.decode(part) for part in np.split(ids, np.flatnonzero(ids == 256) + 1)]
        assert documents.pop() == "" and len(documents) == entry["documents"]
        assert sum(map(len, documents)) == entry["bytes"]
        written[name] = documents
    assert sorted(written["train"] + written["val"]) == sorted(path.read_text() for path in texts.rglob("*.txt"))
    assert len(prepared.meta["splits"]["train"]["shards"]) > 1


def test_a_documents_hash_decides_its_split(texts):
    prepared = prepare(texts, val_fraction=0.3)
    raw = b"".join((prepared.folder / shard["file"]).read_bytes() for shard in prepared.meta["splits"]["val"]["shards"])
    ids = np.frombuffer(raw, "<u2")
    found = [prepared.tokenizer.decode(part) for part in np.split(ids, np.flatnonzero(ids == 256) + 1)[:-1]]
    want = [text for path in texts.rglob("*.txt") if share_of(text := path.read_text()) < 0.3]
    assert sorted(found) == sorted(want) and 5 < len(want) < 30


def share_of(text: str) -> float:
    """Its sha256 as a binary fraction."""
    return int(hashlib.sha256(text.encode()).hexdigest()[:13], 16) / 16**13


def test_adding_a_document_moves_no_other(texts):
    before = prepare(texts, val_fraction=0.2).meta
    for i in range(100):  # the first addition that goes to training
        (texts / "zz.txt").write_text(f"another {i}")
        after = prepare(texts, val_fraction=0.2).meta
        if after["splits"]["train"]["documents"] > before["splits"]["train"]["documents"]:
            break
    assert after["split_rule"]["by"] == before["split_rule"]["by"] == "document hash"
    assert after["splits"]["val"] == before["splits"]["val"]
    assert after["corpus_sha256"] != before["corpus_sha256"]


def test_one_file_is_cut_near_its_end_at_a_line(tmp_path, capsys):
    lines = [f"line {i}\n" for i in range(1000)]
    (tmp_path / "one.txt").write_text("".join(lines))
    prepared = prepare(tmp_path / "one.txt", val_fraction=0.1)
    assert prepared.meta["split_rule"] == {"by": "tail of each document", "val_fraction": 0.1, "tail": 0.1}
    assert "the last 10% of each is validation text" in capsys.readouterr().err
    train, val = (prepared.split(name) for name in ("train", "val"))
    head, tail = (prepared.tokenizer.decode(split.read(0, split.n_tokens)) for split in (train, val))
    assert head + tail == "".join(lines)
    assert head.endswith("\n") and 0.1 <= len(tail) / len(head + tail) < 0.16


@pytest.mark.parametrize(("fraction", "share"), [(0.0001, 0.01), (0.9, 0.5)])
def test_the_tail_is_bounded_and_needs_no_newline(tmp_path, fraction, share):
    (tmp_path / "one.txt").write_text("\u00e9" * 1000)
    splits = prepare(tmp_path / "one.txt", val_fraction=fraction).meta["splits"]
    assert splits["val"]["bytes"] == 2000 * share and splits["train"]["bytes"] == 2000 * (1 - share)


@pytest.mark.parametrize(("newline", "train"), [(83, 90), (84, 90), (85, 86), (88, 89)])
def test_a_line_that_begins_too_early_does_not_move_the_cut(tmp_path, newline, train):
    """Of 100 characters the last 10 are the tail, and a line may begin at most 5 characters before it."""
    (tmp_path / "one.txt").write_text("a" * newline + "\n" + "b" * (99 - newline))
    splits = prepare(tmp_path / "one.txt", val_fraction=0.1).meta["splits"]
    assert (splits["train"]["bytes"], splits["val"]["bytes"]) == (train, 100 - train)


def test_fraction_one_puts_everything_into_validation(tmp_path):
    (tmp_path / "one.txt").write_text("all of it <|endoftext|>")
    prepared = prepare(tmp_path / "one.txt", val_fraction=1.0)
    val = prepared.split("val")
    assert prepared.tokenizer.decode(val.read(0, val.n_tokens)) == "all of it <|endoftext|>"
    assert list(val.read(0, val.n_tokens)).count(256) == 1
    assert prepared.split("train").n_tokens == 0 and load_prepared(prepared.folder) == prepared
    with pytest.raises(ValueError, match="train split in .* has 0 tokens but a window needs 2"):
        batch(prepared.split("train"), seed=0, step=0, slot=0, rows=range(1), context=1)


@pytest.mark.parametrize("fraction", [0, -0.1, 1.5, math.nan])
def test_impossible_fractions(texts, fraction):
    with pytest.raises(ValueError, match="val_fraction is .*: give a share"):
        prepare(texts, val_fraction=fraction)


def test_an_intact_preparation_is_used_again(texts, cache, monkeypatch):
    first = prepare(texts, val_fraction=0.2)
    assert first.folder.parent == cache / "data" and first.folder.name.startswith("texts-bytes-")
    monkeypatch.setattr(prepare_module, "write_prepared", None)
    assert prepare(texts, val_fraction=0.2) == first
    with pytest.raises(TypeError):  # another fraction is another preparation
        prepare(texts, val_fraction=0.3)


def flip_a_byte(path: Path):
    data = bytearray(path.read_bytes())
    data[6] ^= 1
    path.write_bytes(data)


def truncate(path: Path):
    path.write_bytes(path.read_bytes()[:-2])


def raise_an_id(path: Path):
    ids = np.frombuffer(path.read_bytes(), "<u2").copy()
    ids[3] = 300
    path.write_bytes(ids.tobytes())


def alter(path: Path, change):
    """As format 1, whose splits need no index."""
    meta = json.loads(path.read_text()) | {"format": 1}
    change(meta)
    path.write_text(json.dumps(meta))


DAMAGE = [
    (flip_a_byte, "train-00000.bin", "train-00000.bin differs from the sha256"),
    (truncate, "train-00000.bin", "train-00000.bin has .* bytes instead of"),
    (Path.unlink, "val-00000.bin", "val-00000.bin is missing"),
    (raise_an_id, "val-00000.bin", "val-00000.bin holds id 300, beyond its vocabulary of 257"),
    (truncate, "meta.json", "meta.json is not JSON"),
    (lambda path: path.write_text('{"format": 99}'), "meta.json", "meta.json is not in format 2"),
    (lambda path: path.write_text('{"format": 1}'), "meta.json", "meta.json is wrong in source"),
    (lambda path: alter(path, lambda meta: meta["splits"]["val"].update(index=3)), "meta.json", "splits.val.index"),
    (lambda path: alter(path, lambda meta: meta.update(splits=[1])), "meta.json", "meta.json is wrong in splits"),
    (lambda path: (path.unlink(), path.mkdir()), "meta.json", "meta.json cannot be read"),
]


@pytest.mark.parametrize(("damage", "file", "message"), DAMAGE)
def test_damage_is_named_and_repaired(texts, damage, file, message):
    first = prepare(texts, val_fraction=0.2)
    damage(first.folder / file)
    with pytest.raises(ValueError, match=message):
        load_prepared(first.folder)
    with pytest.warns(UserWarning, match=f"is damaged: .*{message}"):
        assert prepare(texts, val_fraction=0.2) == first
    assert load_prepared(first.folder) == first
    assert [path.name for path in first.folder.parent.iterdir()] == [first.folder.name]


def test_without_a_terminal_progress_is_one_line(texts, capfd):
    prepare(texts, val_fraction=0.2, progress=True)
    out, err = capfd.readouterr()
    assert out == "" and err.count("\n") == 1 and "train" in err and "documents" in err


def test_a_folder_without_meta_is_refused(tmp_path):
    with pytest.raises(ValueError, match="meta.json is missing, so .* is no prepared folder"):
        load_prepared(tmp_path)


def run_in_processes(code: str, *arguments, n: int) -> list[int]:
    """Exit codes of n processes that run the code at once; each finds `arguments` in sys.argv[1:]."""
    command = [
        sys.executable,
        "-c",
        f"import os, signal, sys\nfrom grt.data import prepare, shards\n{code}",
        *arguments,
    ]
    processes = [subprocess.Popen(command, stderr=subprocess.DEVNULL) for _ in range(n)]
    return [process.wait() for process in processes]


def test_a_kill_before_the_rename_leaves_nothing_that_counts(texts, cache):
    kill = "shards._install = lambda partial, folder: os.kill(os.getpid(), signal.SIGKILL)"
    code = f"{kill}\nprepare.prepare(sys.argv[1], val_fraction=0.2)"
    assert run_in_processes(code, str(texts), n=1) == [-signal.SIGKILL]
    (left,) = (cache / "data").iterdir()
    assert left.name.endswith(".partial") and (left / "meta.json").exists()
    prepared = prepare(texts, val_fraction=0.2)  # and no warning: nothing looked like a preparation
    assert load_prepared(prepared.folder) == prepared


def test_processes_that_prepare_at_once_agree(texts, cache):
    assert run_in_processes("prepare.prepare(sys.argv[1], val_fraction=0.2)", str(texts), n=2) == [0] * 2
    (folder,) = (cache / "data").iterdir()
    assert load_prepared(folder) == prepare(texts, val_fraction=0.2)


def test_the_loser_of_a_race_takes_the_winners_folder(texts, tmp_path):
    winner = prepare(texts, val_fraction=0.2)
    stamp = (winner.folder / "meta.json").stat().st_ino
    (tmp_path / "partial").mkdir()
    assert shards_module._install(tmp_path / "partial", winner.folder) == winner
    assert (winner.folder / "meta.json").stat().st_ino == stamp


@pytest.mark.parametrize("error", [OSError, RuntimeError, ValueError])
def test_an_error_while_writing_leaves_no_trace(texts, cache, monkeypatch, error):
    def refuse(*_):
        raise error

    monkeypatch.setattr(shards_module, "_install", refuse)
    with pytest.raises(error):
        prepare(texts)
    assert list((cache / "data").iterdir()) == []


def test_files_that_change_between_the_passes_are_noticed(texts, monkeypatch):
    class Changing(prepare_module.Texts):
        def fill(self, *arguments):
            (texts / "00.txt").write_text("changed")
            return super().fill(*arguments)

    monkeypatch.setattr(prepare_module, "Texts", Changing)
    with pytest.raises(ValueError, match="texts changed while they were read"):
        prepare(texts, val_fraction=0.2)


def test_out_is_made_reused_repaired_and_never_overwritten(texts, tmp_path, cache):
    out = tmp_path / "out"
    made = prepare(texts, val_fraction=0.2, out=out)
    assert made.folder == out and made.meta == prepare(texts, val_fraction=0.2).meta
    inode = (out / "meta.json").stat().st_ino
    assert prepare(texts, val_fraction=0.2, out=out) == made and (out / "meta.json").stat().st_ino == inode
    truncate(out / "val-00000.bin")
    with pytest.warns(UserWarning, match="is damaged"):
        assert prepare(texts, val_fraction=0.2, out=out) == made
    with pytest.raises(ValueError, match="out holds something else"):
        prepare(texts, val_fraction=0.3, out=out)
    (out / "notes.md").write_text("mine")
    truncate(out / "val-00000.bin")
    with pytest.raises(ValueError, match="out holds something else"):
        prepare(texts, val_fraction=0.2, out=out)
    assert (out / "notes.md").read_text() == "mine"
    with pytest.raises(ValueError, match="00.txt holds something else"):
        prepare(texts, val_fraction=0.2, out=texts / "00.txt")


def test_a_changed_tokenizer_is_refused(texts):
    prepared = prepare(texts)
    meta = json.loads(json.dumps(prepared.meta))
    meta["tokenizer"]["sha256"] = "0" * 64
    (prepared.folder / "meta.json").write_text(json.dumps(meta))
    with pytest.raises(ValueError, match="written by another bytes tokenizer"):
        _ = load_prepared(prepared.folder).tokenizer


def test_a_damaged_tokenizer_in_the_cache_is_repaired(texts):
    first = prepare(texts, val_fraction=0.2)
    meta = json.loads(json.dumps(first.meta))
    meta["tokenizer"]["name"] = "bites"
    (first.folder / "meta.json").write_text(json.dumps(meta))
    with pytest.warns(UserWarning, match="is damaged: unknown tokenizer 'bites'"):
        assert prepare(texts, val_fraction=0.2) == first
    assert load_prepared(first.folder) == first


def test_folders_that_cannot_be_opened_are_left_unsynced(texts, monkeypatch):
    """As on Windows."""

    def refuse(path, *arguments, **options):
        if Path(path).is_dir():
            raise PermissionError(13, "Permission denied", str(path))
        return real(path, *arguments, **options)

    real = shards_module.os.open
    monkeypatch.setattr(shards_module.os, "open", refuse)
    prepared = prepare(texts, val_fraction=0.2)
    replace_file(prepared.folder / "note", "text")
    assert (prepared.folder / "note").read_text() == "text"


def test_unknown_split(texts):
    with pytest.raises(ValueError, match="No split 'test' in .*: choose from train, val"):
        prepare(texts).split("test")


def test_cache_folder(monkeypatch, tmp_path):
    assert cache_folder() == tmp_path / "cache"
    monkeypatch.delenv("GRT_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert cache_folder() == Path("/xdg/grt")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder() == Path.home() / ".cache" / "grt"
