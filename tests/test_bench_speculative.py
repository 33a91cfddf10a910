"""`grt bench speculative`: what is counted and predicted. Speeds are not tested."""

import json

import pytest
import torch

from grt import cli
from grt.bench import speculative
from grt.decode.speculative import Tally, expected_tokens
from grt.errors import ConfigError


@pytest.fixture
def of_text(monkeypatch, tiny, split_of):
    """A model and a text of its own, in the place of a run's."""

    class Prepared:
        def split(self, *_):
            return split_of(torch.randint(23, (60,)).tolist())

    def use(layout="1+2x3+1", method="grt"):
        model = tiny(method, layout, dtype=torch.float32)
        config = type("Config", (), {"model": model.config, "data": type("Data", (), {"windows": "any"})})
        monkeypatch.setattr(speculative, "load_model", lambda run, device: (model, config))
        monkeypatch.setattr(speculative, "open_data", lambda config, quiet: Prepared())

    return use


def test_the_table(of_text, capsys):
    of_text()
    arguments = ["--new", "8", "--prompts", "3", "--draft-depth", "1", "2", "--draft-tokens", "2", "--device", "cpu"]
    assert cli.main(["bench", "speculative", "run", *arguments]) == 0
    lines = capsys.readouterr().out.splitlines()
    report = json.loads(lines[-1])
    assert (report["bench"], report["prompt"], report["new"], report["prompts"]) == ("speculative", 4, 8, 3)
    rows = report["rows"]
    assert [(row["draft_depth"], row["draft_tokens"]) for row in rows] == [(1, 2), (1, None), (2, 2), (2, None)]
    for row in rows:
        ms, a, m = row["passes_ms"], row["acceptance"], row["drafts"]
        gain = ms["plain"] * expected_tokens(a, m) / (m * ms["draft"] + ms["last"] + ms["verify"])
        assert row["predicted"] == pytest.approx(gain) and 0 <= a <= 1
        assert row["measured"] == report["ratios"][f"ms per token, plain / {row['name']}"] > 0
    assert len(lines) > 8 and "with drafts and plain" in "".join(lines)


def test_counts_and_what_is_expected():
    tallies = [Tally(2, 8, 6, 5), Tally(1, 4, 4, 4)]
    total = sum(tallies, Tally())
    assert total == Tally(3, 12, 10, 9) and total.acceptance == 0.9 and total.tokens_per_verification == 4
    assert Tally().acceptance is None
    assert expected_tokens(0.5, 3) == pytest.approx(1 + 0.5 + 0.25 + 0.125)
    assert expected_tokens(1, 3) == 4 and expected_tokens(0, 3) == 1


@pytest.mark.parametrize(
    ("layout", "method", "options", "message"),
    [
        ("4L", "ladder", {}, "a dense model has no core"),
        ("1+2x3+1", "mor", {}, "mor chooses in each pass who goes on"),
        ("1+2x3+1", "grt", {"new": 12}, "--new 12 leaves no room for a prompt in model.context 12"),
        ("1+2x3+1", "grt", {"depths": [1, 3]}, "draft_depth is 3: give at least 1, and less than"),
        ("1+2x3+1", "grt", {"lengths": [0]}, "draft_tokens is 0: it must be at least 1"),
        ("1+2x3+1", "grt", {"prompts": 0}, "--prompts is 0"),
    ],
)
def test_refuses_before_it_measures(of_text, monkeypatch, layout, method, options, message):
    of_text(layout, method)
    monkeypatch.setattr(speculative, "measure", lambda *_: pytest.fail("measured"))
    with pytest.raises(ConfigError, match=message):
        speculative.bench_speculative("run", device="cpu", **{"new": 8} | options)


def test_prompts_come_from_all_over_the_text(split_of):
    assert speculative.beginnings(split_of(list(range(20))), 3, 4) == [[0, 1, 2, 3], [5, 6, 7, 8], [10, 11, 12, 13]]
