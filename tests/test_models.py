"""The committed models: small, sound, accepted wherever a run is, and as good as their READMEs say."""

import json
import re
from pathlib import Path

import pytest

from grt import cli
from grt.data.loader import bigram_entropy
from grt.data.prepare import prepare
from grt.evals.loss import evaluate
from grt.runs.checkpoint import load_model

ROOT = Path(__file__).resolve().parent.parent
MODELS, RESULTS = ROOT / "models", ROOT / "results" / "models"
NAMES = ["grt-nano", "dense-nano"]


@pytest.fixture(scope="module")
def validation_text(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GRT_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield prepare("builtin").split("val")


@pytest.mark.parametrize("name", NAMES)
def test_it_fits_in_three_megabytes(name):
    files = list((MODELS / name).iterdir())
    assert {"config.json", "env.json", "metrics.jsonl", "manifest.json", "README.md"} <= {f.name for f in files}
    assert sum(f.stat().st_size for f in files) <= 3_000_000


@pytest.mark.parametrize("name", NAMES)
def test_it_predicts_the_validation_text(name, validation_text):
    model, config = load_model(MODELS / name)
    losses = evaluate(model, validation_text, limit=config.train.eval_windows).loss_by_depth
    R = config.model.blocks.R
    rows = [json.loads(line) for line in (MODELS / name / "metrics.jsonl").read_text().splitlines()]
    logged = [row for row in rows if row["kind"] == "eval"][-1]["loss_by_depth"]
    assert {int(k) for k in logged} == losses.keys()
    for k, loss in logged.items():
        assert losses[int(k)] == pytest.approx(loss, rel=1e-3)  # training logged fp32 weights in bf16 arithmetic
    assert losses[R] < bigram_entropy(validation_text) - 0.8
    if R:
        assert losses[R] <= losses[0] - 0.1 and losses[R] <= losses[1]


@pytest.mark.parametrize("name", NAMES)
def test_its_readme_says_what_was_measured(name):
    report = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    printed = re.findall(r"^\| (\d+) \| ([\d.]+) \| ([\d.]+) \|", (MODELS / name / "README.md").read_text(), re.M)
    depths = report["depths"].items()
    assert printed == [(k, f"{row['loss']:.4f}", f"{row['bits_per_byte']:.4f}") for k, row in depths]
    assert report["run"] == f"models/{name}" and report["windows"] == 3060


def test_it_is_accepted_where_a_run_is(capsys):
    folder = str(MODELS / "grt-nano")
    assert cli.main(["generate", folder, "--prompt", "import ", "--max-new-tokens", "4", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["tokens"]) == 4
    assert cli.main(["info", folder, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["name"] == "grt-nano"
