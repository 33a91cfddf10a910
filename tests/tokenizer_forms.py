"""A small tokenizer.json of every form in use, and what each promises: docs/tokenizers.md.

    python tests/tokenizer_forms.py        writes the table into docs/tokenizers.md

Each is trained here with the parts that the tokenizers of that name have. tests/test_tokenizer_forms.py holds every
promise against every form, and compares the table.
"""

import functools
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from grt.config import ModelConfig
from grt.data.encode import pieces
from grt.data.tokenizer_json import JsonTokenizer
from grt.decode.sampling import Sampling
from grt.decode.stream import Stream
from grt.decode.text import UNFINISHED, TextStream
from grt.methods import build_model

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs/tokenizers.md"
BEGIN, END = "<!-- forms: python tests/tokenizer_forms.py -->", "<!-- end of forms -->"

TEXT = (
    "The quick brown fox jumps over the lazy dog. Größe, naïve café; 東京 and Москва, 😀 1234567 times!"
    "\n\n  def f(x):\n"
)
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def corpus() -> list[str]:
    return [(ROOT / "README.md").read_text(encoding="utf-8"), TEXT]


def byte_bpe(pre_tokenizer, normalizer=None, special=("<|endoftext|>",)) -> Tokenizer:
    made = Tokenizer(models.BPE())
    made.pre_tokenizer, made.decoder = pre_tokenizer, decoders.ByteLevel()
    if normalizer is not None:
        made.normalizer = normalizer
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=700, special_tokens=list(special), initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator(corpus(), trainer)
    return made


def split_by(pattern: str):
    pieces = pre_tokenizers.Split(Regex(pattern), "isolated")
    return pre_tokenizers.Sequence([pieces, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def gpt2() -> Tokenizer:
    return byte_bpe(pre_tokenizers.ByteLevel(add_prefix_space=False))


def roberta() -> Tokenizer:
    return byte_bpe(pre_tokenizers.ByteLevel(add_prefix_space=True), special=("<s>", "<pad>", "</s>", "<unk>"))


def llama3() -> Tokenizer:
    return byte_bpe(split_by(LLAMA3), special=("<|begin_of_text|>", "<|end_of_text|>"))


def qwen() -> Tokenizer:
    made = byte_bpe(split_by(LLAMA3.replace("{1,3}", "")), normalizers.NFC())
    made.add_tokens([AddedToken("<tool_call>", special=False, normalized=False)])
    return made


def lowercase() -> Tokenizer:
    return byte_bpe(pre_tokenizers.ByteLevel(add_prefix_space=False), normalizers.Lowercase())


def nfkc() -> Tokenizer:
    return byte_bpe(split_by(LLAMA3), normalizers.NFKC())


def stripping() -> Tokenizer:
    """Added tokens that take the spaces around them along, and one that stands as a whole word only."""
    made = gpt2()
    both = AddedToken("<both>", lstrip=True, rstrip=True, special=False)
    made.add_tokens([both, AddedToken("<left>", lstrip=True), AddedToken("word", single_word=True), " <in side> "])
    return made


def holes() -> Tokenizer:
    """Ids that stand for nothing: the later half of the vocabulary begins at 1000."""
    settings = json.loads(gpt2().to_str())
    vocab = settings["model"]["vocab"]
    vocab.update({token: i + 600 for token, i in vocab.items() if i >= 400})
    return Tokenizer.from_str(json.dumps(settings))


def sentencepiece_bpe(normalizer, pre_tokenizer, decoder) -> Tokenizer:
    """Merges as SentencePiece finds them, within words with their space, used on text that nothing cuts into words."""
    trained = Tokenizer(models.BPE(unk_token="<unk>"))
    trained.pre_tokenizer = pre_tokenizers.Metaspace()
    special = ["<unk>", "<s>", "</s>", *BYTES]
    trained.train_from_iterator(
        corpus(), trainers.BpeTrainer(vocab_size=900, special_tokens=special, limit_alphabet=90, show_progress=False)
    )
    model = json.loads(trained.to_str())["model"]
    vocab = dict(model["vocab"])
    for run in ("▁▁", "▁▁▁▁"):
        vocab[run] = len(vocab)
    merges = [("▁", "▁"), ("▁▁", "▁▁"), *map(tuple, model["merges"])]
    made = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    made.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in special[:3]])
    made.decoder = decoder
    if normalizer is not None:
        made.normalizer = normalizer
    if pre_tokenizer is not None:
        made.pre_tokenizer = pre_tokenizer
    return made


def pieces_to_text(strip: int):
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    return decoders.Sequence([*parts, decoders.Strip(" ", strip, 0)] if strip else parts)


def llama2() -> Tokenizer:
    return sentencepiece_bpe(
        normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]), None, pieces_to_text(1)
    )


def mistral() -> Tokenizer:
    before = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    return sentencepiece_bpe(None, before, pieces_to_text(1))


def gemma() -> Tokenizer:
    before = pre_tokenizers.Split(" ", "merged_with_previous")
    return sentencepiece_bpe(normalizers.Replace(" ", "▁"), before, pieces_to_text(0))


def unigram(byte_fallback: bool) -> Tokenizer:
    made = Tokenizer(models.Unigram())
    made.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Replace(Regex(" {2,}"), " ")])
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    special = ["<pad>", "</s>", "<unk>", *(BYTES if byte_fallback else [])]
    trainer = trainers.UnigramTrainer(
        vocab_size=800, special_tokens=special[:3], unk_token="<unk>", show_progress=False
    )
    made.train_from_iterator(corpus(), trainer)
    if byte_fallback:
        model = json.loads(made.to_str())["model"]
        vocab = [(token, score) for token, score in model["vocab"]] + [(name, -20.0) for name in BYTES]
        made.model = models.Unigram(vocab, model["unk_id"], byte_fallback=True)
        made.decoder = pieces_to_text(1)
    else:
        made.decoder = decoders.Metaspace()
    return made


def t5() -> Tokenizer:
    return unigram(byte_fallback=False)


def unigram_bytes() -> Tokenizer:
    return unigram(byte_fallback=True)


def bert(lowercase: bool) -> Tokenizer:
    made = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    made.normalizer = normalizers.BertNormalizer(lowercase=lowercase)
    made.pre_tokenizer, made.decoder = pre_tokenizers.BertPreTokenizer(), decoders.WordPiece()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    made.train_from_iterator(
        corpus(), trainers.WordPieceTrainer(vocab_size=700, special_tokens=special, show_progress=False)
    )
    return made


def bert_uncased() -> Tokenizer:
    return bert(lowercase=True)


def bert_cased() -> Tokenizer:
    return bert(lowercase=False)


def words() -> Tokenizer:
    made = Tokenizer(models.WordLevel(unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.train_from_iterator(
        corpus(),
        trainers.WordLevelTrainer(vocab_size=500, special_tokens=["<unk>", "</s>"], show_progress=False),
    )
    return made


class Form(NamedTuple):
    """loses: what does not come back of a text, as the form has it."""

    told: str
    make: Callable[[], Tokenizer]
    loses: str = ""


FORMS = {
    "gpt2": Form("GPT-2: bytes, split by its pattern", gpt2),
    "roberta": Form("RoBERTa: the same, a space put before the text", roberta, "a space is added at the start"),
    "llama3": Form("Llama 3: bytes, split by a pattern of its own", llama3),
    "qwen": Form("Qwen: the same, NFC, added tokens", qwen, "characters are composed (NFC)"),
    "llama2": Form("Llama 2: SentencePiece BPE, byte fallback", llama2),
    "mistral": Form("Mistral: the same by Metaspace, in one piece", mistral, "one space at the start"),
    "gemma": Form("Gemma: the same without a space before the text", gemma),
    "t5": Form("T5, XLM-R: Unigram", t5, "NFKC, runs of spaces, unknown characters"),
    "unigram_bytes": Form("Unigram with byte fallback", unigram_bytes, "NFKC, runs of spaces"),
    "bert_uncased": Form("BERT uncased: WordPiece, lowercase", bert_uncased, "case, spaces, unknown words"),
    "bert_cased": Form("BERT cased: WordPiece", bert_cased, "spaces, unknown words"),
    "words": Form("whole words", words, "spaces, unknown words"),
    "lowercase": Form("bytes, lowercase", lowercase, "case"),
    "nfkc": Form("bytes, NFKC", nfkc, "NFKC"),
    "stripping": Form("added tokens that strip spaces, or stand alone", stripping, "spaces beside added tokens"),
    "holes": Form("a vocabulary with holes", holes),
}


@functools.cache
def saved(name: str) -> str:
    """The tokenizer.json."""
    return FORMS[name].make().to_str()


def tokenizer(name: str) -> JsonTokenizer:
    return JsonTokenizer(name, saved(name).encode(), name)


# Promises: each raises AssertionError where it does not hold, and returns what the table says where it does.

SHORT = [
    TEXT, "", " ", "a", "  two  spaces ", "\n\n\t x", "größer 東京 🙂", "x" * 300, "1234567890" * 3, "\u2460\ufb01",
    "word sword <both> <left> a <in side> b", "\x00\x7f\u2028\u3000",
]  # fmt: skip


def long_text(n: int, seed: int) -> str:
    """Words, numbers, runs of spaces, lines, characters of other scripts and letters without a space, at random."""
    rng = random.Random(seed)
    kinds = (
        lambda: " ".join(rng.choices(TEXT.split(), k=rng.randint(1, 30))),
        lambda: "".join(rng.choices("0123456789", k=rng.randint(1, 400))),
        lambda: rng.choice((" ", "\n", "\t", "\n\n", " \n")) * rng.randint(1, 9),
        lambda: "".join(rng.choices("東京都大阪北海道ёжикМосква😀🙂é", k=rng.randint(1, 80))),
        lambda: "".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=rng.randint(1, 200))),
        lambda: rng.choice("a-=.") * rng.randint(1, 300),
    )
    made: list[str] = []
    while sum(map(len, made)) < n:
        made.append(rng.choice(kinds)())
    return "".join(made)[:n]


def library_says(name: str, text: str) -> str:
    own = Tokenizer.from_str(saved(name))
    own.encode_special_tokens = True
    return own.decode(own.encode(text, add_special_tokens=False).ids, skip_special_tokens=False)


def text_stays_text(name: str) -> str:
    """What the library itself gives back; all of it, where the form loses nothing."""
    tok = tokenizer(name)
    for text in SHORT:
        back = tok.decode(tok.encode(text))
        assert back == (library_says(name, text) if FORMS[name].loses else text), (name, text, back)
    return f"but for {FORMS[name].loses}" if FORMS[name].loses else "yes"


def special_tokens_are_never_made(name: str) -> str:
    tok = tokenizer(name)
    added = json.loads(saved(name))["added_tokens"]
    unknown = json.loads(saved(name))["model"].get("unk_token") or "<unk>"
    special = {token["content"]: token["id"] for token in added if token["special"]} | {tok.eot_text: tok.eot}
    for spelled in special:
        for text in (
            spelled,
            f"a {spelled} b",
            f"{spelled}{spelled}",
            f"x{spelled}y {spelled}",
            f"{spelled[:-1]}{spelled}",
        ):
            ids = set(tok.encode(text).tolist())
            assert not ids & {i for content, i in special.items() if content != unknown}, (name, text, ids)
            if not FORMS[name].loses:
                assert tok.decode(tok.encode(text)) == text, (name, text, tok.decode(tok.encode(text)))
    return "yes"


def parts_are_the_whole(name: str) -> str:
    """Long text in pieces gives the ids that it gives at once."""
    tok, text = tokenizer(name), long_text(40_000, seed=1)
    found = list(pieces([text[:7000], text[7000:]], tok, size=3000))
    assert len(found) > 5 and "".join(piece.text for piece in found) == text
    parts = np.concatenate([tok.encode(piece.text, piece.before, piece.after) for piece in found])
    assert parts.tolist() == tok.encode(text).tolist(), name
    return f"{len(found)} pieces of 40,000 characters"


def prompt_and_text_are_the_whole(name: str) -> str:
    """A stream of tokens behind a prompt gives what all of them decode to, behind what the prompt decodes to."""
    tok = tokenizer(name)
    rng = random.Random(0)
    usable = sorted(set(range(tok.vocab_size)) - set(tok.unused))
    for case in range(60):
        text = rng.choice(SHORT) + long_text(40, case)
        ids = tok.encode(text).tolist() if case % 2 else rng.choices(usable, k=40)
        at = rng.randint(1, max(1, len(ids) - 1))
        prompt = tok.encode(tok.decode(ids[:at])).tolist()  # as a user's text gives
        stream = TextStream(tok.decode, prompt=prompt)
        shown = "".join([*map(stream.add, ids[at:]), stream.finish()])
        assert tok.decode(prompt) + shown == tok.decode(prompt + ids[at:]), (name, case)
    return "yes"


def a_cut_character_is_one_sign(name: str) -> str:
    tok, cut = tokenizer(name), 0
    for character in "é東😀ёЖ\u2603":
        before = tok.encode("a b").tolist()
        ids = tok.encode("a b" + character).tolist()
        for end in range(1, len(ids)):
            text = tok.decode(ids[:end])
            whole = tok.decode(ids)
            if not whole.startswith(text):
                assert text.endswith(UNFINISHED) and text.count(UNFINISHED) == 1, (name, character, text, before)
                cut += 1
    return "one U+FFFD" if cut else "never cut"


def unused_ids_are_never_drawn(name: str) -> str:
    tok = tokenizer(name)
    assert set(tok.unused) == set(range(tok.vocab_size)) - set(
        Tokenizer.from_str(saved(name)).get_vocab(with_added_tokens=True).values()
    )
    model = build_model(ModelConfig(layout="1+1x2+1", d_model=16, n_heads=2, context=64, vocab_size=tok.vocab_size))
    never = Sampling(never=tuple(tok.unused))
    drawn = [step[0].token for step in Stream(model.eval(), [[tok.eot]], max_new_tokens=60, seeds=[1], sampling=never)]
    assert len(drawn) == 60 and not set(drawn) & set(tok.unused)
    return f"{len(tok.unused)} of {tok.vocab_size:,}" if tok.unused else "there are none"


PROMISES: dict[str, Callable[[str], str]] = {
    "a text comes back": text_stays_text,
    "special tokens are never made from text": special_tokens_are_never_made,
    "long text in pieces is the whole": parts_are_the_whole,
    "prompt + text = all ids": prompt_and_text_are_the_whole,
    "a character cut at the end": a_cut_character_is_one_sign,
    "ids without a token are never drawn": unused_ids_are_never_drawn,
}


def table() -> str:
    lines = ["| form | " + " | ".join(PROMISES) + " |", "|" + "---|" * (1 + len(PROMISES))]
    lines += [
        f"| {form.told} | " + " | ".join(p(name) for p in PROMISES.values()) + " |" for name, form in FORMS.items()
    ]
    return "\n".join(lines)


def page_with(rows: str, page: str) -> str:
    before, rest = page.split(BEGIN)
    return f"{before}{BEGIN}\n\n{rows}\n\n{END}{rest.split(END)[1]}"


if __name__ == "__main__":
    PAGE.write_text(page_with(table(), PAGE.read_text(encoding="utf-8")), encoding="utf-8")
