"""The curve of a run, and a log with damaged lines."""

import errno
import json
import math
from pathlib import Path

import pytest
from matplotlib import pyplot
from matplotlib.figure import Figure
from PIL import Image
from tiny import finish

from grt.errors import ConfigError
from grt.presets import change
from grt.runs.metrics import MetricsLog, read_metrics
from grt.runs.plots import draw_curve

# The curve


def test_the_curve_is_a_png(trained, tmp_path):
    with Image.open(trained[0] / "curve.png") as image:
        assert image.format == "PNG" and min(image.size) > 300
        colours = len(image.convert("RGB").getcolors(2**24))
    draw_curve([trained[0], trained[0]], tmp_path / "two.png")
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty/metrics.jsonl").write_text("")
    draw_curve([tmp_path / "empty"], tmp_path / "none.png")
    with Image.open(tmp_path / "none.png") as image:
        assert len(image.convert("RGB").getcolors(2**24)) < colours
    assert not list(tmp_path.glob(".*"))


def test_a_curve_that_cannot_be_written_does_not_end_the_run(config, tmp_path, monkeypatch, capsys):
    def refuse(runs, out):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("grt.train.loop.draw_curve", refuse)
    finish(change(config, train={"steps": 2}), tmp_path / "run")
    told = capsys.readouterr().err
    assert told.count("\n") == 1 and told.startswith(f"warning: {tmp_path / 'run/curve.png'} cannot be drawn")
    assert "No space left" in told


def test_a_curve_that_fails_leaves_nothing_behind(trained, tmp_path, monkeypatch):
    def refuse(figure, path, **options):
        Path(path).write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Figure, "savefig", refuse)
    with pytest.raises(OSError, match="No space"):
        draw_curve([trained[0]], tmp_path / "curve.png")
    assert not list(tmp_path.iterdir()) and not pyplot.get_fignums()


def test_a_finished_run_without_its_curve_gets_it_at_a_resume(config, tmp_path, monkeypatch):
    """A kill may come after the last checkpoint and before its curve."""
    drawn = []
    monkeypatch.setattr("grt.train.loop.draw_curve", lambda runs, out: drawn.append(out))
    config = change(config, train={"steps": 2})
    finish(config, tmp_path / "run")
    assert drawn == [tmp_path / "run/curve.png"]  # once, not twice
    finish(config, tmp_path / "run", resume=True)
    assert len(drawn) == 2


# Damage in the log

GOOD = {
    "train": {"kind": "train", "step": 1, "tokens": 128, "loss_lm": 2.0, "seconds": 1.0, "depth": [1, 2]},
    "eval": {"kind": "eval", "step": 1, "loss": 2.0, "bits_per_byte": 3.0, "loss_by_depth": {"0": 3.0, "1": 2.0}},
    "monitor": {"kind": "monitor", "step": 1},
    "event": {"kind": "event", "step": 1, "event": "save"},
}


def spoilt() -> list[str]:
    """Rows of each kind with each field absent or of a wrong type, and lines of other kinds."""
    bad: list[object] = [[], 3, None, {}, {"kind": "other", "step": 1}, {"kind": ["train"], "step": 1}]
    for row in GOOD.values():
        for name in row:
            bad.append({k: v for k, v in row.items() if k != name})
            bad += [row | {name: value} for value in (None, True, "x", ["x"], {"x": 1}, math.nan, math.inf)]
    bad.remove(GOOD["event"] | {"event": "x"})
    bad += [GOOD["train"] | {"step": 0}, GOOD["eval"] | {"step": -1}, GOOD["train"] | {"depth": [1.5]}]
    bad += [GOOD["train"] | {"tokens": -1}, GOOD["train"] | {"depth": [1, -2]}, GOOD["train"] | {"tokens": 1 << 62}]
    lines = [json.dumps(row) for row in bad]
    return [*lines, json.dumps(GOOD["train"]).replace("2.0", "1e999"), "9" * 5000, "[" * 10**5, "half", ""]


@pytest.mark.parametrize("line", spoilt(), ids=lambda line: line[:60])
def test_a_line_of_a_wrong_shape_is_left_out(tmp_path, line):
    path, good = tmp_path / "metrics.jsonl", [json.dumps(row) for row in GOOD.values()]
    path.write_text("\n".join([good[0], line, *good[1:]]) + "\n")
    with pytest.warns(UserWarning, match=r"metrics.jsonl: line 2 cannot be read"):
        assert read_metrics(path) == list(GOOD.values())


def test_validations_at_different_depths_are_drawn(tmp_path):
    other = GOOD["eval"] | {"step": 2, "loss_by_depth": {"3": 1.0}}
    rows = [GOOD["train"], GOOD["eval"], other]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"kind": "tr')
    draw_curve([tmp_path], tmp_path / "curve.png")
    assert (tmp_path / "curve.png").exists()


def test_a_full_disk_names_the_log(config, tmp_path):
    if not Path("/dev/full").exists():
        pytest.skip("there is no /dev/full")
    log = MetricsLog(Path("/dev/full"))
    with pytest.raises(ConfigError, match=r"/dev/full cannot be written \(No space left on device\): make room"):
        log.write("event", 1, event="save")
    log.close()
