"""What several test files share: tiny models, a split over given ids, one thread, reproducible hypothesis."""

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import settings

from grt.config import ModelConfig
from grt.data.loader import Split
from grt.methods import build_model
from grt.model.recurrent import RecurrentDepthModel

torch.set_num_threads(1)
# No deadline: other work on the machine must not fail a test. Derandomised: neither must the day.
settings.register_profile("grt", deadline=None, derandomize=True, database=None)
settings.load_profile("grt")


def build_tiny(
    method: str = "grt",
    layout: str = "1+2x3+1",
    *,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
    spread: float = 0.15,
    **fields,
) -> RecurrentDepthModel:
    """A model in eval mode. `spread` adds noise to every parameter: at GPT-2's initialisation biases are zero, norms
    are one and blocks do almost nothing, so that much could be wrong and not show. spread=0 leaves it as built."""
    sizes = {"d_model": 16, "n_heads": 2, "context": 12, "vocab_size": 23} | fields
    torch.manual_seed(seed)
    model = build_model(ModelConfig(method=method, layout=layout, **sizes)).to(dtype).eval()
    with torch.no_grad():
        for p in model.parameters():
            p += spread * torch.randn_like(p)
    return model


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
