"""Tables in results/ are what their commands make of the committed files: nobody has typed a number."""

import importlib.util
from pathlib import Path

import pytest

from grt.config import config_hash, load
from grt.presets import change, preset

ROOT = Path(__file__).resolve().parent.parent
METHODS = ROOT / "results" / "methods"
FOLDERS = sorted(path.parent for path in METHODS.glob("*/eval.json"))


@pytest.fixture(scope="module")
def methods_table():
    spec = importlib.util.spec_from_file_location("methods_table", ROOT / "dev" / "methods_table.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_table_of_methods_is_built_from_its_files(methods_table):
    assert (METHODS / "README.md").read_text(encoding="utf-8") == methods_table.table()


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_each_run_is_the_preset_under_one_recipe(folder):
    config, steps = load(folder / "config.json"), load(FOLDERS[0] / "config.json").train.steps
    want = change(preset(f"{folder.name}-nano"), train={"steps": steps})
    assert config_hash(config) == config_hash(want)
    assert {path.name for path in folder.iterdir()} == {"config.json", "env.json", "metrics.jsonl", "eval.json"}
