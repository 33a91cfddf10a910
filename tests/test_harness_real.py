"""The log-likelihoods of models/grt-nano on real items, of which only hashes are kept here:

python tests/test_harness_real.py --write
"""

import hashlib
import json
import sys
from pathlib import Path

import pytest
from nano_tasks import NANO, ROOT, TASKS, harness_model

from grt.evals import benchmarks
from grt.evals.benchmarks import load_tasks
from grt.runs.checkpoint import load_model

REAL = ROOT.parent / "shared" / "data" / "eval"
KNOWN = ROOT / "tests" / "assets" / "real_items.json"


def real_scores(model, folder: Path) -> dict[str, list[dict]]:
    """Of the first five items of each task: a hash, and the log-likelihoods of all that is asked about it."""
    found: dict[str, list[dict]] = {}
    lm = harness_model(model, folder / "scores")
    for name, task in load_tasks(list(TASKS), REAL, folder).items():
        with benchmarks.quiet():
            task.build_all_requests(limit=5)
            scores = lm.loglikelihood(task.instances)
        rows: dict[int, dict] = {}
        for request, score in zip(task.instances, scores, strict=True):
            digest = hashlib.sha256(json.dumps(request.doc, sort_keys=True).encode()).hexdigest()
            rows.setdefault(request.doc_id, {"item": digest, "log_probs": []})["log_probs"].append(score[0])
        found[name] = list(rows.values())
    return found


def test_real_items_have_the_log_likelihoods_that_are_known(tmp_path):
    if not REAL.exists():
        pytest.skip("shared/data/eval does not lie beside the repository")
    known, got = json.loads(KNOWN.read_text("utf-8")), real_scores(load_model(NANO)[0].eval(), tmp_path)
    assert list(got) == list(TASKS) == list(known)
    for name in TASKS:
        assert [row["item"] for row in got[name]] == [row["item"] for row in known[name]] and len(got[name]) == 5
        for row, want in zip(got[name], known[name], strict=True):
            assert row["log_probs"] == pytest.approx(want["log_probs"], abs=1e-4), name


if __name__ == "__main__" and sys.argv[1:] == ["--write"]:
    import tempfile

    with tempfile.TemporaryDirectory() as scratch:
        KNOWN.write_text(json.dumps(real_scores(load_model(NANO)[0].eval(), Path(scratch)), indent=1) + "\n")
