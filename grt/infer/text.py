"""TextStream: the text of a row of tokens, piece by piece, up to a stop string."""

from collections.abc import Callable, Sequence

from grt.config import ConfigError

UNFINISHED = "\ufffd"  # what a tokenizer decodes the first bytes of a character to, before its others come


class TextStream:
    """Turns tokens into text that is final: whole characters, and nothing that may turn out to begin a stop string.

    decode: a tokenizer's. stops: `ended` is set by the first of them to be complete, which is not part of the text,
    just as if characters came one at a time: where tokens end makes no difference.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], stops: Sequence[str] = ()) -> None:
        if not all(stops):
            raise ConfigError("a stop string is empty: give at least one character, or leave it out.")
        self.decode, self.stops = decode, stops
        self.tokens: list[int] = []  # all that came, those of a stop string too
        self.text = ""  # what was given out so far
        self.ended = False

    def add(self, token: int) -> str:
        """What is now certain of the text, and was not before."""
        assert not self.ended, "a text that has ended takes no more tokens"
        self.tokens.append(token)
        return self._upto(self.decode(self.tokens).rstrip(UNFINISHED), last=False)

    def finish(self) -> str:
        """What was held back; no token comes any more."""
        return "" if self.ended else self._upto(self.decode(self.tokens), last=True)

    def _upto(self, text: str, last: bool) -> str:
        start = len(self.text)
        found = [(at + len(stop), at) for stop in self.stops if (at := text.find(stop, start)) >= 0]
        if found:
            self.ended = True
            text = text[: min(found)[1]]
        elif not last:
            text = text[: len(text) - max((overlap(text, stop) for stop in self.stops), default=0)]
        self.text += text[start:]
        return text[start:]


def overlap(text: str, stop: str) -> int:
    """How many characters at the end of `text` may be the first ones of `stop`."""
    return next(n for n in range(min(len(text), len(stop) - 1), -1, -1) if text.endswith(stop[:n]))
