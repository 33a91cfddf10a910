"""Any tokenizer.json (the format of the `tokenizers` library) as a tokenizer: `hf:PATH` or `hf:NAME` of a hub.

Text is only text here too: a spelled special token is encoded in two halves, and no token is added around it.

Where GPT-2 splits text into words is known, and long text is cut there. Of other forms it is found by trial: where
windows of text that begin and end elsewhere all have the same tokens around a place, the whole text has them too.
"""

import hashlib
import itertools
import json
import re
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from grt.data.tokenizer import cut_before_space, smallest_dtype
from grt.errors import ConfigError

FILE = "tokenizer.json"
# What ends a text in the common families (GPT, Llama 2 and 3, Qwen, Gemma, BERT); the first that is there is taken.
CONTEXT = 512  # characters on either side of a place by which its tokens are settled
TRIED = 48  # places at which a long text may be cut
WINDOWS = ((1.0, 1.0), (0.83, 1.0), (0.61, 0.7), (0.41, 0.4))  # shares of CONTEXT before and behind a place
END_OF_TEXT = ("<|endoftext|>", "</s>", "<|end_of_text|>", "<eos>", "[EOS]", "[SEP]")


class JsonTokenizer:
    """The tokenizer of one tokenizer.json; its sha256 is that of the file."""

    def __init__(self, name: str, data: bytes, where: str):
        from tokenizers import Tokenizer

        try:
            settings = json.loads(data)
            # Its post-processor would only add tokens, and shorten the offsets of others.
            self._tokenizer = Tokenizer.from_str(json.dumps(settings | {"post_processor": None}))
        except Exception as error:  # the library raises plain Exception
            raise ConfigError(f"{where} is no tokenizer.json ({error}): restore it or give another.") from None
        self._tokenizer.encode_special_tokens = True
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        self.name, self.data, self.sha256 = name, data, hashlib.sha256(data).hexdigest()
        ids = self._tokenizer.get_vocab(with_added_tokens=True)
        self.eot_text = next((token for token in END_OF_TEXT if token in ids), "")
        if not self.eot_text:
            raise ConfigError(f"{where} has no end-of-text token: add one of {', '.join(END_OF_TEXT)} to it.")
        self.eot, self.vocab_size = ids[self.eot_text], max(ids.values()) + 1  # some vocabularies have gaps
        self._dtype, self._like_gpt2 = smallest_dtype(self.vocab_size), _splits_like_gpt2(settings)
        self.context = 0 if self._like_gpt2 else CONTEXT
        self.unused = sorted(set(range(self.vocab_size)) - set(ids.values()))
        added = self._tokenizer.get_added_tokens_decoder()
        special = {token.content: i for i, token in added.items() if token.special} | {self.eot_text: self.eot}
        self._special = set(special.values())
        spelled = sorted((re.escape(text) for text in special if len(text) > 1), key=len, reverse=True)
        self._spelled = re.compile("|".join(spelled))
        letters = {byte: ids.get(f"<0x{byte:02X}>") for byte in range(256)} if _has(settings, "ByteFallback") else {}
        self._byte_of = {i: byte for byte, i in letters.items() if i is not None}
        self._id_of = {byte: i for i, byte in self._byte_of.items()}

    def encode(self, text: str, before: str = "", after: str = "") -> np.ndarray:
        """Ids of the text, (n,), uint16 or uint32."""
        if not before and not after:
            return np.array(self._tokens(text).ids, self._dtype)
        for behind in (
            after,
            "",
        ):  # where a token spans a place, nothing could be cut: the text stays text all the same
            found, start = self._tokens(before + text + behind), len(before)
            first = bisect_left(found.starts, start)
            if first and found.ends[first - 1] > start:
                found, start, first = self._continued(text + behind, before[-1:]), 0, 0
            last = bisect_left(found.starts, start + len(text))
            if not last or found.ends[last - 1] <= start + len(text):
                break
        return np.array(found.ids[first:last], self._dtype)

    def _tokens(self, text: str) -> "Tokens":
        """Of a whole text. A special token that is in the vocabulary as a word of its own is cut in halves."""
        found = self._raw(text)
        if self._special.isdisjoint(found.ids):
            return found
        cuts = [(match.start() + match.end()) // 2 for match in self._spelled.finditer(text)]
        if not cuts:
            return found  # what stands for unknown words is a special token too
        parts = [self._tokens(text[: cuts[0]])]
        for start, end in zip(cuts, [*cuts[1:], len(text)], strict=True):
            parts.append(self._continued(text[start:end], text[start - 1]).moved(start))
        return Tokens(*(list(itertools.chain.from_iterable(lists)) for lists in zip(*parts, strict=True)))

    def _continued(self, text: str, last: str) -> "Tokens":
        """Of a text that goes on: it gets no space or capital of a beginning, whatever it goes on from. `last`: the
        character before it, where that helps."""
        for context in (last, "x", "1", ".", "\n"):
            found = self._raw(context + text)
            first = bisect_left(found.starts, len(context))
            if context and (first == 0 or found.ends[first - 1] <= len(context)):
                return Tokens(found.ids[first:], found.starts[first:], found.ends[first:]).moved(-len(context))
        return self._raw(text)

    def _raw(self, text: str) -> "Tokens":
        found = self._tokenizer.encode(text, add_special_tokens=False)
        starts, ends = zip(*found.offsets, strict=True) if found.ids else ((), ())
        return Tokens(found.ids, list(starts), list(ends))

    def decode(self, ids: Sequence[int]) -> str:
        """Text of the ids, as far as the tokenizer keeps it; end-of-text "". Raises ConfigError for an unknown id."""
        kept = [int(i) for i in ids if i != self.eot]
        if beyond := [i for i in kept if not 0 <= i < self.vocab_size]:
            raise ConfigError(f"Id {beyond[0]} is beyond {self.name}'s vocabulary of {self.vocab_size}: use the run's.")
        return self._tokenizer.decode(self._whole_characters(kept), skip_special_tokens=False)

    def _whole_characters(self, ids: list[int]) -> list[int]:
        """With U+FFFD in the bytes' place where those of a run are no UTF-8: the library would give up all of them."""
        if self._byte_of.keys().isdisjoint(ids):
            return ids
        kept: list[int] = []
        for of_bytes, run in itertools.groupby(ids, key=self._byte_of.__contains__):
            if of_bytes:
                data = bytes(self._byte_of[i] for i in run).decode(errors="replace").encode()
                kept += [self._id_of[byte] for byte in data]
            else:
                kept += run
        return kept

    def json(self) -> str:
        return json.dumps(json.loads(self.data) | {"post_processor": None}, ensure_ascii=False)

    def cut(self, text: str) -> int:
        if self._like_gpt2:
            return cut_before_space(text)
        return next((at for at in _places(text, CONTEXT) if self._is_settled(text, at)), 0)

    def _is_settled(self, text: str, at: int) -> bool:
        """Whether the same tokens stand on both sides of the place in windows that begin and end elsewhere."""
        seen = set()
        for before, behind in WINDOWS:
            start = at - int(before * CONTEXT)
            found = self._tokens(text[start : at + int(behind * CONTEXT)])
            middle = bisect_left(found.starts, at - start)
            around = slice(middle - 2, middle + 2)
            if middle < 3 or found.ends[middle - 1] > at - start:
                return False
            seen.add((*found.ids[around], *(end - at + start for end in found.ends[around])))
        return len(seen) == 1


class Tokens(NamedTuple):
    """Ids, and where the text of each begins and ends."""

    ids: list[int]
    starts: list[int]
    ends: list[int]

    def moved(self, by: int) -> "Tokens":
        return Tokens(self.ids, [at + by for at in self.starts], [at + by for at in self.ends])


def _places(text: str, context: int) -> Iterator[int]:
    """Where to try to cut, the likeliest first: at the last spaces behind something else, then anywhere."""
    last = len(text) - context
    tried = 0
    for found in re.finditer(r"(?<=\s)\S", text[last : context - 1 : -1] if last > context else ""):  # backwards
        if tried == TRIED:
            return
        tried += 1
        yield last - found.start() + 1
    yield from itertools.islice(range(last, context - 1, -17), TRIED - tried)


def tokenizer_from(name: str) -> JsonTokenizer:
    """`hf:PATH` of a tokenizer.json or its folder, else `hf:NAME` on the hub (or in its cache, when offline)."""
    source = name.removeprefix("hf:")
    path = Path(source) / FILE if Path(source).is_dir() else Path(source)
    if not path.exists():
        if not source or source.startswith((".", "/", "~")) or path.name.endswith(".json"):
            raise ConfigError(f"No tokenizer {path}: give hf: with a tokenizer.json, its folder or a name on the hub.")
        path = _from_hub(source)
    try:
        return JsonTokenizer(name, path.read_bytes(), str(path))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror}): give a tokenizer.json.") from None


def _from_hub(name: str) -> Path:
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(name, FILE))
    except Exception as error:  # no network, no such name, no such file, no right: a dozen classes
        reason = (str(error).strip() or type(error).__name__).splitlines()[0].split(". ")[0].rstrip(".:")
        raise ConfigError(
            f"The tokenizer hf:{name} is no file here and cannot be had from the hub ({reason}): check the name and "
            f"the network, or give the path of a {FILE}."
        ) from None


def _has(settings: dict, kind: str) -> bool:
    """Whether the decoder has a part of that kind."""
    decoder = settings.get("decoder") or {}
    return any(part.get("type") == kind for part in [decoder, *decoder.get("decoders", [])])


def _splits_like_gpt2(settings: dict) -> bool:
    """Whether nothing in the pipeline looks across a space: bytes of GPT-2's pieces, no normalizer, no odd tokens."""
    before = settings.get("pre_tokenizer") or {}
    gpt2 = before.get("type") == "ByteLevel" and before.get("use_regex", True) and not before.get("add_prefix_space")
    added = settings.get("added_tokens") or []
    plain = all(not token.get("lstrip") and not any(map(str.isspace, token["content"])) for token in added)
    return bool(gpt2 and plain and not settings.get("normalizer"))
