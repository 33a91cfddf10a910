"""grt: depth-recurrent language models, from one loop (the Gated Recurrent Transformer and its relatives)."""

import importlib
from typing import TYPE_CHECKING, Any

from grt.config import VERSION as __version__

if TYPE_CHECKING:
    from grt.backbone.context import LoopContext
    from grt.config import ModelConfig, RunConfig
    from grt.decode.stream import generate
    from grt.evals.loss import evaluate
    from grt.methods import build_model
    from grt.model.depth import Depth
    from grt.presets import preset
    from grt.runs.checkpoint import load_model
    from grt.train.loop import Trainer

__all__ = [
    "Depth",
    "LoopContext",
    "ModelConfig",
    "RunConfig",
    "Trainer",
    "__version__",
    "build_model",
    "evaluate",
    "generate",
    "load_model",
    "preset",
]

# No name may also be that of a module here: importing grt.train, say, makes `grt.train` the module for good.
_HOMES = {
    "Depth": "grt.model.depth",
    "LoopContext": "grt.backbone.context",
    "ModelConfig": "grt.config",
    "RunConfig": "grt.config",
    "build_model": "grt.methods",
    "evaluate": "grt.evals.loss",
    "generate": "grt.decode.stream",
    "load_model": "grt.runs.checkpoint",
    "preset": "grt.presets",
    "Trainer": "grt.train.loop",
}


def __getattr__(name: str) -> Any:
    # Public names load their module on first use: `import grt` alone must not pay for torch.
    if name not in _HOMES:
        raise AttributeError(f"module 'grt' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__
