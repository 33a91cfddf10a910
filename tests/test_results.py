"""Tables in results/ are what their commands make of the committed files: nobody has typed a number."""

import importlib.util
from pathlib import Path

import pytest

from grt.config import config_hash, load
from grt.experiments import learning_rates
from grt.experiments.recipes import NANO_FACTOR, NANO_GATE_BIAS, SEEDS, nano
from grt.presets import change, preset
from grt.study.experiment import EXPERIMENTS, experiments
from grt.study.results import Results

ROOT = Path(__file__).resolve().parent.parent
METHODS = ROOT / "results" / "methods"
FOLDERS = sorted(path.parent for path in METHODS.glob("*/eval.json"))


def script(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / "dev" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def methods_table():
    return script("methods_table")


def test_readme_has_what_was_measured():
    measured, readme = script("measured"), (ROOT / "README.md").read_text(encoding="utf-8")
    assert measured.BEGIN in readme and measured.with_section(readme) == readme, "run python dev/measured.py"
    stored = [path for folder in ("bench", "models") for path in (ROOT / "results" / folder).iterdir()]
    assert {
        path.relative_to(ROOT / "results").with_suffix("").as_posix() for path in stored
    } == measured.COMMANDS.keys()


def test_the_table_of_methods_is_built_from_its_files(methods_table):
    assert (METHODS / "README.md").read_text(encoding="utf-8") == methods_table.table()


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_each_run_is_the_preset_under_one_recipe(folder):
    config, steps = load(folder / "config.json"), load(FOLDERS[0] / "config.json").train.steps
    want = change(preset(f"{folder.name}-nano"), train={"steps": steps})
    assert config_hash(config) == config_hash(want)
    assert {path.name for path in folder.iterdir()} == {"config.json", "env.json", "metrics.jsonl", "eval.json"}


NANO = ROOT / "results" / "nano"


def test_every_committed_run_is_found_by_the_hash_that_it_had():
    """A run's folder was named by the hash of its config when it was collected."""
    runs = Results(ROOT / "results", "nano", SEEDS).runs
    assert len(runs) == 171
    assert all(result.folder.name.endswith(f"-{hash_[:8]}") for hash_, result in runs.items())


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_a_table_of_the_nano_study_is_built_from_its_runs(name, tmp_path):
    results = Results(ROOT / "results", "nano", SEEDS)
    [experiment] = experiments(name)
    report = experiment.build(results)
    assert (NANO / f"{experiment.file}.md").read_text(encoding="utf-8") == report.markdown()
    for table in report.tables:
        assert (NANO / "tables" / f"{table.name}.csv").read_text(encoding="utf-8") == table.csv()
        assert (NANO / "tables" / f"{table.name}.tex").read_text(encoding="utf-8") == table.latex()
    assert all((NANO / f"{figure}.png").exists() for figure in report.figures)


def test_the_recipe_has_the_rates_that_the_sweep_chose():
    """Where a method's sweep is finished, the factor in recipes.py has the smallest loss; so has GRT's gate bias."""
    results = Results(ROOT / "results", "nano", SEEDS[:1])
    for name in learning_rates.ROWS:
        losses = {f: results.losses(nano(name, f)) for f in learning_rates.FACTORS}
        if all(losses.values()):
            best = min(losses, key=lambda factor: losses[factor][SEEDS[0]])
            assert NANO_FACTOR.get(name, 1.0) == best, name
    biases = {
        bias: results.losses(nano("grt", learning_rates.BIAS_FACTOR, bias))[SEEDS[0]]
        for bias in learning_rates.GATE_BIASES
    }
    assert min(biases, key=lambda bias: biases[bias]) == NANO_GATE_BIAS
