"""`grt bench dial`: loss against time per token, at each depth. Speeds are not tested."""

import json

import pytest
import torch

from grt import cli
from grt.bench import dial
from grt.errors import ConfigError


@pytest.fixture
def of_text(monkeypatch, tiny, split_of):
    """dial with a model and a text of its own, in the place of a run's."""

    class Prepared:
        def split(self, *_):
            return split_of(torch.randint(23, (60,)).tolist())

    def use(layout="1+2x3+1"):
        model = tiny(layout=layout, dtype=torch.float32)
        config = type("Config", (), {"model": model.config, "data": type("Data", (), {"windows": "any"})})
        monkeypatch.setattr(dial, "load_model", lambda run, device: (model, config))
        monkeypatch.setattr(dial, "open_data", lambda config, quiet: Prepared())

    return use


def test_dial(of_text, tmp_path, capsys):
    of_text()
    out = tmp_path / "dial.png"
    assert cli.main(["bench", "dial", "run", "--new", "4", "--windows", "2", "--out", str(out), "--device", "cpu"]) == 0
    assert out.read_bytes().startswith(b"\x89PNG")
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (report["bench"], report["prompt"], report["plot"]) == ("dial", 8, str(out))
    assert [row["depth"] for row in report["rows"]] == [1, 2, 3]
    assert len({row["loss"] for row in report["rows"]}) == 3
    for row in report["rows"]:
        assert row["spread"][0] <= row["ms_per_token"] <= row["spread"][1] and row["prefill_ms"] > 0
    assert list(report["ratios"]) == [f"ms per token, depth {k} / depth 3" for k in (1, 2)]
    some = dial.bench_dial("run", [3, 1], new=4, windows=1, alternations=1, device="cpu", out=out)
    assert [row["name"] for row in some["rows"]] == ["depth 1", "depth 3"]


def test_dial_warns_once_of_depths_beyond_training(of_text, tmp_path):
    of_text()
    for depths in ([2, 4, 5], [4, 5], [5]):
        with pytest.warns(UserWarning, match="depth 5 is beyond the 3 steps") as told:
            dial.bench_dial("run", depths, new=4, windows=1, alternations=1, device="cpu", out=tmp_path / "dial.png")
        assert len(told) == 1


@pytest.mark.parametrize(
    ("layout", "options", "message"),
    [
        ("4L", {}, "run is a dense model, 4L, with one depth only: give a recurrent one"),
        ("1+2x3+1", {"new": 12}, "--new 12 leaves no room for a prompt in model.context 12"),
        ("1+2x3+1", {"depths": [0, 2]}, "depth is 0: give at least 1"),
        ("1+2x3+1", {"depths": [1, 10**7]}, "depth is 10000000: give at most 192"),
    ],
)
def test_dial_refuses(of_text, tmp_path, layout, options, message):
    of_text(layout)
    with pytest.raises(ConfigError, match=message):
        dial.bench_dial("run", device="cpu", out=tmp_path / "dial.png", **({"new": 4} | options))
