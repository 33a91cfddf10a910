"""`grt --help` and what it names; `grt demo`."""

import importlib
import re
import shutil
from dataclasses import fields, is_dataclass
from pathlib import Path

import pytest
from tiny_run import OPTIONS

from grt import cli
from grt.cli.bench import BENCHES
from grt.cli.options import Run
from grt.cli.paper import ACTIONS
from grt.cli.train import Train
from grt.config import RunConfig, dump
from grt.presets import preset


def options_of(command: type, prefix: str = "--") -> list[str]:
    """The options that the fields of a command's dataclass stand for, positional ones left out."""
    found = []
    for f in fields(command):
        kind = RunConfig if f.name == "run" and command is Train else f.type
        if "Positional" in str(kind) or kind is Run:
            continue
        if isinstance(kind, type) and is_dataclass(kind):
            found += options_of(kind, prefix if kind is RunConfig else f"{prefix}{f.name}.")
        else:
            found.append(prefix + f.name.replace("_", "-"))
    return found


def help_of(capsys, *arguments: str) -> str:
    with pytest.raises(SystemExit) as stop:
        cli.main([*arguments, "--help"])
    out, err = capsys.readouterr()
    assert not stop.value.code and not err
    return out


PARTS = {"bench": BENCHES, "paper": ACTIONS}  # commands that have commands


@pytest.mark.parametrize("name", [f"{c} {part}".strip() for c in cli.COMMANDS for part in PARTS.get(c, [""])])
def test_help_names_every_option(capsys, name):
    out = help_of(capsys, *name.split())
    assert out.startswith(f"usage: grt {name}")
    file, what = name.split()[0], name.split()[-1]
    command = getattr(importlib.import_module(f"grt.cli.{file}"), what.capitalize())
    missing = [option for option in options_of(command) if not re.search(rf"{re.escape(option)}\b", out)]
    assert not missing
    if name == "train":
        assert {*OPTIONS, "--data.path", "--out", "--resume", "--max-time"} <= {*re.findall(r"--[\w.-]+", out)}


def test_help_of_a_preset_shows_its_values(capsys):
    assert re.search(r"--model\.layout.*?default: 8L", help_of(capsys, "train", "dense-nano"), re.S)


def test_usage_names_every_command(grt):
    out = grt("--help")
    assert out == grt("-h") and all(re.search(rf"^  {name} +\w", out, re.M) for name in cli.COMMANDS)


def test_every_file_of_the_commands_is_a_command():
    folder = Path(cli.__file__).parent
    assert {path.stem for path in folder.glob("*.py")} == {"__init__", "options", "report", *cli.COMMANDS}


def test_version(grt):
    assert re.fullmatch(r"grt \d+\.\d+\.\d+\n", grt("--version"))


def test_demo_replaces_an_earlier_demo_and_nothing_else(monkeypatch, capsys, run, tmp_path):
    calls = []
    monkeypatch.setattr("grt.cli.demo.train_and_show", lambda *a, **k: calls.append((a, k)) or 0)
    out = tmp_path / "demo"
    shutil.copytree(run, out)
    before = sorted(out.rglob("*"))
    assert cli.main(["demo", "--out", str(out)]) == 0 and sorted(out.rglob("*")) == before  # train will refuse it
    (out / "config.json").write_text(dump(preset("demo")))
    (out / "notes.txt").write_text("mine")
    assert cli.main(["demo", "--out", str(out)]) == 0 and [path.name for path in out.iterdir()] == ["notes.txt"]
    assert len(calls) == 2 and calls[0][0][0].name == "demo"
