"""What a user can mend: one sentence, exit code 2; and what a misspelled name was meant to be."""

import difflib
from collections.abc import Iterable

ALIKE = 0.6  # share of letters in common below which a name was not meant


class ConfigError(ValueError):
    """A setting that cannot work: one sentence that names the field, the value and the remedy."""


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The one of `known` that `name` was probably meant to be; None where none is alike."""
    return next(iter(difflib.get_close_matches(name, list(known), n=1, cutoff=ALIKE)), None)


def did_you_mean(name: str, known: Iterable[str], otherwise: str) -> str:
    """The remedy of a sentence about an unknown name: the one that was meant, if one is alike, and where all are."""
    meant = nearest(name, known)
    return f"did you mean {meant}? {otherwise[:1].upper()}{otherwise[1:]}" if meant else otherwise
