"""grt: depth-recurrent language models, from one loop (the Gated Recurrent Transformer and its relatives)."""

import importlib
from typing import Any

from grt.config import VERSION as __version__

_HOMES = {
    "RunConfig": "grt.config",
    "ModelConfig": "grt.config",
    "preset": "grt.presets",
    "build_model": "grt.methods",
    "Depth": "grt.model.depth",
    "LoopContext": "grt.model.context",
    "load_model": "grt.train.checkpoint",
    "Trainer": "grt.train.loop",  # not `train`: that is a package of grt, which would take the name's place
    "evaluate": "grt.evals.loss",
    "generate": "grt.infer.generate",
}
__all__ = ["__version__", *_HOMES]  # noqa: PLE0604


def __getattr__(name: str) -> Any:
    # Public names load their module on first use: `import grt` alone must not pay for torch.
    if name not in _HOMES:
        raise AttributeError(f"module 'grt' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
