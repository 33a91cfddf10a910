"""A run holds what it needs: it is used from any folder, after its text's folder and its own have moved."""

import contextlib
import io
import json
import shutil
from pathlib import Path

import pytest
import torch
from tiny_run import TINY

from grt import cli
from grt.config import dump, load
from grt.data.tokenizer import get_tokenizer
from grt.data.tokenizer_json import tokenizer_from
from grt.presets import change, preset
from grt.runs.checkpoint import load_model
from grt.runs.folder import FolderLock
from grt.runs.paths import absolute, located

HOME = "wörk ünd, mehr 東京"


def letters(folder: Path, order: str = "abcdefghijklmnopqrstuvwxyz 0123456789,:") -> Path:
    """A tokenizer.json with a token for each letter, in a folder of its own."""
    vocabulary = {letter: i for i, letter in enumerate(["[UNK]", "</s>", *order])}
    model = {"type": "BPE", "vocab": vocabulary, "merges": [], "unk_token": "[UNK]"}
    folder.mkdir(exist_ok=True)
    (folder / "tokenizer.json").write_text(json.dumps({"version": "1.0", "model": model, "added_tokens": [
        {"id": 1, "content": "</s>", "special": True, "single_word": False, "lstrip": False, "rstrip": False,
         "normalized": False}]}))  # fmt: skip
    return folder


@pytest.fixture
def home(tmp_path, monkeypatch):
    """The working folder: texts of several kinds and a tokenizer, all reached by relative paths."""
    folder = tmp_path / HOME
    (folder / "texts").mkdir(parents=True)
    for i in range(12):
        lines = "".join(f"page {i}, line {j}: letters and numbers\n" for j in range(20))
        (folder / "texts" / f"{i:02}.txt").write_text(lines)
    (folder / "one.txt").write_text("".join(f"line {i}: all of one text\n" for i in range(300)))
    (folder / "two, three.txt").write_text("".join(f"line {i}: another text\n" for i in range(300)))
    (folder / "link").symlink_to("texts")
    rows = "".join(json.dumps({"text": f"row {i} of a set of data " * 9}) + "\n" for i in range(40))
    (folder / "rows").mkdir()
    (folder / "rows/train.jsonl").write_text(rows)
    letters(folder / "tok")
    monkeypatch.chdir(folder)
    return folder


SOURCES = {
    "file": "one.txt",
    "folder": "texts",
    "pattern": "texts/0*.txt",
    "list": "one.txt,two, three.txt,texts/1*.txt",
    "link": "link",
    "dataset": "hf:rows",
    "name": "task:addition:2",
}


@pytest.mark.parametrize("kind", SOURCES)
def test_a_run_outlives_the_places_of_its_text(kind, home, grt, document, tmp_path, monkeypatch):
    if kind == "dataset":
        pytest.importorskip("datasets")
    source, where = SOURCES[kind], home.parent
    words = () if kind == "name" else ("--data.tokenizer", "hf:tok", "--model.vocab-size", "41")
    grt("train", "grt-nano", *TINY, *words, "--data.path", source, "--out", "runs/it", "--max-time", "0")
    monkeypatch.chdir(where)
    grt("train", "--resume", "--out", home / "runs/it")
    loss = document("eval", home / "runs/it")["loss"]

    def works(run: Path) -> None:
        assert document("eval", run)["loss"] == loss
        assert len(document("generate", run, "--prompt", "line", "--max-new-tokens", 3)["tokens"]) == 3
        again = run.with_name("again")
        shutil.copytree(run, again)
        shutil.rmtree(again / "checkpoints/step-00000004")
        grt("train", "--resume", "--out", again)
        weights, expected = (load_model(path)[0].state_dict() for path in (again, run))
        assert all(torch.equal(weights[name], expected[name]) for name in expected)
        shutil.rmtree(again)

    moved = where / "moved (twice)"
    home.rename(moved)
    works(moved / "runs/it")
    (moved / "runs/it").rename(where / "run")
    works(where / "run")
    shutil.rmtree(moved)  # what is left of the text is what was prepared
    works(where / "run")


def test_paths_are_written_from_the_root(home, grt):
    config = load(_trained(grt, "--data.path", "one.txt,link") / "config.json")
    assert config.data.path == f"{home / 'one.txt'},{home / 'link'}"
    assert config.data.tokenizer == f"hf:{home / 'tok'}"
    begun = _trained(grt, "--data.path", "texts", "--init-from", "it", out="begun")
    assert load(begun / "config.json").train.init_from == str(home / "it")
    pattern = absolute(load(begun / "config.json")).data.path
    assert pattern == str(home / "texts")


def _trained(grt, *options: str, out: str = "it") -> Path:
    words = ("--data.tokenizer", "hf:tok", "--model.vocab-size", "41")
    grt("train", "grt-nano", *TINY, *words, *options, "--out", out)
    return Path(out)


def test_a_run_keeps_its_tokenizer(home, grt, document, refused, monkeypatch):
    run = _trained(grt, "--data.path", "texts").resolve()
    facts = json.loads((run / "env.json").read_text())
    assert facts["tokenizer"]["sha256"] == tokenizer_from("hf:tok").sha256
    text = document("generate", run, "--prompt", "page", "--max-new-tokens", 5)["text"]
    letters(home / "tok", "zyxwvutsrqponmlkjihgfedcba 0123456789,:")  # as many tokens, other ids
    assert document("generate", run, "--prompt", "page", "--max-new-tokens", 5)["text"] == text
    shutil.copy("tok/tokenizer.json", run / "tokenizer.json")
    for command in ("eval", "generate"):
        assert f"{run / 'tokenizer.json'} is not the tokenizer" in refused(command, run)
    assert f"{run / 'tokenizer.json'} is not the tokenizer" in refused("train", "--resume", "--out", run)
    (run / "tokenizer.json").unlink()
    assert "is another tokenizer" in refused("generate", run)
    letters(home / "tok")
    assert document("generate", run, "--prompt", "page", "--max-new-tokens", 5)["text"] == text


def test_prepared_ids_of_an_edited_tokenizer_are_refused(home, grt, refused):
    grt("prepare", "texts", "--tokenizer", "hf:tok", "--out", "shards")
    letters(home / "tok", "zyxwvutsrqponmlkjihgfedcba 0123456789,:")
    told = refused("train", "grt-nano", *TINY, "--data.path", "shards", "--data.tokenizer", "hf:tok", "--out", "it",
                   "--model.vocab-size", "41")  # fmt: skip
    assert "shards holds hf:" in told or "another" in told
    assert not Path("it").exists()


def test_a_run_resumes_on_its_text_at_another_path_alone(home, grt, refused):
    options = ["train", "grt-nano", *TINY, "--out", "it"]
    grt(*options, "--data.path", "texts", "--max-time", "0")
    shutil.copytree("texts", "same")
    grt(*options, "--data.path", "same", "--resume")
    assert load(Path("it/config.json")).data.path == str(home / "texts")
    told = refused_after_start([*options[:-2], "--data.path", "one.txt", "--resume"], "it")
    assert "is not the text it began with" in told
    assert "data.path" in refused(*options, "--data.path", "same")  # another run, if it is not to be gone on with


def test_weights_are_taken_over_where_the_tokenizer_is_the_same_file(home, grt, refused):
    first = _trained(grt, "--data.path", "texts")
    shutil.copytree("tok", "copy")
    tokens = ("--data.tokenizer", "hf:copy", "--model.vocab-size", "41")
    grt("train", "grt-nano", *TINY, *tokens, "--data.path", "texts", "--init-from", first, "--out", "second")
    letters(home / "other", "zyxwvutsrqponmlkjihgfedcba 0123456789,:")
    tokens = ("--data.tokenizer", "hf:other", "--model.vocab-size", "41")
    told = refused("train", "grt-nano", *TINY, *tokens, "--data.path", "texts", "--init-from", first, "--out", "third")
    assert "data.tokenizer" in told and not Path("third").exists()


def test_a_refused_start_leaves_nothing(home, refused):
    refused("train", "grt-nano", *TINY, "--data.path", "nowhere", "--out", "new")
    assert not Path("new").exists()
    Path("there").mkdir()
    refused("train", "grt-nano", *TINY, "--data.path", "nowhere", "--out", "there")
    assert list(Path("there").iterdir()) == []


def test_a_lock_goes_with_its_holder_and_is_one_mans_only(tmp_path):
    lock = FolderLock(tmp_path)
    with pytest.raises(ValueError, match="trained by another process"):
        FolderLock(tmp_path)
    (tmp_path / ".lock").unlink()  # by whoever tidies up: the next one gets a file of its own, which stays
    other = FolderLock(tmp_path)
    lock.release()
    assert (tmp_path / ".lock").exists()
    with pytest.raises(ValueError, match="trained by another process"):
        FolderLock(tmp_path)
    other.release()
    assert list(tmp_path.iterdir()) == []


def test_what_goes_on_with_a_run_is_quoted_for_the_shell(home, capsys):
    assert cli.main(["train", "grt-nano", *TINY, "--data.path", "texts", "--out", "my run", "--max-time", "0"]) == 0
    assert "(grt train --resume --out 'my run')" in capsys.readouterr().out
    assert cli.main(["train", "grt-nano", *TINY, "--data.path", "texts", "--out", "my run", "--resume",
                     "--optim.lr", "0.5"]) == 2  # fmt: skip
    assert "`grt train --resume --out 'my run'`" in capsys.readouterr().err


def test_a_full_disk_is_told_as_it_is(home, grt, refused, monkeypatch):
    def full(path: Path, content: object) -> None:
        raise OSError(28, "No space left on device", str(path))

    options = ["train", "grt-nano", *TINY, "--data.path", "texts", "--train.checkpoint-every", "2"]
    with monkeypatch.context() as patch:
        patch.setattr("grt.runs.checkpoint.write_file", full)
        told = refused_after_start(options, "none")
    assert "model.safetensors cannot be written (No space left on device)" in told
    assert "it has no checkpoint yet" in told and "whole" not in told
    with monkeypatch.context() as patch:
        patch.setattr("grt.runs.checkpoint.replace_file", full)  # the checkpoint is there, what points to it is not
        told = refused_after_start(options, "some")
    assert "some/checkpoints/latest cannot be written" in told and "its checkpoints so far are whole" in told
    grt("train", "--resume", "--out", "some")


def refused_after_start(options: list[str], out: str) -> str:
    """What a training that begins and then fails says at its end."""
    told = io.StringIO()
    with contextlib.redirect_stderr(told):
        assert cli.main([*options, "--out", out]) == 2
    return told.getvalue()


def test_two_folders_of_one_relative_name_are_two_datasets(home, grt, tmp_path, monkeypatch):
    pytest.importorskip("datasets")
    first_run = _trained(grt, "--data.path", "hf:rows").resolve()
    elsewhere = tmp_path / "elsewhere"
    shutil.copytree(home / "tok", elsewhere / "tok")
    (elsewhere / "rows").mkdir()
    (elsewhere / "rows/train.jsonl").write_text((home / "rows/train.jsonl").read_text().replace("row", "line"))
    monkeypatch.chdir(elsewhere)
    runs = first_run, _trained(grt, "--data.path", "hf:rows").resolve()
    assert len({json.loads((run / "env.json").read_text())["data"]["train"] for run in runs}) == 2


def test_an_old_run_without_facts_is_read_as_before(home):
    config = load(_config(home))
    assert located(config, home) == config
    assert get_tokenizer(located(config, home).data.tokenizer).name == "bytes"


def _config(home: Path) -> Path:
    (home / "config.json").write_text(dump(change(preset("grt-nano"), data={"path": "texts"})))
    return home / "config.json"
