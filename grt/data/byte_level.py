"""Byte-level vocabularies as GPT-2's files and `tokenizers` write them: each byte has a printable letter."""

import json
from collections.abc import Mapping, Sequence


def byte_letters() -> list[str]:
    """The printable letter by which GPT-2's files write each byte: itself, or one from U+0100 on for the others."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in printable]
    letters = {b: chr(b) for b in printable} | {b: chr(0x100 + n) for n, b in enumerate(others)}
    return [letters[b] for b in range(256)]


def tokenizer_json(vocabulary: Mapping[str, int], merges: Sequence[str], eot: str, words: bool) -> str:
    """A tokenizer.json: vocabulary has tokens in these letters and end-of-text, `eot`; words: a text is first cut into
    GPT-2's words."""
    added = {"id": vocabulary[eot], "content": eot, "special": True, "normalized": False}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": words}
    settings = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [added | {"single_word": False, "lstrip": False, "rstrip": False}],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {"type": "BPE", "vocab": dict(vocabulary), "merges": list(merges)},
    }
    return json.dumps(settings, ensure_ascii=False)
