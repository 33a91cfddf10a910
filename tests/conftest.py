"""What several test files share: tiny models, a split over given ids, one thread, reproducible hypothesis."""

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import settings
from tiny_model import build_tiny

from grt.data.loader import Split

torch.set_num_threads(1)
os.environ["GRT_PROGRESS"] = (
    "off"  # what a slow machine says meanwhile must not fail a test; those of progress take it on
)
# No deadline: other work on the machine must not fail a test. Derandomised: neither must the day.
settings.register_profile("grt", deadline=None, derandomize=True, database=None)
settings.load_profile("grt")


@pytest.fixture
def tiny():
    return build_tiny


@pytest.fixture
def ids():
    """Token ids (B, T) = (2, 12), as long as the tiny models' context."""
    return torch.randint(23, (2, 12), generator=torch.Generator().manual_seed(7))


@pytest.fixture
def split_of(tmp_path: Path):
    """Makes the split that holds given ids."""

    def make(tokens: list[int], vocab_size: int = 23) -> Split:
        data = np.array(tokens, "<u2")
        (tmp_path / "val-00000.bin").write_bytes(data.tobytes())
        shards = [{"file": "val-00000.bin", "tokens": len(data)}]
        entry = {"documents": 1, "tokens": len(data), "bytes": 2 * len(data), "sha256": "", "shards": shards}
        return Split("val", tmp_path, entry, "uint16", vocab_size)

    return make
