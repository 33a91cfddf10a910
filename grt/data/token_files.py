"""nanoGPT's .bin files as a source: raw uint16 ids of GPT-2's vocabulary, taken over as they are.

A folder with train.bin and val.bin keeps its own split; of a single file the end is the validation text. Documents end
at end-of-text.
"""

import hashlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from grt.data.gpt2 import GPT2Tokenizer, gpt2_tokenizer
from grt.data.loader import BLOCK, check_ids
from grt.data.partial import Partial
from grt.data.tokenizer import Tokenizer
from grt.errors import ConfigError


class TokenFiles:
    """The ranges of ids that make the splits, after a first pass that checks and hashes them."""

    def __init__(self, name: str, files: dict[str, Path], val_fraction: float):
        self.name, ids = name, {split: _open(path) for split, path in files.items()}
        self.sha256 = _checked_sha256(files, ids)
        if "val" in ids:
            self.rule: dict = {"by": "files"}
            self.ranges = ids
        elif val_fraction == 1:
            self.rule = {"by": "document hash", "val_fraction": val_fraction}
            self.ranges = {"val": ids["train"]}
        else:
            at = _cut(ids["train"], val_fraction)
            self.rule = {"by": "tail of the file", "val_fraction": val_fraction}
            self.ranges = {"train": ids["train"][:at], "val": ids["train"][at:]}

    def fill(self, partial: Partial, tokenizer: Tokenizer, workers: int) -> None:
        assert isinstance(tokenizer, GPT2Tokenizer), workers
        for writer in partial.writers:
            ids = self.ranges.get(writer.name, np.empty(0, np.uint16))
            for start, block in _blocks(ids):
                ends = np.flatnonzero(block == tokenizer.eot) + 1
                if start + len(block) == len(ids) and block[-1] != tokenizer.eot:
                    ends = np.append(ends, len(block))  # the last document's end is missing, or was cut off
                writer.add(block, ends, int(tokenizer.token_bytes[block].sum()))


def find_token_files(sources: list[str], tokenizer: Tokenizer, val_fraction: float) -> TokenFiles | None:
    """None where the sources are text. Raises ConfigError for token files that nothing can be made of."""
    found: list[dict[str, Path]] = []
    for path in map(Path, sources):
        folder = path if path.is_dir() else path.parent
        if path.suffix == ".bin" and path.is_file():
            found.append({"train": path})
        elif (path / "train.bin").exists() and (path / "val.bin").exists():
            found.append({"train": path / "train.bin", "val": path / "val.bin"})
        else:
            continue
        if (folder / "meta.pkl").exists():
            raise ConfigError(f"{path} has a vocabulary of its own (meta.pkl), not GPT-2's: prepare its text instead.")
        if tokenizer.name != "gpt2":
            raise ConfigError(f"{path} holds GPT-2 tokens, not those of {tokenizer.name}: give --tokenizer gpt2.")
    if not found:
        return None
    if len(sources) > 1:
        raise ConfigError(f"{sources[0]} is one of several sources, one of which is a .bin file: prepare it alone.")
    return TokenFiles(Path(sources[0]).resolve().stem, found[0], val_fraction)


def _open(path: Path) -> np.ndarray:
    size = path.stat().st_size
    if not size or size % 2:
        raise ConfigError(f"{path} has {size} bytes, which are no 16-bit tokens: give a whole file of nanoGPT's.")
    return np.memmap(path, "<u2", mode="r")


def _checked_sha256(files: dict[str, Path], ids: dict[str, np.ndarray]) -> str:
    sums = []
    for split, path in files.items():
        sha256 = hashlib.sha256()
        for _, block in _blocks(ids[split]):
            check_ids(block, gpt2_tokenizer().vocab_size, path)
            sha256.update(block.tobytes())
        sums.append(sha256.hexdigest())
    return hashlib.sha256(" ".join(sums).encode()).hexdigest()


def _cut(ids: np.ndarray, val_fraction: float) -> int:
    """Where the validation text begins: after an end-of-text, if there is one at most half a tail earlier."""
    tail = max(1, round(len(ids) * val_fraction))
    at = len(ids) - tail
    low = max(0, at - tail // 2)
    ends = np.flatnonzero(ids[low:at] == gpt2_tokenizer().eot)
    return low + int(ends[-1]) + 1 if len(ends) else at


def _blocks(ids: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    for start in range(0, len(ids), BLOCK):
        yield start, np.asarray(ids[start : start + BLOCK])
