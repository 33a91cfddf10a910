"""README's table of features is that of tests/features.py, and every cell of it has a test; and what README says about
the use elsewhere works as it is printed."""

import ast
import os
import subprocess
import sys

import pytest
from features import BEGIN, END, FEATURES, ROOT, STACKS, with_table
from test_docs import blocks, command_lines

README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_table_is_the_one_that_is_generated():
    assert BEGIN in README and END in README
    assert with_table(README) == README, "run python tests/features.py"
    assert with_table(README.replace("| beams |", "| bears |")) == README != README.replace("| beams |", "| bears |")


def names_in(file: str) -> set[str]:
    [path] = [*ROOT.glob(f"tests/{file}.py"), *ROOT.glob(f"tests/*/{file}.py")]
    return {node.name for node in ast.parse(path.read_text(encoding="utf-8")).body if isinstance(node, ast.FunctionDef)}


def test_each_cell_has_its_test():
    cells = [(feature, stack, cell) for feature, cells in FEATURES.items() for stack, cell in cells.items()]
    assert {stack for _, stack, _ in cells} == STACKS.keys()
    for feature, stack, cell in cells:
        file, _, name = cell.test.partition("::")
        assert name.startswith("test_") and name in names_in(file), f"{feature}, {stack}: there is no {cell.test}"


def section(heading: str) -> str:
    return README.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_what_is_pasted_works(tmp_path):
    """The section on other stacks, block by block, in a folder that has the models, and a GPT-2 as if downloaded."""
    transformers = pytest.importorskip("transformers", reason="needs transformers, of the extra hf")
    for name in ("models", "tests", "README.md"):
        (tmp_path / name).symlink_to(ROOT / name)
    sizes = {"n_embd": 16, "n_head": 2, "n_layer": 12, "n_positions": 64}
    transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes)).save_pretrained(tmp_path / "gpt2")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HOME": str(tmp_path / "cache"), "HF_HUB_OFFLINE": "1"}
    ran = []
    for language, block in blocks(section("Take it elsewhere")):
        for words in [["-c", block]] if language == "python" else list(command_lines(f"```bash\n{block}```\n")):
            command = words if language == "python" else ["-m", *words]
            done = subprocess.run(
                [sys.executable, *command], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
            )
            assert done.returncode == 0, f"{words}\n{done.stderr[-2000:]}"
            ran.append((language, done.stdout))
    assert [language for language, _ in ran].count("python") == 3 and len(ran) == 8
    assert "arc_easy" in ran[4][1] and (tmp_path / "tuned/model.safetensors").exists()
    assert (tmp_path / "runs/gpt2-tied/config.json").exists()
