"""Tokenizers: round trips, and text that spells a special token stays text."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from grt.data.tokenizer import ByteTokenizer, get_tokenizer


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
    with pytest.raises(ValueError, match="'byte': choose from bytes.*nearest: bytes"):
        get_tokenizer("byte")
