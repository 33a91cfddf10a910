"""Corpora: which files and documents, in which order, and the one that is always there."""

import subprocess
import sys
from importlib.metadata import version

import pytest

from grt.data import corpus as corpus_module
from grt.data import prepare as prepare_module
from grt.data.corpus import BUILTIN_SHA256, BUILTIN_VERSIONS, Corpus, open_corpus
from grt.data.loader import bigram_entropy
from grt.data.prepare import prepare
from grt.files import cache_folder


def test_folder_is_read_in_the_order_of_relative_paths(texts):
    names = [document.name for document in open_corpus(texts).documents()]
    assert len(names) == 60 and names == sorted(names) and "deep/01.txt" in names


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("missing.txt", None, "No file or folder .*missing.txt"),
        ("page.html", b"text", "page.html is of no kind that is read"),
        ("empty.txt", b"", "empty.txt is empty"),
        ("latin.txt", "caf\xe9 noir".encode("latin-1"), "latin.txt is not UTF-8 at byte 3"),
        ("cut.txt", "caf\xe9".encode()[:-1], "cut.txt is not UTF-8 at byte 3"),
        ("rows.json", b"[1]", "rows.json is of no kind that is read .*jq -c"),
        ("rows.csv", b"a,b", "rows.csv is of no kind that is read .*read_csv"),
        ("odd.txt", b"\xff\xfea", "odd.txt is not UTF-16 at byte 2"),
        ("wide.txt", "ab".encode("utf-16-le"), "wide.txt is a binary file .byte 1 is NUL"),
    ],
)
def test_bad_files_are_named_in_one_sentence(tmp_path, name, data, message):
    if data is not None:
        (tmp_path / name).write_bytes(data)
    with pytest.raises(ValueError, match=message) as error:
        prepare(tmp_path / name)
    assert "\n" not in str(error.value)
    assert not cache_folder().exists() or not list((cache_folder() / "data").iterdir())


def test_bad_folders(tmp_path):
    with pytest.raises(
        ValueError, match="holds no file of text: give files of .txt, .md, .py, .jsonl, .ndjson, .parquet"
    ):
        open_corpus(tmp_path)
    (tmp_path / "nothing.txt").touch()
    with pytest.raises(ValueError, match=r"holds no file of text \(empty: .*nothing.txt\)"):
        open_corpus(tmp_path)


def test_document_boundaries_enter_the_corpus_hash(tmp_path):
    hashes = set()
    for n, parts in enumerate((["ab", "c"], ["a", "bc"], ["abc"])):
        (tmp_path / str(n)).mkdir()
        for i, part in enumerate(parts):
            (tmp_path / str(n) / f"{i}.txt").write_text(part)
        hashes.add(prepare(tmp_path / str(n), val_fraction=1.0).meta["corpus_sha256"])
    assert len(hashes) == 3


def test_python_sources_leave_out_small_copied_and_unreadable_files(tmp_path):
    long = b"x = 1\n" * 200
    files = {
        "a.py": long,
        "b_copy.py": long,
        "c_crlf.py": long.replace(b"\n", b"\r\n"),  # the Windows wheel's copy of the same file
        "d_small.py": b"x = 1\n",
        "e_latin.py": long + b"\xe9",
        "f_other.py": long + b"y = 2\n",
        "site-packages/g.py": long + b"z = 3\n",
    }
    (tmp_path / "site-packages").mkdir()
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    found = corpus_module._python_sources({"p": tmp_path}, ("p/site-packages/",))
    assert {name for name, _ in found} == {"p/a.py", "p/f_other.py"}
    texts = [d.text for d in Corpus("p", (("c", tmp_path / "c_crlf.py"),), crlf_as_lf=True).documents()]
    assert texts == [long.decode()]


def test_stdlib_is_there_without_installed_packages():
    files = open_corpus("stdlib").files
    assert len(files) > 200
    assert not any("site-packages" in name or "__pycache__" in name for name, _ in files)


def test_builtin_has_the_expected_size_and_hash(capfd):
    prepared = prepare("builtin")  # a mismatch would warn, and warnings are errors
    splits = prepared.meta["splits"]
    assert 35e6 < sum(split["bytes"] for split in splits.values()) < 50e6
    assert 0.01 < splits["val"]["documents"] / splits["train"]["documents"] < 0.03
    for split in splits.values():
        assert split["tokens"] == split["bytes"] + split["documents"]
    assert all(version(name) == pin for name, pin in BUILTIN_VERSIONS.items()), "the constraints file pins these"
    assert prepared.meta["corpus_sha256"] == BUILTIN_SHA256
    out, err = capfd.readouterr()
    assert out == "" and err.count("\n") == 1 and BUILTIN_SHA256 in err
    assert 2.0 < bigram_entropy(prepared.split("val")) < 3.0  # Python source: far from uniform, ln 257 = 5.55


def test_an_unexpected_builtin_is_a_warning_with_versions(texts, monkeypatch):
    unexpected = Corpus("builtin", open_corpus(texts).files, BUILTIN_SHA256)
    monkeypatch.setattr(prepare_module, "open_corpora", lambda sources, field: [unexpected])
    with pytest.warns(UserWarning, match=r"builtin corpus differs .*sympy .* \(pinned 1.14.0\)"):
        prepare("builtin", val_fraction=0.2)


def test_importing_the_package_and_finding_builtin_import_nothing_heavy():
    look = "import sys, grt.data, grt.data.corpus; grt.data.corpus.open_corpus('builtin')"
    code = f"{look}; print({{'torch', 'sympy', 'numpy'}} & set(sys.modules))"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "set()"
