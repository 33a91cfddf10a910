"""TextStream: the text of a row of tokens, piece by piece, up to a stop string."""

from collections.abc import Callable, Sequence

from grt.errors import ConfigError

UNFINISHED = "\ufffd"  # what a tokenizer decodes the first bytes of a character to, before its others come
CHARACTER = 4  # bytes of the longest one: decoding that begins within it is in step after so many, or after another
TAIL = 8  # tokens that are decoded again with each new one: so many, and twice as many before the tail is shortened
TRIES = 4  # places to shorten it at


class TextStream:
    """Turns tokens into text that is final: whole characters, and nothing that may turn out to begin a stop string.

    decode: a tokenizer's. It is asked for the last few tokens only, from a place where they alone give what they give
    behind the others, so that n tokens cost time in proportion to n. stops: `ended` is set by the first of them to be
    complete, which is not part of the text, just as if characters came one at a time: where tokens end makes no
    difference. prompt: tokens before the text, behind which it is decoded: at the start of a text a tokenizer may write
    a word without its space.
    """

    def __init__(
        self, decode: Callable[[Sequence[int]], str], stops: Sequence[str] = (), prompt: Sequence[int] = ()
    ) -> None:
        if not all(stops):
            raise ConfigError("a stop string is empty: give at least one character, or leave it out.")
        self.decode, self.stops = decode, stops
        self.all, self.n_prompt = list(prompt), len(prompt)  # tokens: all that came, those of a stop string too
        self.pieces: list[str] = []  # what was given out so far
        self.ended = False
        self.tail = 0  # the first token of the tail
        self.before = ""  # text of the tokens before it, as far as it is still held back
        self.given = 0  # how many characters of `before` and the tail's text are given out
        if prompt:
            of_prompt = self.decode(self.all)
            self.given = len(of_prompt)  # the text of a prompt is whole
            if len(prompt) > TAIL:
                self._shorten(of_prompt)

    @property
    def tokens(self) -> list[int]:
        """All that came, those of a stop string too; without the prompt."""
        return self.all[self.n_prompt :]

    @property
    def text(self) -> str:
        """What was given out so far."""
        return "".join(self.pieces)

    def add(self, token: int) -> str:
        """What is now certain of the text, and was not before."""
        assert not self.ended, "a text that has ended takes no more tokens"
        self.all.append(token)
        of_tail = self.decode(self.all[self.tail :])
        piece = self._upto((self.before + of_tail).rstrip(UNFINISHED), last=False)
        size = len(self.all) - self.tail
        # A place found in the middle of a character may be a wrong one; but this long no character is in the middle.
        if size >= 4 * TAIL or (size >= 2 * TAIL and not of_tail.endswith(UNFINISHED)):
            self._shorten(of_tail)
        return piece

    def finish(self) -> str:
        """What was held back; no token comes any more."""
        return "" if self.ended else self._upto(self.before + self.decode(self.all[self.tail :]), last=True)

    def _upto(self, text: str, last: bool) -> str:
        start = self.given
        found = [(at + len(stop), at) for stop in self.stops if (at := text.find(stop, start)) >= 0]
        if found:
            self.ended = True
            text = text[: min(found)[1]]
        elif not last:
            text = text[: len(text) - max((overlap(text, stop) for stop in self.stops), default=0)]
        piece = text[start:]
        self.given += len(piece)
        self.pieces.append(piece)
        return piece

    def _shorten(self, of_tail: str) -> None:
        """Begin the tail at a later token, if one is found where its text is the end of the whole: not within a
        character, say, and not where a tokenizer writes a word's second half differently when it comes first."""
        for start in range(len(self.all) - TAIL, len(self.all) - TAIL + TRIES):
            rest = self.decode(self.all[start:])
            in_step = len(rest) >= CHARACTER or rest.strip(UNFINISHED)
            if in_step and of_tail.endswith(rest):
                before = self.before + of_tail[: len(of_tail) - len(rest)]
                past = min(self.given, len(before))
                self.tail, self.before, self.given = start, before[past:], self.given - past
                return


def overlap(text: str, stop: str) -> int:
    """How many characters at the end of `text` may be the first ones of `stop`."""
    return next(n for n in range(min(len(text), len(stop) - 1), -1, -1) if text.endswith(stop[:n]))
