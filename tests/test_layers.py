"""The rules of the code base that a syntax tree can show: who imports whom, sizes, and no branch on a method's name.

Each check takes the path of a file under the repository's root and its source, and returns its complaints. Its wrong
and right samples stay beside it, so that none is without: the file is as long as there are rules.
"""

import ast
import re
from collections.abc import Callable, Iterable, Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
MAX_FUNCTION_LINES = 50

BASE = {"errors", "schema", "config", "files", "console", "device", "presets"}  # what everybody needs
MODEL = BASE | {"backbone", "cache", "model", "methods", "exits"}

# part of grt -> the parts that it may import, itself aside; a new part is added here or it is refused.
MAY_IMPORT: dict[str, set[str]] = {
    "errors": set(),
    "files": {"errors"},
    "console": {"errors"},
    "device": {"errors", "files"},
    "schema": {"errors"},
    "config": {"errors", "schema"},
    "presets": {"errors", "config"},
    "cache": {"errors", "schema", "config"},
    "backbone": {"errors", "config", "cache"},
    "model": {"errors", "schema", "config", "backbone", "cache"},
    "methods": {"errors", "schema", "config", "backbone", "cache", "model"},
    "exits": {"errors", "config", "backbone", "cache", "model", "methods"},
    "cpu": {"errors", "config", "files", "backbone", "methods"},
    "decode": MODEL | {"cpu"},
    "data": BASE,
    "runs": MODEL | {"data"},
    "evals": MODEL | {"data", "runs", "decode"},
    "train": MODEL | {"data", "runs", "evals"},
    "hf": MODEL | {"data", "runs", "decode"},
    "vllm": MODEL | {"decode", "hf"},
    "analysis": MODEL | {"data", "runs", "evals", "decode"},
    "bench": MODEL | {"data", "runs", "evals", "decode", "cpu", "train", "vllm"},
    "study": MODEL | {"data", "runs", "evals", "decode", "train", "bench"},
    "experiments": MODEL | {"data", "runs", "evals", "decode", "train", "bench", "study", "analysis"},
}
MAY_IMPORT["cli"] = set(MAY_IMPORT)
MAY_IMPORT["__main__"] = {"cli"}
MAY_IMPORT["__init__"] = set(MAY_IMPORT) - {"__main__"}

# Imports against the table that are still to be taken apart: file -> part.
STILL = {
    ("grt/cache/kv.py", "model"),
    ("grt/cache/kv.py", "exits"),
    ("grt/exits/kept.py", "console"),
    ("grt/exits/kept.py", "data"),
    ("grt/exits/kept.py", "evals"),
    ("grt/exits/kept.py", "runs"),
    ("grt/evals/report.py", "train"),
    ("grt/runs/checkpoint.py", "train"),
}

# `import grt` and `grt --help` must answer at once: what these files load at once, outside of any function.
EAGER = {
    "__init__": {"grt.config", "grt.presets"},
    "cli": {"grt.errors", "grt.schema", "grt.config", "grt.presets", "grt.cli.options", "grt.cli.train"},
}
LAZY = {"grt/cli/report.py"}  # imported inside functions alone

# package -> the files and folders that may import it
HOMES = {
    "matplotlib": ("grt/runs/plots.py", "grt/analysis/", "grt/study/", "grt/experiments/", "grt/bench/"),
    "tiktoken": ("grt/data/gpt2.py",),
    "tokenizers": ("grt/data/tokenizer_json.py", "grt/hf/"),
    "datasets": ("grt/data/remote.py",),
    "pyarrow": ("grt/data/formats.py",),
    "transformers": ("grt/hf/", "grt/bench/peers.py"),
    "lm_eval": ("grt/evals/benchmarks.py", "grt/evals/harness.py"),
    "onnxruntime": ("grt/hf/onnx.py",),
    "vllm": ("grt/vllm/",),
}

Check = Callable[[str, str], list[str]]


def part_of(module: str) -> str:
    """The part of grt that holds a module: grt.backbone.block -> backbone, grt -> __init__."""
    return [*module.split("."), "__init__"][1]


def part_of_file(path: str) -> str:
    return part_of(path.removesuffix(".py").replace("/", "."))


def imported(node: ast.AST, path: str) -> list[str]:
    """Absolute names of the modules that one node imports; `from grt import x` counts as grt.x where x is a part."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        module = node.module or ""
        if node.level:
            package = path.split("/")[: -node.level]
            module = ".".join([*package, module]).rstrip(".")
        if module == "grt":
            return [f"grt.{alias.name}" if alias.name in MAY_IMPORT else "grt" for alias in node.names]
        return [module]
    if isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        if name in {"import_module", "__import__"}:
            return [str(node.args[0].value)]
    return []


def imports(nodes: Iterable[ast.AST], path: str) -> Iterator[tuple[int, str]]:
    for node in nodes:
        for module in imported(node, path):
            yield getattr(node, "lineno", 0), module


def walk_eager(node: ast.AST) -> Iterator[ast.AST]:
    """Like ast.walk, without what importing the file does not run: function bodies and `if TYPE_CHECKING:`."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(child, ast.If) and ast.unparse(child.test).endswith("TYPE_CHECKING"):
            continue
        yield child
        yield from walk_eager(child)


def check_direction(path: str, source: str) -> list[str]:
    part = part_of_file(path)
    if part not in MAY_IMPORT:
        return [f"{path}: '{part}' is in no layer; add it to MAY_IMPORT"]
    return [
        f"{path}:{line}: {part} may not import {module}"
        for line, module in imports(ast.walk(ast.parse(source)), path)
        if module.split(".")[0] == "grt"
        and part_of(module) not in MAY_IMPORT[part] | {part}
        and (path, part_of(module)) not in STILL
    ]


def check_eager(path: str, source: str) -> list[str]:
    part = part_of_file(path)
    if part not in EAGER or path in LAZY:
        return []
    return [
        f"{path}:{line}: {module} must be imported inside the function that needs it"
        for line, module in imports(walk_eager(ast.parse(source)), path)
        if module.split(".")[0] == "torch" or (module.split(".")[0] == "grt" and module not in EAGER[part])
    ]


def check_homes(path: str, source: str) -> list[str]:
    complaints = []
    for line, module in imports(ast.walk(ast.parse(source)), path):
        homes = HOMES.get(module.split(".")[0])
        if homes and not path.startswith(homes):
            complaints.append(f"{path}:{line}: {module} is imported only in {', '.join(homes)}")
    return complaints


def check_size(path: str, source: str) -> list[str]:
    tree = ast.parse(source)
    if re.search(r"\bLong:\s+\w+(\W+\w+){2}", ast.get_docstring(tree) or ""):  # a reason has three words at least
        return []
    complaints = []
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            n_lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if n_lines > MAX_FUNCTION_LINES:
                complaints.append(f"{path}:{node.lineno}: {node.name} has {n_lines} lines, over {MAX_FUNCTION_LINES}")
    return complaints


def is_method(node: ast.AST) -> bool:
    return (isinstance(node, ast.Name) and node.id == "method") or (
        isinstance(node, ast.Attribute) and node.attr == "method"
    )


def check_no_branch_on_method(path: str, source: str) -> list[str]:
    """Comparing with a name, a literal list of names, or match: all three are `if method ==`."""
    complaints = []
    for node in ast.walk(ast.parse(source)):
        found = isinstance(node, ast.Match) and is_method(node.subject)
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            equality = any(isinstance(op, ast.Eq | ast.NotEq) for op in node.ops)
            listed = any(isinstance(side, ast.Tuple | ast.List | ast.Set) for side in sides)
            found = any(map(is_method, sides)) and (equality or listed)
        if found:
            complaints.append(
                f"{path}:{getattr(node, 'lineno', 0)}: what differs between methods belongs into their files"
            )
    return complaints


def check_no_utils(path: str, source: str) -> list[str]:
    return [f"{path}: name the file after what it holds"] if re.search(r"(^|/)utils(\.py$|/)", path) else []


CHECKS = [check_direction, check_eager, check_homes, check_size, check_no_branch_on_method, check_no_utils]


@pytest.mark.parametrize("check", CHECKS)
def test_grt_keeps_the_rule(check: Check) -> None:
    files = sorted((ROOT / "grt").rglob("*.py"))
    complaints = [line for file in files for line in check(file.relative_to(ROOT).as_posix(), file.read_text("utf-8"))]
    assert not complaints, "\n".join(complaints)


def test_no_utils_beside_grt() -> None:
    files = [file for folder in ("tests", "dev") for file in (ROOT / folder).rglob("*.py")]
    complaints = [line for file in files for line in check_no_utils(file.relative_to(ROOT).as_posix(), "")]
    assert files and not complaints, "\n".join(complaints)


def test_the_table_has_no_cycle() -> None:
    graph = {part: allowed - {"__init__"} for part, allowed in MAY_IMPORT.items()}
    order = list(TopologicalSorter(graph).static_order())
    assert order[0] == "errors" and set(order) == set(MAY_IMPORT)
    assert not any("methods" in MAY_IMPORT[part] for part in ("config", "presets", "model"))


def function(n_lines: int, keyword: str = "def") -> str:
    return f'{keyword} f():\n    """Doc."""\n' + "    x = 1\n" * (n_lines - 2)


WRONG: list[tuple[Check, str, str]] = [
    (check_direction, "grt/config.py", "from grt.backbone.block import Block"),
    (check_direction, "grt/presets.py", "import grt.model"),
    (check_direction, "grt/model/loop.py", "from grt.methods import METHODS"),
    (check_direction, "grt/model/loop.py", "from grt.presets import DEMO"),
    (check_direction, "grt/model/loop.py", "from ..methods.grt import GRT"),
    (check_direction, "grt/model/loop.py", "from .. import methods"),
    (check_direction, "grt/model/loop.py", "from grt import model, methods"),
    (check_direction, "grt/model/__init__.py", "from ..methods import METHODS"),
    (check_direction, "grt/model/loop.py", "def f():\n    import grt.methods.mor"),
    (check_direction, "grt/model/loop.py", "import importlib\nimportlib.import_module('grt.methods.mor')"),
    (check_direction, "grt/model/loop.py", "if TYPE_CHECKING:\n    from grt.methods import METHODS"),
    (check_direction, "grt/methods/grt.py", "from grt.data.loader import Loader"),
    (check_direction, "grt/methods/grt.py", "from grt import RecurrentDepthModel"),
    (check_direction, "grt/data/loader.py", "from grt.train.loop import train"),
    (check_direction, "grt/data/loader.py", "from grt.evals.loss import evaluate"),
    (check_direction, "grt/evals/loss.py", "from grt.bench.latency import measure"),
    (check_direction, "grt/evals/loss.py", "from grt.train import loop"),
    (check_direction, "grt/decode/stream.py", "from grt.data.tokenizer import Tokenizer"),
    (check_direction, "grt/train/loop.py", "from grt.decode.stream import generate"),
    (check_direction, "grt/hf/model.py", "from grt.evals.loss import evaluate"),
    (check_direction, "grt/vllm/plugin.py", "from grt.evals.loss import evaluate"),
    (check_direction, "grt/analysis/trace.py", "from grt.train.loop import Trainer"),
    (check_direction, "grt/bench/training.py", "from grt.analysis.trace import trace"),
    (check_direction, "grt/bench/training.py", "from grt.experiments import table1"),
    (check_direction, "grt/experiments/table1.py", "from grt.cli import main"),
    (check_direction, "grt/helpers.py", "x = 1"),
    (check_eager, "grt/__init__.py", "from grt.model.loop import RecurrentDepthModel"),
    (check_eager, "grt/__init__.py", "from .train import loop"),
    (check_eager, "grt/__init__.py", "try:\n    import torch.nn\nexcept ImportError:\n    pass"),
    (check_eager, "grt/cli/train.py", "from torch import nn"),
    (check_eager, "grt/cli/__init__.py", "from grt.cli.report import show_run"),
    (check_homes, "grt/backbone/block.py", "import matplotlib.pyplot as plt"),
    (check_homes, "grt/train/loop.py", "def f():\n    from matplotlib import pyplot"),
    (check_homes, "grt/analysis.py", "import matplotlib"),
    (check_homes, "grt/data/loader.py", "def f():\n    import datasets"),
    (check_homes, "grt/bench/training.py", "def f():\n    import transformers"),
    (check_homes, "grt/bench/serve.py", "def f():\n    from vllm import LLM"),
    (check_homes, "grt/evals/task_report.py", "from lm_eval.evaluator import evaluate"),
    (check_size, "grt/config.py", function(51)),
    (check_size, "grt/config.py", '"""Long: because."""\n' + function(51)),
    (check_size, "grt/config.py", "# Long: a comment is not the docstring\n" + function(51)),
    (check_size, "grt/config.py", function(51, "async def")),
    (check_size, "grt/config.py", "class A:\n    def f(self):\n" + "        x = 1\n" * 50),
    (check_no_branch_on_method, "grt/train/loop.py", "if method == 'grt':\n    pass"),
    (check_no_branch_on_method, "grt/train/loop.py", "x = 1 if config.method == 'grt' else 2"),
    (check_no_branch_on_method, "grt/train/loop.py", "if 'grt' != run.model.method:\n    pass"),
    (check_no_branch_on_method, "grt/train/loop.py", "if method in ('grt', 'mor'):\n    pass"),
    (check_no_branch_on_method, "grt/train/loop.py", "match config.method:\n    case 'grt':\n        pass"),
    (check_no_utils, "grt/utils.py", ""),
    (check_no_utils, "grt/model/utils.py", ""),
    (check_no_utils, "grt/utils/text.py", ""),
]

RIGHT: list[tuple[Check, str, str]] = [
    (check_direction, "grt/config.py", "import dataclasses\nfrom grtools import methods"),
    (check_direction, "grt/presets.py", "from grt.config import RunConfig"),
    (check_direction, "grt/model/loop.py", "from . import block\nfrom ..config import ModelConfig"),
    (check_direction, "grt/methods/grt.py", "from grt.model.loop import UpdateRule"),
    (check_direction, "grt/train/loop.py", "from grt import data, evals, methods, presets"),
    (check_direction, "grt/vllm/plugin.py", "import vllm\nfrom grt.decode.stream import generate"),
    (
        check_direction,
        "grt/bench/training.py",
        "from grt.train.loop import train\nimport grt.data, grt.evals",
    ),
    (check_direction, "grt/experiments/table1.py", "import grt.train, grt.bench, grt.presets, grt.analysis"),
    (check_direction, "grt/cli/bench.py", "from grt.experiments import table1"),
    (check_direction, "grt/__init__.py", "def __getattr__(name):\n    from grt.model.loop import Model"),
    (check_eager, "grt/__init__.py", "from grt.config import RunConfig\ndef f():\n    import torch"),
    (check_eager, "grt/__init__.py", "if TYPE_CHECKING:\n    from grt.model.loop import Model"),
    (check_eager, "grt/cli/train.py", "def run_train():\n    import torch\n    from grt.train import loop"),
    (check_eager, "grt/backbone/block.py", "import torch"),
    (check_homes, "grt/runs/plots.py", "import matplotlib.pyplot"),
    (check_homes, "grt/study/plots.py", "import matplotlib"),
    (check_homes, "grt/analysis/trace.py", "from matplotlib.figure import Figure"),
    (check_size, "grt/config.py", '"""Long: one table, kept whole."""\n' + function(60)),
    (check_size, "grt/config.py", "@cache\n@other\n" + function(50)),
    (check_no_branch_on_method, "grt/train/loop.py", "if config.method not in METHODS:\n    raise ValueError"),
    (
        check_no_branch_on_method,
        "grt/train/loop.py",
        "if methods == 3 or name == 'method':\n    pass",
    ),
    (check_no_utils, "grt/train/distributed.py", ""),
    (check_no_utils, "grt/reutils.py", ""),
]


@pytest.mark.parametrize(("check", "path", "source"), WRONG)
def test_wrong_sample_is_rejected(check: Check, path: str, source: str) -> None:
    assert len(check(path, source)) == 1


@pytest.mark.parametrize(("check", "path", "source"), RIGHT)
def test_right_sample_is_accepted(check: Check, path: str, source: str) -> None:
    assert check(path, source) == []


def test_every_check_has_a_wrong_and_a_right_sample() -> None:
    assert {check for check, _, _ in WRONG} == {check for check, _, _ in RIGHT} == set(CHECKS)
