"""How the contestants of a bench follow one another: in turns and in one process, so that what changes the machine's
speed hits all of them, and ratios can be taken within each turn."""

import time
from collections.abc import Callable, Mapping
from typing import TypeVar

from grt.console import in_words, note, working

T = TypeVar("T")


def alternate(
    contestants: Mapping[str, Callable[[], T]], turns: int, *, warm: int = 0, seconds: Callable[[T], float]
) -> dict[str, list[T]]:
    """What each contestant gave in each turn, by its name; who begins changes from one turn to the next. warm: turns
    before these, which do not count. seconds: of a token in what was given, shown while it goes on."""
    given: dict[str, list[T]] = {name: [] for name in contestants}
    names = list(contestants)

    def so_far() -> str:
        last = {name: 1e6 * seconds(values[-1]) for name, values in given.items() if values}
        return ", ".join(f"{name} {us:,.1f} us per token" for name, us in last.items())

    began = time.monotonic()
    with working("turn", turns + warm, status=so_far) as task:
        for turn in range(warm + turns):
            first = turn % len(names)
            for name in [*names[first:], *names[:first]]:
                value = contestants[name]()
                if turn >= warm:
                    given[name].append(value)
            task.advance()
            if turn == 0 and turns + warm > 1:
                rest = (turns + warm - 1) * (time.monotonic() - began)
                note(f"{turns + warm - 1} more turns of {', '.join(names)} take about {in_words(rest)}")
    return given
