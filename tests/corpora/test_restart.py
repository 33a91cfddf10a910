"""Preparing on several processes, after a kill, on a full disk: the shards are always the same bytes, or none."""

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from grt.cli import main
from grt.data import encode, partial
from grt.data.encode import Piece, encoded, jobs, pieces
from grt.data.prepare import load_prepared, prepare
from grt.data.tokenizer import get_tokenizer

ROOT = Path(__file__).resolve().parents[2]
FRACTION = 0.2


@pytest.fixture
def texts(tmp_path):
    folder = tmp_path / "texts"
    folder.mkdir()
    for i in range(60):
        (folder / f"{i:02}.txt").write_text(f"document {i}, größer\n" * (i + 1))
    return folder


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def run(texts: Path, out: Path, patch: str = "", tokenizer: str = "gpt2", job: int = 2000) -> int:
    """Prepares in a process of its own, with jobs that small; `patch` is code that spoils it."""
    code = f"""
import os, resource, signal, sys
from pathlib import Path
from grt.data import encode, partial, prepare, shards, texts, writer
encode.JOB = {job}
{patch}
prepare.prepare({str(texts)!r}, tokenizer={tokenizer!r}, val_fraction={FRACTION}, out=Path({str(out)!r}),
                shard_tokens=1500)
"""
    return subprocess.run([sys.executable, "-c", code], check=False, stderr=subprocess.PIPE, cwd=ROOT).returncode


KILL = """
record = partial.Partial.record
def kill(self):
    if self.done == 4:
        {}
        os.kill(os.getpid(), signal.SIGKILL)
    record(self)
partial.Partial.record = kill
"""
NOT_HANDED_ON = KILL.format("pass")
HANDED_ON = KILL.format("[writer.flush() for writer in self.writers]")  # more than the journal says


@pytest.mark.parametrize("patch", [NOT_HANDED_ON, HANDED_ON])
@pytest.mark.parametrize("tokenizer", ["bytes", "gpt2"])
def test_a_killed_preparation_goes_on(texts, tmp_path, tokenizer, patch):
    assert run(texts, tmp_path / "whole", tokenizer=tokenizer) == 0
    whole = files_of(tmp_path / "whole")
    assert sum(name.startswith("train-") for name in whole) > 2 and "journal.jsonl" not in whole
    assert run(texts, tmp_path / "out", patch, tokenizer) == -signal.SIGKILL
    assert not (tmp_path / "out").exists()
    (hidden,) = tmp_path.glob(".out.*.partial")
    *_, last = (hidden / "journal.jsonl").read_text().splitlines()
    assert json.loads(last)["done"] == 4
    assert run(texts, tmp_path / "out", tokenizer=tokenizer) == 0
    assert files_of(tmp_path / "out") == whole and not list(tmp_path.glob(".out*"))


def test_what_is_finished_is_not_encoded_again(texts, tmp_path, monkeypatch):
    monkeypatch.setattr(encode, "JOB", 2000)

    def interrupt(self):
        record(self)
        if self.done == 4:
            raise KeyboardInterrupt

    record = partial.Partial.record
    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(partial.Partial, "record", interrupt)
        prepare(texts, val_fraction=FRACTION, out=tmp_path / "out")
    done, encode_job = [], encode.encode
    monkeypatch.setattr(encode, "encode", lambda tokenizer, job: done.append(job) or encode_job(tokenizer, job))
    first = prepare(texts, val_fraction=FRACTION, out=tmp_path / "out")
    left = len(done)
    second = prepare(texts, val_fraction=FRACTION, out=tmp_path / "again")
    assert first.meta == second.meta and files_of(first.folder) == files_of(second.folder)
    assert 0 < left == len(done) - left - 4


def spoil_journal(hidden: Path):
    (hidden / "journal.jsonl").write_text("{}\n")


def spoil_line(hidden: Path):
    with open(hidden / "journal.jsonl", "a") as file:
        file.write('{"done": 3}\n')


def spoil_shard(hidden: Path):
    data = bytearray((hidden / "train-00000.bin").read_bytes())
    data[8] ^= 1
    (hidden / "train-00000.bin").write_bytes(data)


def cut_shard(hidden: Path):
    (hidden / "train-00000.bin").write_bytes(b"")


def cut_journal(hidden: Path):
    """A line that was half written does not count."""
    path = hidden / "journal.jsonl"
    path.write_text(path.read_text()[:-20])


@pytest.mark.parametrize("spoil", [spoil_journal, spoil_line, spoil_shard, cut_shard, cut_journal])
def test_a_spoiled_partial_folder_does_no_harm(texts, tmp_path, spoil):
    assert run(texts, tmp_path / "whole", tokenizer="bytes") == 0
    assert run(texts, tmp_path / "out", HANDED_ON, "bytes") == -signal.SIGKILL
    (hidden,) = tmp_path.glob(".out.*.partial")
    spoil(hidden)
    assert run(texts, tmp_path / "out", tokenizer="bytes") == 0
    assert files_of(tmp_path / "out") == files_of(tmp_path / "whole") and not list(tmp_path.glob(".out*"))


def test_another_process_at_work_is_left_alone(texts, tmp_path):
    with partial.partial_folder(tmp_path / "out", "k" * 64) as (first, _):
        with partial.partial_folder(tmp_path / "out", "k" * 64) as (second, _):
            assert first != second
        assert first.name == ".out.kkkkkkkk.partial" and first.is_dir()


def test_the_number_of_workers_changes_nothing(texts, tmp_path, monkeypatch):
    monkeypatch.setattr(encode, "JOB", 2000)
    made = [
        prepare(texts, tokenizer="gpt2", val_fraction=FRACTION, out=tmp_path / str(n), workers=n, quiet=True)
        for n in (1, 2)
    ]
    assert made[0].meta == made[1].meta and files_of(made[0].folder) == files_of(made[1].folder)
    with pytest.raises(ValueError, match="workers is -1"):
        prepare(texts, workers=-1)


def test_a_dead_worker_is_one_sentence(texts, tmp_path, monkeypatch):
    monkeypatch.setattr(encode, "_work", die)
    with pytest.raises(ValueError, match="One of 2 workers was killed.*fewer --workers"):
        prepare(texts, tokenizer="gpt2", out=tmp_path / "out", workers=2, quiet=True)
    monkeypatch.undo()
    monkeypatch.setenv("GRT_CACHE", str(tmp_path / "cache"))
    assert prepare(texts, tokenizer="gpt2", out=tmp_path / "out", quiet=True).folder == tmp_path / "out"


def die(_pipe, _tokenizer):
    os.kill(os.getpid(), signal.SIGKILL)


def test_workers_leave_with_a_killed_parent(tmp_path):
    code = f"""
import os, signal, sys
from grt.data import encode
from grt.data.tokenizer import get_tokenizer
if __name__ == "__main__":
    sys.path.insert(0, {str(ROOT)!r})
    for _ in encode.encoded([[("train", encode.Piece("text", True))]] * 20, get_tokenizer("bytes"), 2):
        import multiprocessing
        print(*[child.pid for child in multiprocessing.active_children()], flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
"""
    (tmp_path / "script.py").write_text(code)
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(tmp_path / "script.py")]
    found = subprocess.run(
        command, check=False, stdout=subprocess.PIPE, text=True, env=environment
    )  # ends when no one writes
    pids = [int(pid) for pid in found.stdout.split()]
    assert found.returncode == -signal.SIGKILL and len(pids) == 2
    for _ in range(100):
        if not any(Path(f"/proc/{pid}").exists() and "Z" not in state_of(pid) for pid in pids):
            break
        time.sleep(0.1)
    else:
        pytest.fail(f"workers {pids} are still there")


def state_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "Z"


def test_long_documents_are_encoded_in_pieces(tmp_path, monkeypatch):
    text = "some words, größer\n\n  and\tmore 東京 " * 200
    (tmp_path / "long.txt").write_text(text)
    for name in ("bytes", "gpt2"):
        tokenizer = get_tokenizer(name)
        monkeypatch.undo()
        monkeypatch.setenv("GRT_CACHE", str(tmp_path / "cache"))
        whole = prepare(tmp_path / "long.txt", tokenizer=name, val_fraction=0.3, out=tmp_path / name, quiet=True)
        monkeypatch.setattr(encode, "PIECE", 50)
        monkeypatch.setattr("grt.data.formats.BLOCK", 64)
        monkeypatch.setattr(encode, "JOB", 300)
        cut = prepare(tmp_path / "long.txt", tokenizer=name, val_fraction=0.3, out=tmp_path / f"{name}2", quiet=True)
        assert files_of(whole.folder) == files_of(cut.folder)
        found = list(pieces(iter([text[:999], text[999:]]), tokenizer))
        assert len(found) > 50 and "".join(piece.text for piece in found) == text
        assert [piece.ends for piece in found] == [False] * (len(found) - 1) + [True]
        assert len(list(jobs(("train", piece) for piece in found))) > 10


# The disk


@pytest.mark.parametrize("limit", [600, 3000])
def test_a_full_disk_is_one_sentence_and_leaves_nothing(texts, tmp_path, limit):
    code = f"""
import resource, sys
from grt.cli import main
resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, {limit}))
sys.exit(main(sys.argv[1:]))
"""
    command = [sys.executable, "-c", code, "prepare", str(texts), "--out", str(tmp_path / "out")]
    found = subprocess.run(command, check=False, cwd=ROOT, capture_output=True, text=True)
    assert found.returncode == 2 and "Traceback" not in found.stderr
    *_, line = found.stderr.splitlines()
    assert f"{tmp_path}/.out." in line and "file too large: check the path, its permissions and the space" in line
    assert sorted(path.name for path in tmp_path.iterdir() if path.name != "cache") == ["texts"]


def test_a_file_where_a_folder_should_be(texts, tmp_path, capsys):
    (tmp_path / "file").write_text("mine")
    assert main(["prepare", str(texts), "--out", str(tmp_path / "file" / "out")]) == 2
    error = capsys.readouterr().err
    assert "file" in error and "check the path" in error and "Traceback" not in error
    assert (tmp_path / "file").read_text() == "mine"


def test_out_with_something_else_in_it(texts, tmp_path, capsys):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "notes.txt").write_text("mine")
    assert main(["prepare", str(texts), "--out", str(tmp_path / "out")]) == 2
    assert "out holds something else than this data: name a new folder" in capsys.readouterr().err
    assert files_of(tmp_path / "out") == {"notes.txt": b"mine"}


def test_prepare_from_the_command_line(texts, tmp_path, capsys):
    sources = [str(texts / "5*.txt"), str(texts / "00.txt")]
    assert main(["prepare", *sources, "--tokenizer", "gpt2", "--workers", "1", "--out", str(tmp_path / "out")]) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "out")
    meta = load_prepared(tmp_path / "out").meta
    assert meta["tokenizer"]["name"] == "gpt2" and sum(s["documents"] for s in meta["splits"].values()) in (11, 22)


def test_an_error_in_a_worker_is_raised_here(monkeypatch):
    monkeypatch.setattr(encode, "_work", refuse)
    with pytest.raises(ValueError, match="no ids today"):
        list(encoded([[("train", Piece("text", True))]], get_tokenizer("bytes"), workers=2))
    assert not multiprocessing.active_children()


def refuse(pipe, name):
    encode.encode = fail
    WORK(pipe, name)


def fail(_tokenizer, _job):
    raise ValueError("no ids today")


WORK = encode._work


@pytest.mark.parametrize("wait", [0, 0.05])
def test_an_interrupt_ends_the_workers_at_once(wait):
    """Also while jobs are on their way to them."""
    texts = ([("train", Piece("some text " * 50_000, True))] for _ in range(200))
    results = encoded(texts, get_tokenizer("bytes"), workers=2)
    next(results)
    assert multiprocessing.active_children()
    time.sleep(wait)
    started = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        results.throw(KeyboardInterrupt())
    assert time.monotonic() - started < 10 and not multiprocessing.active_children()
