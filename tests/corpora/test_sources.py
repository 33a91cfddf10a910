"""Sources of text: every format and its damage, several sources at once."""

import gzip
from pathlib import Path

import pyarrow
import pytest
import zstandard
from pages import PAGES, jsonl, texts
from pyarrow import parquet

from grt.data import formats
from grt.data.corpus import open_corpus, split_sources
from grt.data.prepare import prepare
from grt.errors import ConfigError


def table(path: Path, **columns) -> bytes:
    parquet.write_table(pyarrow.table(columns), path)
    return path.read_bytes()


def pack(data: bytes, suffix: str) -> bytes:
    return {"": bytes, ".gz": gzip.compress, ".zst": zstandard.compress}[suffix](data)


@pytest.mark.parametrize("packed", ["", ".gz", ".zst"])
@pytest.mark.parametrize("kind", [".txt", ".md", ".py", ".jsonl", ".ndjson", ".parquet"])
def test_each_format_gives_the_same_text(tmp_path, kind, packed):
    if kind in (".jsonl", ".ndjson"):
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
        with pytest.raises(ConfigError, match="The pattern .* holds no file of text"):
            open_corpus(bad)
    both = prepare([t / "b.md", str(t / "a.txt")], val_fraction=1.0, quiet=True)
    assert both.meta == prepare(f"{t / 'b.md'},{t / 'a.txt'}", val_fraction=1.0, quiet=True).meta
    assert both.tokenizer.decode(both.split("val").read(0, 4)) == "BA" and both.meta["source"] == "b+a"
    (t / "x,y.txt").write_text("XY")
    assert split_sources(f"{t}/x,y.txt") == [f"{t}/x,y.txt"]
    with pytest.raises(ConfigError, match="missing: SOURCE"):
        prepare([])


@pytest.mark.parametrize("packed", ["", ".gz", ".zst"])
@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16"])
@pytest.mark.parametrize("block", [1, 1 << 20])
def test_a_byte_order_mark_is_no_text(tmp_path, monkeypatch, packed, encoding, block):
    text = "größe 東京 \N{GRINNING FACE}\n" * 3
    (tmp_path / f"a.txt{packed}").write_bytes(pack(text.encode(encoding), packed))
    monkeypatch.setattr(formats, "BLOCK", block)
    (document,) = open_corpus(tmp_path / f"a.txt{packed}").documents()
    assert (document.text, document.n_bytes) == (text, len(text.encode()))


def test_zstd_with_the_largest_window(tmp_path):
    parameters = zstandard.ZstdCompressionParameters(window_log=31, compression_level=1)
    compressor = zstandard.ZstdCompressor(compression_params=parameters).compressobj()  # it is told no size
    (tmp_path / "a.txt.zst").write_bytes(compressor.compress(b"far back") + compressor.flush())
    assert texts(tmp_path / "a.txt.zst") == ["far back"]


@pytest.fixture
def linked(tmp_path):
    """Four documents, reached by links of all kinds."""
    t, away = tmp_path / "t", tmp_path / "away"
    for name in ("t/a.txt", "t/deep/b.txt", "away/c.txt", "away/in/d.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name[-5])
    for name, to in {"t/away": away, "t/deep/up": t, "away/back": away, "t/gone.txt": away / "none",
                     "t/again.txt": t / "a.txt"}.items():  # fmt: skip
        (tmp_path / name).symlink_to(to)
    return t


@pytest.mark.parametrize("pattern", ["", "/*", "/**", "/**/*.txt", "/../t"])
def test_each_real_file_is_read_once_whatever_links_lead_to_it(linked, capsys, pattern):
    assert sorted(texts(f"{linked}{pattern}")) == ["a", "b", "c", "d"]
    prepare(f"{linked}{pattern}", val_fraction=1.0)
    said = capsys.readouterr().err
    assert "broken link: " in said and "gone.txt" in said and "found twice: " in said


def test_patterns_with_two_stars_find_what_they_name(linked):
    assert texts(f"{linked}/**/b.txt") == ["b"] and texts(f"{linked}/**/in") == ["d"]
    assert texts(f"{linked}/awa?/in/**") == ["d"]


def test_a_file_of_two_sources_is_read_once(linked, capsys):
    prepared = prepare([linked / "a.txt", linked / "again.txt", linked / "deep"], val_fraction=1.0)
    assert prepared.meta["splits"]["val"]["documents"] == 4  # deep leads up again
    assert "again.txt: left out, 1 file of an earlier source" in capsys.readouterr().err


def test_a_broken_link_alone(linked):
    with pytest.raises(ConfigError, match=r"gone.txt is a broken link: give"):
        open_corpus(linked / "gone.txt")
