"""TextStream against the plain rule: decode everything, and cut before the first stop string that is complete."""

import itertools
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from grt.data.tokenizer import ByteTokenizer, get_tokenizer
from grt.decode.text import TextStream
from grt.errors import ConfigError


def plain(text: str, stops: list[str]) -> str:
    """Character by character."""
    for n in range(len(text) + 1):
        found = [stop for stop in stops if text[:n].endswith(stop)]
        if found:
            return text[: n - max(map(len, found))]
    return text


def pieces(ids, stops=(), decode=None) -> tuple[list[str], TextStream]:
    stream, out = TextStream(decode or ByteTokenizer().decode, stops), []
    for token in ids:
        out.append(stream.add(token))
        if stream.ended:
            break
    return [*out, stream.finish()], stream


# a few letters, so that stop strings are met; characters of two to four bytes; bytes that are no UTF-8
LETTERS = st.sampled_from([*"aab\nñ東😀"])
TEXT = st.lists(st.one_of(LETTERS.map(str.encode), st.sampled_from([b"\xff", b"\xe6\x9d"])), max_size=12)
STOPS = st.lists(st.text("ab\nñ東😀", min_size=1, max_size=4), max_size=3)


@given(TEXT.map(b"".join), STOPS, st.data())
def test_it_is_the_plain_rule_wherever_tokens_end(data, stops, drawn):
    cuts = sorted({0, len(data), *drawn.draw(st.lists(st.integers(0, len(data)), max_size=8))})
    tokens = [data[a:b] for a, b in itertools.pairwise(cuts)]

    def decode(ids):
        return b"".join(tokens[i] for i in ids).decode(errors="replace")

    out, stream = pieces(range(len(tokens)), stops, decode)
    want = plain(data.decode(errors="replace"), stops)
    assert "".join(out) == stream.text == want
    assert stream.ended == (want != data.decode(errors="replace"))
    for n in range(1, len(out)):  # what is given out stays true, whatever comes: a stop string, say, or its second half
        given_out, so_far = "".join(out[:n]), b"".join(tokens[:n])
        for rest in [stop[k:] for stop in stops for k in range(len(stop))]:
            assert plain((so_far + rest.encode()).decode(errors="replace"), stops).startswith(given_out)


@pytest.mark.parametrize("name", ["bytes", "gpt2"])
def test_characters_come_whole(name):
    tokenizer, text = get_tokenizer(name), "naïve 東京 😀🇪🇺 größer\n"
    ids = [int(i) for i in tokenizer.encode(text)]
    out, _ = pieces(ids, decode=tokenizer.decode)
    assert "".join(out) == text and not any("\ufffd" in piece for piece in out)
    assert len(ids) > len([piece for piece in out if piece]), "every token was a whole character: nothing was tested"


@pytest.mark.parametrize("name", ["bytes", "gpt2"])
def test_a_stop_string_across_tokens(name):
    tokenizer = get_tokenizer(name)
    ids = [int(i) for i in tokenizer.encode("one two\n\nEND of it, END.")]
    out, stream = pieces(ids, ["\n\nEND.", " it, EN", "absent"], tokenizer.decode)
    assert "".join(out) == "one two\n\nEND of" and stream.ended
    assert stream.tokens == ids[: len(stream.tokens)] and " it, EN" in tokenizer.decode(stream.tokens)
    assert " it, EN" not in tokenizer.decode(stream.tokens[:-1])


def test_what_looked_like_a_stop_string_comes_in_the_end():
    out, stream = pieces(b"so far\n", ["\n\n"])
    assert out[-2:] == ["", "\n"] and stream.text == "so far\n" and not stream.ended
    assert pieces(b"a\xe6\x9d")[0] == ["a", "", "", "\ufffd"]


def test_the_first_to_be_complete_ends_it():
    assert pieces(b"xxabcx", ["abc", "b"])[1].text == "xxa"
    assert pieces(b"xxabcx", ["bc", "abc"])[1].text == "xx"
    assert pieces([0], ["abc", "b"], lambda _: "xxabcx")[1].text == "xxa"  # in one token too


def test_an_empty_stop_string_is_refused():
    with pytest.raises(ConfigError, match="a stop string is empty"):
        TextStream(ByteTokenizer().decode, ["a", ""])


def byte_fallback(path: Path) -> Path:
    """As SentencePiece's: a space is part of the word behind it and falls away at the start of a text; characters that
    are no words are written in bytes, a run of which is either all text or none of it."""
    words = ["<unk>", "</s>", "▁", "▁one", "▁two", "▁o", "ne", ",", *(f"<0x{b:02X}>" for b in range(256))]
    tokenizer = tokenizers.Tokenizer(
        tokenizers.models.Unigram([(word, -1.0) for word in words], unk_id=0, byte_fallback=True)
    )
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
    tokenizer.decoder = tokenizers.decoders.Sequence(
        [
            tokenizers.decoders.Replace("▁", " "),
            tokenizers.decoders.ByteFallback(),
            tokenizers.decoders.Fuse(),
            tokenizers.decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.save(str(path))
    return path


def word_pieces(path: Path) -> Path:
    words = ["[UNK]", "[SEP]", "one", "two", "##ne", "##two", "o", ","]
    tokenizer = tokenizers.Tokenizer(
        tokenizers.models.WordPiece({word: i for i, word in enumerate(words)}, unk_token="[UNK]")
    )
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = tokenizers.decoders.WordPiece()
    tokenizer.save(str(path))
    return path


ENGLISH, MIXED = "one two, onetwo two one, ", "one 東京, 😀😀😀😀😀😀😀😀 größer "


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("bytes", ENGLISH),
        ("bytes", MIXED),
        ("gpt2", ENGLISH),
        ("gpt2", MIXED),
        (byte_fallback, ENGLISH),
        (byte_fallback, MIXED),
        (word_pieces, ENGLISH),
    ],
    ids=lambda value: getattr(value, "__name__", None) or ascii(value[:7]),
)
def test_it_decodes_as_many_ids_as_there_are(tmp_path, name, text):
    """Times a constant, and not their square; what comes out is the text of all."""
    tokenizer = get_tokenizer(name if isinstance(name, str) else f"hf:{name(tmp_path / 'tokenizer.json')}")
    ids, decoded = [int(i) for i in tokenizer.encode(40 * text)], []

    def decode(some):
        decoded.append(len(some))
        return tokenizer.decode(some)

    out, stream = pieces(ids, ["absent", text + text[:-1] + "!"], decode)
    assert "".join(out) == stream.text == tokenizer.decode(ids)
    assert len(ids) > 300 and sum(decoded) < 25 * len(ids) and max(decoded) < 32


@given(st.lists(st.one_of(LETTERS.map(str.encode), st.binary(min_size=1, max_size=2)), max_size=200), STOPS)
def test_long_text_of_any_bytes(data, stops):
    """Cut in the middle of characters, of what is none, of stop strings."""
    ids = b"".join(data)
    out, stream = pieces(ids, stops)
    text = ids.decode(errors="replace")
    assert "".join(out) == plain(text, stops) and stream.ended == (plain(text, stops) != text)


def test_bytes_that_are_no_text_are_not_decoded_for_ever():
    decoded = []
    out, _ = pieces(1000 * b"\xff", (), lambda ids: decoded.append(len(ids)) or bytes(ids).decode(errors="replace"))
    assert "".join(out) == 1000 * "\ufffd" and sum(decoded) < 50 * 1000
