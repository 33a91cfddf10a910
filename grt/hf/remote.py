"""Remote code: the model's source as flat files that stand beside its weights, for processes without grt.

transformers copies files of one folder only, so every module of grt that the model needs becomes one there, under its
path with underscores: `from grt.backbone.block import ...` becomes `from .backbone_block import ...`. The files are
made from the installed package whenever something is exported: there is no second copy of a model.
"""

import ast
import re
from importlib.util import find_spec
from pathlib import Path

from grt.config import VERSION

CONFIG, BASE, CAUSAL = "grt.hf.config", "grt.hf.model", "grt.hf.causal"
NAMES = {CONFIG: "configuration_grt", CAUSAL: "modeling_grt"}  # as is usual there
IMPORT = re.compile(r"^(\s*)from (grt(?:\.\w+)+) import", re.M)


def flat(module: str) -> str:
    """grt.backbone.block -> backbone_block"""
    return NAMES.get(module) or "_".join(module.split(".")[1:])


# What config.json says about where the Auto classes find theirs.
AUTO_MAP = {
    "AutoConfig": f"{flat(CONFIG)}.GRTConfig",
    "AutoModel": f"{flat(BASE)}.GRTModel",
    "AutoModelForCausalLM": f"{flat(CAUSAL)}.GRTForCausalLM",
}


def source(module: str) -> str:
    spec = find_spec(module)
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).read_text(encoding="utf-8")


def needed() -> dict[str, str]:
    """Module -> source, of those that the entries import, directly or not."""
    found: dict[str, str] = {}
    left = [CONFIG, CAUSAL]
    while left:
        module = left.pop()
        if module not in found:
            found[module] = source(module)
            nodes = [node for node in ast.walk(ast.parse(found[module])) if isinstance(node, ast.ImportFrom)]
            left += [node.module for node in nodes if (node.module or "").startswith("grt.") and node.module]
    return found


def remote_files() -> dict[str, str]:
    """File name -> source."""
    files = {}
    for module, text in needed().items():
        text = IMPORT.sub(lambda found: f"{found[1]}from .{flat(found[2])} import", text)
        files[f"{flat(module)}.py"] = f"# {module} of grt {VERSION}, written by grt export.\n{text}"
    return files
