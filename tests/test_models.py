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

MODELS = Path(__file__).resolve().parent.parent / "models"
NAMES = ["grt-nano", "dense-nano"]
WINDOWS = 24


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
    losses = evaluate(model, validation_text, limit=WINDOWS).loss_by_depth
    R = config.model.blocks.R
    assert losses[R] < bigram_entropy(validation_text) - 0.8
    if R:
        assert losses[R] <= losses[0] - 0.1 and losses[R] <= losses[1]


@pytest.mark.parametrize("name", NAMES)
def test_its_readme_says_what_its_metrics_say(name):
    """The bf16 weights on all windows lie near the fp32 weights on the first ones, which training logged."""
    rows = [json.loads(line) for line in (MODELS / name / "metrics.jsonl").read_text().splitlines()]
    logged = [row for row in rows if row["kind"] == "eval"][-1]
    printed = dict(re.findall(r"^\| (\d+) \| ([\d.]+) \|", (MODELS / name / "README.md").read_text(), re.M))
    assert printed.keys() == logged["loss_by_depth"].keys()
    for depth, loss in logged["loss_by_depth"].items():
        assert float(printed[depth]) == pytest.approx(loss, rel=0.12)


def test_it_is_accepted_where_a_run_is(capsys):
    folder = str(MODELS / "grt-nano")
    assert cli.main(["generate", folder, "--prompt", "import ", "--max-new-tokens", "4", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["tokens"]) == 4
    assert cli.main(["info", folder, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["name"] == "grt-nano"
