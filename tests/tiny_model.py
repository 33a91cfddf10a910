"""A tiny model of random weights, for whatever is compared on one."""

import torch

from grt.config import ModelConfig
from grt.methods import build_model
from grt.model.loop import RecurrentDepthModel


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
