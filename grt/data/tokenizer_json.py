"""Any tokenizer.json (the format of the `tokenizers` library) as a tokenizer: `hf:PATH` or `hf:NAME` of a hub.

Text is only text here too: spelled special tokens are encoded letter by letter, and no token is added around it.
"""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from grt.data.tokenizer import cut_before_space, smallest_dtype
from grt.errors import ConfigError

FILE = "tokenizer.json"
# What ends a text in the common families (GPT, Llama 2 and 3, Qwen, Gemma, BERT); the first that is there is taken.
END_OF_TEXT = ("<|endoftext|>", "</s>", "<|end_of_text|>", "<eos>", "[EOS]", "[SEP]")


class JsonTokenizer:
    """The tokenizer of one tokenizer.json; its sha256 is that of the file."""

    def __init__(self, name: str, data: bytes, where: str):
        from tokenizers import Tokenizer

        try:
            self._tokenizer = Tokenizer.from_str(data.decode())
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
        self._dtype, self._may_cut = smallest_dtype(self.vocab_size), _splits_like_gpt2(json.loads(data))

    def encode(self, text: str) -> np.ndarray:
        """Ids of the text, (n,), uint16 or uint32."""
        ids = self._encode(text)
        if self.eot in ids:  # spelled, and in the vocabulary as a word of its own: its halves mean nothing special
            half = len(self.eot_text) // 2
            parts = [self._encode(part) for part in text.split(self.eot_text)]
            spelled = self._encode(self.eot_text[:half]) + self._encode(self.eot_text[half:])
            ids = parts[0] + [i for part in parts[1:] for i in (*spelled, *part)]
        return np.array(ids, self._dtype)

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Sequence[int]) -> str:
        """Text of the ids, as far as the tokenizer keeps it; end-of-text "". Raises ConfigError for an unknown id."""
        kept = [int(i) for i in ids if i != self.eot]
        if beyond := [i for i in kept if not 0 <= i < self.vocab_size]:
            raise ConfigError(f"Id {beyond[0]} is beyond {self.name}'s vocabulary of {self.vocab_size}: use the run's.")
        return self._tokenizer.decode(kept, skip_special_tokens=False)

    def json(self) -> str:
        return json.dumps(json.loads(self.data) | {"post_processor": None}, ensure_ascii=False)

    def cut(self, text: str) -> int:
        return cut_before_space(text) if self._may_cut else 0


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


def _splits_like_gpt2(settings: dict) -> bool:
    """Whether nothing in the pipeline looks across a space: bytes of GPT-2's pieces, no normalizer, no odd tokens."""
    before = settings.get("pre_tokenizer") or {}
    gpt2 = before.get("type") == "ByteLevel" and before.get("use_regex", True) and not before.get("add_prefix_space")
    added = settings.get("added_tokens") or []
    plain = all(not token.get("lstrip") and not any(map(str.isspace, token["content"])) for token in added)
    return bool(gpt2 and plain and not settings.get("normalizer"))
