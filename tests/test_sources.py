"""Sources of text: every format and its damage, several sources at once, downloads, datasets, nanoGPT's files."""

import errno
import gzip
import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pyarrow
import pytest
import zstandard
from pyarrow import parquet

from grt.config import ConfigError
from grt.data import formats, remote
from grt.data.corpus import open_corpus, split_sources
from grt.data.formats import documents_of
from grt.data.prepare import prepare
from grt.data.tokenizer import get_tokenizer

PAGES = ["first größe\n", "second\r\nline", "third 東京 <|endoftext|>"]


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("GRT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def jsonl(rows: list) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def table(path: Path, **columns) -> bytes:
    parquet.write_table(pyarrow.table(columns), path)
    return path.read_bytes()


def pack(data: bytes, suffix: str) -> bytes:
    return {"": bytes, ".gz": gzip.compress, ".zst": zstandard.compress}[suffix](data)


def texts(source, field="text") -> list[str]:
    return [document.text for document in open_corpus(source, field).documents()]


@pytest.mark.parametrize("packed", ["", ".gz", ".zst"])
@pytest.mark.parametrize("kind", [".txt", ".md", ".py", ".jsonl", ".parquet"])
def test_each_format_gives_the_same_text(tmp_path, kind, packed):
    if kind == ".jsonl":
        data, wanted = jsonl([{"text": page, "n": 1} for page in ["", *PAGES, None]]) + b"\n", PAGES
    elif kind == ".parquet":
        data, wanted = table(tmp_path / "made", text=["", *PAGES, None]), PAGES
    else:
        data, wanted = "".join(PAGES).encode(), ["".join(PAGES)]
    path = tmp_path / f"pages{kind}{packed}"
    path.write_bytes(pack(data, packed))
    corpus = open_corpus(path)
    assert corpus.name == "pages"
    documents = list(corpus.documents())
    assert [document.text for document in documents] == wanted
    assert [document.n_bytes for document in documents] == [len(text.encode()) for text in wanted]


@pytest.mark.parametrize("packed", ["", ".gz", ".zst"])
def test_a_long_text_is_read_in_parts(tmp_path, monkeypatch, packed):
    text = "größe 東京\n" * 400
    (tmp_path / f"a.txt{packed}").write_bytes(pack(text.encode(), packed))
    monkeypatch.setattr(formats, "BLOCK", 7)  # parts end within characters
    monkeypatch.setattr(formats, "ZSTD_BLOCK", 5)
    (document,) = open_corpus(tmp_path / f"a.txt{packed}").documents()
    assert document.n_bytes == len(text.encode())
    assert document.text == document.text == text
    if packed != ".zst":  # there parts are what a block unpacks to
        assert len(list(document.parts())) > 100


def test_several_zstd_frames_and_gzip_members(tmp_path):
    for suffix in (".gz", ".zst"):
        (tmp_path / f"a.txt{suffix}").write_bytes(pack(b"one ", suffix) + pack(b"two", suffix))
        assert texts(tmp_path / f"a.txt{suffix}") == ["one two"]


BROKEN = {
    "latin.md": ("caf\xe9 noir".encode("latin-1"), "latin.md is not UTF-8 at byte 3"),
    "binary.py": (b"x = 1\0", r"binary.py is a binary file \(byte 5 is NUL\)"),
    "cut.txt.gz": (gzip.compress(b"text" * 99)[:-9], "cut.txt.gz is damaged or cut off"),
    "no.txt.gz": (b"not packed", "no.txt.gz is damaged or cut off"),
    "sum.txt.gz": (gzip.compress(b"text")[:-8] + b"\0" * 8, "sum.txt.gz is damaged or cut off"),
    "cut.txt.zst": (zstandard.compress(b"text" * 99)[:-3], r"cut.txt.zst is damaged or cut off \(the last frame"),
    "no.txt.zst": (b"not packed", "no.txt.zst is damaged or cut off"),
    "latin.txt.gz": (gzip.compress("caf\xe9".encode("latin-1")), "latin.txt.gz is not UTF-8 at byte 3"),
    "bad.jsonl": (jsonl([{"text": "a"}]) + b"{'text': 1}\n", r"bad.jsonl line 2 is not JSON"),
    "half.jsonl": (jsonl([{"text": "a"}])[:-4], r"half.jsonl line 1 is not JSON"),
    "deep.jsonl": (b"[" * 100_000 + b"\n", r"deep.jsonl line 1 is not JSON"),
    "latin.jsonl": (b'{"text": "a"}\n{"text": "\xe9"}\n', "latin.jsonl line 2 is not UTF-8 at byte 24 of the file"),
    "list.jsonl": (b"[1]\n", "list.jsonl line 1 is no JSON object"),
    "field.jsonl": (jsonl([{"body": "a", "n": 1}]), r"line 1 has no field 'text' \(it has body, n\): .*--field"),
    "number.jsonl": (jsonl([{"text": 5}]), "line 1 has int in field 'text'"),
    "half_pair.jsonl": (b'{"text": "a\\ud800"}\n', "line 1 has half a surrogate pair at character 1"),
    "blank.jsonl": (jsonl([{"text": ""}]), "blank holds no text: all documents are empty"),
    "no.parquet": (b"not a table", "no.parquet is no intact Parquet file"),
    "no.parquet.gz": (gzip.compress(b"not a table"), "no.parquet.gz is no intact Parquet file"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_files_are_named_with_the_place(tmp_path, name):
    data, message = BROKEN[name]
    (tmp_path / name).write_bytes(data)
    with pytest.raises(ConfigError, match=message) as error:
        prepare(tmp_path / name, quiet=True)
    assert "\n" not in str(error.value) and (tmp_path / name).read_bytes() == data


def test_broken_parquet(tmp_path):
    path = tmp_path / "a.parquet"
    data = table(path, body=["word " * 50] * 1000, n=[1] * 1000)
    for field, message in (("text", r"has no column 'text' \(body, n\): .*--field"), ("n", "row 1 has int in")):
        with pytest.raises(ConfigError, match=message):
            texts(path, field)
    assert len(texts(path, "body")) == 1000
    for broken in (data[:-20], data[: len(data) // 2]):
        path.write_bytes(broken)
        with pytest.raises(ConfigError, match=r"a.parquet is no intact Parquet file .*get the file again"):
            texts(path, "body")


def test_a_field_of_ones_own(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(jsonl([{"body": "one"}, {"body": "two"}]))
    out = prepare(tmp_path / "a.jsonl", field="body", val_fraction=1.0, quiet=True)
    assert out.tokenizer.decode(out.split("val").read(0, 4)) == "one"


def test_folders_patterns_and_several_sources(tmp_path):
    files = {"a.txt": b"A", "b.md": b"B", "deep/c.jsonl": jsonl([{"text": "C"}, {"text": "D"}]), "e.html": b"E",
             ".git/f.txt": b"F", "g.txt": b""}  # fmt: skip
    for name, data in files.items():
        (tmp_path / "t" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "t" / name).write_bytes(data)
    t = tmp_path / "t"
    assert texts(t) == ["A", "B", "C", "D"]
    assert texts(f"{t}/*.md") == ["B"] and texts(f"{t}/*") == ["A", "B", "C", "D"]
    assert texts(f"{t}/**/*.jsonl") == ["C", "D"]
    for bad in (f"{t}/*.html", f"{t}/g*"):
        with pytest.raises(ConfigError, match="The pattern .* finds no file that holds text"):
            open_corpus(bad)
    both = prepare([t / "b.md", str(t / "a.txt")], val_fraction=1.0, quiet=True)
    assert both.meta == prepare(f"{t / 'b.md'},{t / 'a.txt'}", val_fraction=1.0, quiet=True).meta
    assert both.tokenizer.decode(both.split("val").read(0, 4)) == "BA" and both.meta["source"] == "b+a"
    (t / "x,y.txt").write_text("XY")
    assert split_sources(f"{t}/x,y.txt") == [f"{t}/x,y.txt"]
    with pytest.raises(ConfigError, match="missing: SOURCE"):
        prepare([])


# Elsewhere


@pytest.fixture
def server():
    """Serves what is in `pages`, and counts the requests."""
    pages, asked = {}, []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            asked.append(self.path)
            data = pages.get(self.path)
            self.send_response(404 if data is None else 200)
            self.end_headers()
            self.wfile.write(data or b"")

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as httpd:
        thread = threading.Thread(target=httpd.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{httpd.server_port}", pages, asked
        httpd.shutdown()
        thread.join()


def test_a_download_is_checked_and_kept(server, cache):
    address, pages, asked = server
    pages["/a/page.txt"] = b"some text"
    sum_ = hashlib.sha256(b"some text").hexdigest()
    source = f"url:{address}/a/page.txt?x=1#sha256={sum_}"
    pages["/a/page.txt?x=1"] = b"some text"
    for _ in range(2):
        assert texts(source) == ["some text"]
    assert len(asked) == 1
    kept = next((cache / "downloads").iterdir())
    kept.write_bytes(b"damaged")
    assert texts(source) == ["some text"] and len(asked) == 2
    pages["/b.txt"] = b"other text"
    bad = [
        (f"url:{address}/b.txt#sha256={sum_}", "has sha256 .* instead of .*: it is another file"),
        (f"url:{address}/c.txt#sha256={sum_}", r"cannot be had \(Not Found\): check the network"),
        (f"url:http://127.0.0.1:1/c.txt#sha256={sum_}", r"cannot be had \(.*refused\)"),
        (f"url:{address}/b.txt", "has no sha256"),
        (f"url:{address}/b.exe#sha256={sum_}", "names no file of a kind that is read"),
        ("url:ftp://a/b.txt", "is no address"),
    ]
    for source, message in bad:
        with pytest.raises(ConfigError, match=message):
            open_corpus(source)
    assert [path.name for path in (cache / "downloads").iterdir()] == [kept.name]


def test_a_full_disk_in_a_download_names_the_file(server, monkeypatch):
    address, pages, _ = server
    pages["/a.txt"] = b"some text"

    def full(_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(remote, "_sha256", full)
    with pytest.raises(OSError, match=r"No space left on device: .*downloads/.*a.txt"):
        open_corpus(f"url:{address}/a.txt#sha256={'0' * 64}")


def test_shakespeare_is_a_shortcut(monkeypatch, server):
    address, pages, _ = server
    pages["/input.txt"] = b"First Citizen"
    url = f"url:{address}/input.txt#sha256={hashlib.sha256(b'First Citizen').hexdigest()}"
    assert remote.SHORTCUTS["shakespeare"].endswith("57e2dc565ed")  # of the file of 1,115,394 bytes
    monkeypatch.setitem(remote.SHORTCUTS, "shakespeare", url)
    corpus = open_corpus("shakespeare")
    assert corpus.name == "shakespeare" and [d.text for d in corpus.documents()] == ["First Citizen"]


def test_a_dataset_is_streamed_once_into_the_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "train.jsonl").write_bytes(jsonl([{"body": page} for page in PAGES]))
    source = f"hf:{tmp_path / 'set'}"
    assert texts(source, "body") == PAGES
    with pytest.raises(ConfigError, match=r"has no field 'text' \(body\)"):
        open_corpus(source)
    (tmp_path / "set" / "train.jsonl").unlink()
    assert texts(source, "body") == PAGES
    with pytest.raises(ConfigError, match=r"hf:.*/none cannot be had \(.*\): check its name") as error:
        open_corpus(f"hf:{tmp_path}/none")
    assert "\n" not in str(error.value)


def test_a_dataset_with_a_config(monkeypatch):
    def load_dataset(name, config, *, split, streaming):
        assert (name, config, split, streaming) == ("some/set", "small", "train", True)
        return [{"text": "one"}, {"text": None}, {"text": "two"}]

    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    assert texts("hf:some/set:small") == ["one", "two"]


# nanoGPT


@pytest.fixture
def nano(tmp_path):
    """A folder as nanoGPT's data/openwebtext/prepare.py leaves it."""
    folder, gpt2 = tmp_path / "nano", get_tokenizer("gpt2")
    folder.mkdir()
    for split, pages in {"train": PAGES * 50, "val": PAGES}.items():
        ids = [i for page in pages for i in (*gpt2.encode(page), 50256)]
        np.array(ids, np.uint16).tofile(folder / f"{split}.bin")
    return folder


def test_nanogpt_folders_keep_their_split(nano):
    out = prepare(nano, tokenizer="gpt2", quiet=True)
    for split in ("train", "val"):
        assert (out.folder / f"{split}-00000.bin").read_bytes() == (nano / f"{split}.bin").read_bytes()
    val = out.split("val")
    assert (val.n_documents, val.n_bytes) == (3, len("".join(PAGES).encode()))
    assert len(out.split("val", "document").lengths) == 3
    (nano / "val.bin").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"val.bin has 0 bytes, which are no 16-bit tokens"):
        prepare(nano, tokenizer="gpt2")


def test_one_nanogpt_file_is_cut_at_a_document(nano):
    out = prepare(nano / "train.bin", tokenizer="gpt2", val_fraction=0.1, quiet=True)
    raw = b"".join((out.folder / f"{split}-00000.bin").read_bytes() for split in ("train", "val"))
    assert raw == (nano / "train.bin").read_bytes()
    assert out.split("train").read(out.split("train").n_tokens - 1, 1)[0] == 50256
    assert prepare(nano / "train.bin", tokenizer="gpt2", val_fraction=1.0, quiet=True).split("train").n_tokens == 0


def test_token_files_that_nothing_can_be_made_of(nano, tmp_path):
    with pytest.raises(ConfigError, match="holds GPT-2 tokens, not those of bytes: give --tokenizer gpt2"):
        prepare(nano)
    (tmp_path / "a.txt").write_text("text")
    with pytest.raises(ConfigError, match="one of which is a .bin file: prepare it alone"):
        prepare([tmp_path / "a.txt", nano / "val.bin"], tokenizer="gpt2")
    np.array([1, 60000], np.uint16).tofile(tmp_path / "ids.bin")
    with pytest.raises(ConfigError, match=r"ids.bin holds id 60000, beyond its vocabulary of 50257"):
        prepare(tmp_path / "ids.bin", tokenizer="gpt2")
    (tmp_path / "ids.bin").write_bytes(b"abc")
    with pytest.raises(ConfigError, match=r"ids.bin has 3 bytes"):
        prepare(tmp_path / "ids.bin", tokenizer="gpt2")
    (nano / "meta.pkl").touch()
    with pytest.raises(ConfigError, match=r"has a vocabulary of its own \(meta.pkl\)"):
        prepare(nano, tokenizer="gpt2")


def test_libraries_that_are_not_there(tmp_path, monkeypatch):
    for name in ("pyarrow", "datasets"):
        monkeypatch.setitem(__import__("sys").modules, name, None)
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    with pytest.raises(ConfigError, match=r"needs pyarrow: install gated-recurrent-transformer\[data\]"):
        list(documents_of("a", tmp_path / "a.parquet", "text"))
    with pytest.raises(ConfigError, match=r"hf:a/b needs datasets: install gated-recurrent-transformer\[data\]"):
        open_corpus("hf:a/b")
