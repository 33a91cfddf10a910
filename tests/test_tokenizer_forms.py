"""Every promise that docs/tokenizers.md makes, held against every form of tokenizer in use."""

import re
import subprocess
import sys

import numpy as np
import pytest
import tokenizer_forms as forms
from hypothesis import given, settings
from hypothesis import strategies as st

from grt.data import tokenizer_json
from grt.data.encode import pieces


@pytest.mark.parametrize("promise", forms.PROMISES.values(), ids=lambda promise: promise.__name__)
@pytest.mark.parametrize("name", forms.FORMS)
def test_a_form_keeps_a_promise(name, promise):
    assert promise(name)


def test_the_table_is_what_was_found():
    """Where it is not: python tests/tokenizer_forms.py."""
    page = forms.PAGE.read_text(encoding="utf-8")
    assert forms.page_with(forms.table(), page) == page


WORDS = [
    "a",
    " ",
    "  ",
    "\n",
    "the ",
    "fox",
    "'s",
    "1234567",
    "東京",
    "é",
    "😀",
    "<both>",
    " <in side> ",
    "<left>",
    "word",
]
SPECIAL = ["<tool_call>", "</s>", "<|endoftext|>", "[SEP]", "<pad>"]
UNKNOWN = re.compile(r"(\[UNK\]|<unk>)( \1)+")
RUNS = st.sampled_from("x- \n").flatmap(lambda letter: st.integers(1, 40).map(lambda n: n * letter))
PARTS = st.lists(
    st.one_of(st.sampled_from(WORDS), st.sampled_from(SPECIAL), RUNS, st.text(max_size=10)), min_size=30, max_size=80
)


@pytest.mark.parametrize("name", forms.FORMS)
@settings(max_examples=25)
@given(parts=PARTS)
def test_any_text_in_pieces_is_the_whole(name, parts):
    """Wherever it is cut: pieces of some 300 characters, settled by 100 around them."""
    text, tok = "".join(parts), forms.tokenizer(name)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokenizer_json, "CONTEXT", 100)
        tok.context = min(tok.context, 100)
        found = list(pieces([text], tok, size=300))
        got = np.concatenate([tok.encode(piece.text, piece.before, piece.after) for piece in found])
    assert "".join(piece.text for piece in found) == text
    assert got.tolist() == tok.encode(text).tolist()


@pytest.mark.parametrize("letter", ["x", " ", "é", "7", "=", "\n", "東"])
@pytest.mark.parametrize("name", forms.FORMS)
def test_a_run_that_nothing_cuts_stays_text(name, letter, monkeypatch):
    """And takes no more memory than it must: a piece is never longer than LONGEST."""
    monkeypatch.setattr("grt.data.encode.LONGEST", 6000)
    text, tok = "a " + 20_000 * letter + " b", forms.tokenizer(name)
    found = list(pieces([text], tok, size=3000))
    ids = np.concatenate([tok.encode(piece.text, piece.before, piece.after) for piece in found])
    assert max(len(piece.text) for piece in found) <= 6000
    whole = forms.library_says(name, text) if forms.FORMS[name].loses else text
    assert UNKNOWN.sub(r"\1", tok.decode(ids)) == UNKNOWN.sub(
        r"\1", whole
    )  # a word that is not known is one, however long


MEMORY = """
import sys
import tokenizer_forms as forms
from pathlib import Path
from grt.data.prepare import prepare
name, source, out = sys.argv[1:]
Path(out + ".json").write_text(forms.saved(name), encoding="utf-8")
prepare(source, tokenizer=f"hf:{out}.json", out=Path(out), quiet=True)
"""


def most_memory(name: str, source, out) -> int:
    """Bytes that a process takes at most to prepare the source."""
    code = f"{MEMORY}\nimport resource\nprint(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)"
    command = [sys.executable, "-c", code, name, str(source), str(out)]
    paths = {"PYTHONPATH": f"{forms.ROOT}:{forms.ROOT / 'tests'}", "PATH": "", "GRT_CACHE": str(out) + "-cache"}
    made = subprocess.run(command, env=paths, capture_output=True, text=True, check=False)
    assert made.returncode == 0, made.stderr
    return int(made.stdout)


def one_line(path, n_bytes: int):
    block = forms.long_text(1 << 18, seed=2).replace("\n", " ")
    with path.open("w", encoding="utf-8") as file:
        while file.tell() < n_bytes:
            file.write(block)
    return path


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", ["llama2", "llama3", "t5", "bert_uncased"])
def test_twice_the_text_takes_no_more_memory(name, tmp_path):
    small, large = (one_line(tmp_path / f"{n}.txt", n * 10**6) for n in (4, 12))
    first, second = (most_memory(name, text, tmp_path / text.stem) for text in (small, large))
    assert second - first < 60e6, (first, second)


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", forms.FORMS)
def test_a_hundred_megabytes_take_less_than_one_gigabyte(name, tmp_path):
    assert most_memory(name, one_line(tmp_path / "text.txt", 100 * 10**6), tmp_path / "out") < 1e9
