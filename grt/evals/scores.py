"""Scores that outlive the process: each is on the disk as soon as its batch is done, so a run that was killed goes on.

One file holds what one way of scoring gave. Its name is the hash of everything that decides the numbers, which its
first line spells out; then comes a line for each piece of a pair and each depth: [hash of the ids, depth, then what a
Score holds].
"""

import hashlib
import itertools
import json
import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from grt.errors import ConfigError
from grt.evals.continuations import Pair, Score, Scorer, batches, pieces, score

Progress = Callable[[int, int], None]  # how many are done, of how many


def key_of(pair: Pair) -> str:
    return hashlib.sha256(json.dumps(pair).encode()).hexdigest()[:32]


class ScoreFile:
    """What is known of the pairs under `settings` (JSON values), in a folder that is made when there is something to
    keep."""

    def __init__(self, folder: Path, settings: dict[str, Any]) -> None:
        self.header = json.dumps(settings, sort_keys=True)
        self.path = folder / f"{hashlib.sha256(self.header.encode()).hexdigest()[:16]}.jsonl"
        self.known: dict[tuple[str, int], Score] = {}
        lines = self.path.read_text(encoding="utf-8").splitlines() if self.path.exists() else []
        for line in lines[1:]:
            try:
                key, depth, *score = json.loads(line)
            except ValueError:  # the end of a write that a kill cut off
                continue
            self.known[key, depth] = Score(*score)

    def add(self, keys: Iterable[str], scores: dict[int, list[Score]]) -> None:
        """Scores at each depth, in the order of the keys."""
        new = {(key, depth): s for depth, of in scores.items() for key, s in zip(keys, of, strict=True)}
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a", encoding="utf-8") as file:
                if file.tell() == 0:
                    file.write(self.header)
                # A line begins with its line end: what a kill cut off before it stays a line of its own.
                file.writelines(f"\n{json.dumps([*name, *s])}" for name, s in new.items())
        except OSError as error:
            why = f"{self.path.parent} cannot be written ({error.strerror})"
            raise ConfigError(f"{why}: give --cache a folder that can, with room on its disk.") from None
        self.known |= new


class Scores:
    """Scores of any pairs at the depths of `scorer`, from the file or from the model of context T."""

    def __init__(self, scorer: Scorer, depths: Sequence[int], file: ScoreFile, T: int, batch_size: int | None) -> None:
        self.scorer, self.depths, self.file, self.T, self.batch_size = scorer, depths, file, T, batch_size

    def of(self, pairs: Sequence[Pair], depth: int, progress: Progress) -> list[Score]:
        """One score a pair, in order."""
        cut = [[(key_of(piece), piece) for piece in pieces(pair, self.T)] for pair in pairs]
        self._compute(dict(itertools.chain.from_iterable(cut)), progress)
        return [whole([self.file.known[key, depth] for key, _ in of_pair]) for of_pair in cut]

    def _compute(self, wanted: dict[str, Pair], progress: Progress) -> None:
        """Put into the file what is not there yet."""
        missing = {k: p for k, p in wanted.items() if any((k, depth) not in self.file.known for depth in self.depths)}
        keys, todo, done = list(missing), list(missing.values()), len(wanted) - len(missing)
        progress(done, len(wanted))
        for batch in batches(todo, self.batch_size, self.T):
            self.file.add([keys[i] for i in batch], score(self.scorer, [todo[i] for i in batch]))
            done += len(batch)
            progress(done, len(wanted))


def whole(parts: Sequence[Score]) -> Score:
    """The score of a pair that was scored in pieces."""
    log_probs, greedy, steps = zip(*parts, strict=True)
    return Score(math.fsum(log_probs), all(greedy), sum(steps))
