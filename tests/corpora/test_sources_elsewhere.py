"""Sources that others made: downloads, datasets, nanoGPT's files."""

import errno
import hashlib
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest
from pages import PAGES, jsonl, texts

from grt.data import remote
from grt.data.corpus import open_corpus
from grt.data.formats import documents_of
from grt.data.prepare import prepare
from grt.data.tokenizer import get_tokenizer
from grt.errors import ConfigError


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

    monkeypatch.setattr(remote.files, "sha256", full)
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
    (tmp_path / "set" / "train.jsonl").write_bytes(jsonl([{"body": page} for page in PAGES[1:]]))
    assert texts(source, "body") == PAGES[1:]  # the rows have changed
    with monkeypatch.context() as patch:
        patch.setattr("grt.data.remote._stream", lambda *_: 1 / 0)
        assert texts(source, "body") == PAGES[1:]  # and are not read again
        (tmp_path / "set" / "train.jsonl").unlink()
        assert texts(source, "body") == PAGES[1:]
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


def test_documents_of_a_nanogpt_file(tmp_path):
    """Hello world, a lone Hello, and a last document that was cut off: where they end, and their bytes."""
    np.array([15496, 995, 50256, 15496, 50256, 15496, 995, 995], np.uint16).tofile(tmp_path / "ids.bin")
    val = prepare(tmp_path / "ids.bin", tokenizer="gpt2", val_fraction=1.0, quiet=True).split("val", "document")
    assert val.lengths.tolist() == [3, 2, 3] and val.n_documents == 3
    assert val.n_bytes == len("Hello world" + "Hello" + "Hello world world")


@pytest.mark.parametrize(("end", "train"), [(10, 90), (83, 90), (84, 90), (85, 86), (88, 89)])
def test_a_document_that_begins_too_early_does_not_move_the_cut(tmp_path, end, train):
    """Of 100 tokens the last 10 are the tail, and a document may begin at most 5 tokens before it."""
    ids = np.full(100, 995, np.uint16)
    ids[end] = 50256
    ids.tofile(tmp_path / "ids.bin")
    splits = prepare(tmp_path / "ids.bin", tokenizer="gpt2", val_fraction=0.1, quiet=True).meta["splits"]
    assert (splits["train"]["tokens"], splits["val"]["tokens"]) == (train, 100 - train)


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
