"""What the README promises about one's own text: its lines as pasted, and prose in GPT-2's tokens."""

import json
import re
import shlex
from pathlib import Path

import pytest

from grt import cli
from grt.presets import PRESETS, change, grt_nano

ROOT = Path(__file__).resolve().parent.parent
PROSE = ROOT.parent / "shared" / "data" / "corpus" / "train_fiction.txt.zst"


def own_text_lines() -> list[list[str]]:
    """The grt lines of the README's block on one's own text."""
    section = (ROOT / "README.md").read_text(encoding="utf-8").split("## Train on your own text")[1]
    block = re.search(r"```bash\n(.*?)```", section, re.S)
    assert block is not None
    lines = [shlex.split(line, comments=True) for line in block[1].splitlines()]
    assert lines[0] == ["make", "setup", "&&", "source", ".venv/bin/activate"] and len(lines) == 4
    return [words[1:] for words in lines[1:]]


def test_the_four_lines_work_as_pasted(tmp_path, monkeypatch, capsys):
    """Only the preset is smaller, so that the test takes seconds; words, options and folders are the README's."""
    small = change(
        grt_nano(),
        model={"d_model": 16, "n_heads": 2, "context": 32},
        optim={"warmup_steps": 2},
        train={"steps": 6, "tokens_per_step": 128, "batch_size": 2, "eval_windows": 4, "dtype": "fp32"},
    )
    monkeypatch.setitem(PRESETS, "grt-nano", lambda: small)
    monkeypatch.setenv("GRT_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_texts").mkdir()
    for i in range(3):
        (tmp_path / "my_texts" / f"{i}.txt").write_text(f"Once upon a time there were {i} texts. " * 200)
    for words in own_text_lines():
        assert cli.main(words) == 0
    shown = capsys.readouterr().out
    assert "depth" in shown and "Once upon" in shown
    assert {"config.json", "env.json", "metrics.jsonl", "curve.png", "sample.txt", "checkpoints"} <= {
        path.name for path in (tmp_path / "runs/mine").iterdir()
    }


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_prose_in_gpt2_tokens_trains_for_fifty_steps(tmp_path, monkeypatch, capsys):
    if not PROSE.exists():
        pytest.skip("shared/data/corpus does not lie beside the repository")
    monkeypatch.setenv("GRT_CACHE", str(tmp_path / "cache"))
    words = [
        "--data.tokenizer",
        "gpt2",
        "--model.vocab-size",
        "50257",
        "--train.steps",
        "50",
        "--train.tokens-per-step",
        "1024",
        "--train.batch-size",
        "4",
        "--train.eval-every",
        "50",
        "--train.eval-windows",
        "4",
        "--optim.warmup-steps",
        "5",
        "--optim.lr",
        "2e-3",
    ]
    out = tmp_path / "prose"
    assert cli.main(["train", "grt-nano", "--data.path", str(PROSE), "--out", str(out), *words]) == 0
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    losses = [row["loss"] for row in rows if row["kind"] == "train"]
    assert len(losses) == 50 and losses[0] > 10.5 and sum(losses[-5:]) / 5 < 8.0
