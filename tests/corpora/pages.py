"""What the tests of sources read: three pages, in several wrappings."""

import json

from grt.data.corpus import open_corpus

PAGES = ["first größe\n", "second\r\nline", "third 東京 <|endoftext|>"]


def jsonl(rows: list) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def texts(source, field="text") -> list[str]:
    return [document.text for document in open_corpus(source, field).documents()]
