"""What starting costs: `import grt` and `grt --help` answer at once; and the script's behaviour as a process."""

import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import grt

ROOT = Path(__file__).resolve().parent.parent
HEAVY = {"torch", "tyro", "rich", "numpy", "matplotlib", "safetensors", "transformers"}


def python(*arguments: str, **options) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *arguments]
    return subprocess.run(command, check=False, capture_output=True, cwd=ROOT, timeout=60, encoding="utf-8", **options)


def loaded(import_time_report: str) -> set[str]:
    """Top-level modules of a `python -X importtime` report."""
    modules = re.findall(r"^import time: +\d+ \| +\d+ \| +([\w.]+)$", import_time_report, re.M)
    return {module.split(".")[0] for module in modules}


def test_import_grt_loads_nothing_heavy():
    done = python("-X", "importtime", "-c", "import grt, sys; print(*sys.modules)")
    assert done.returncode == 0 and "grt" in loaded(done.stderr)
    assert not HEAVY & (loaded(done.stderr) | {module.split(".")[0] for module in done.stdout.split()})


def test_the_report_is_read_right():
    done = python("-X", "importtime", "-c", "import rich.text")
    assert "rich" in loaded(done.stderr)


@pytest.mark.parametrize("argument", ["--help", "--version"])
def test_help_answers_at_once_and_loads_nothing_heavy(argument):
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        done = python("-m", "grt", argument)
        seconds.append(time.perf_counter() - start)
        assert done.returncode == 0 and done.stdout.startswith(("usage: grt", "grt ")) and done.stderr == ""
    assert min(seconds) < 0.7, seconds
    assert not HEAVY & loaded(python("-X", "importtime", "-m", "grt", argument).stderr)


@pytest.mark.parametrize("command", ["train", "eval"])
def test_help_and_errors_of_commands_need_no_torch(command):
    for arguments, code in ((["--help"], 0), (["--nonsense"], 2)):
        done = python("-X", "importtime", "-m", "grt", command, *arguments)
        assert done.returncode == code and "torch" not in loaded(done.stderr)


def test_public_names_resolve():
    assert len(grt.__all__) == len(set(grt.__all__)) and set(grt.__all__) <= set(dir(grt))
    for name, home in grt._HOMES.items():
        for value in (getattr(grt, name), getattr(grt, name)):  # the first call imports modules
            assert value is getattr(importlib.import_module(home), name) and callable(value) and value.__doc__
        assert importlib.util.find_spec(f"grt.{name}") is None, f"the module grt.{name} hides the public name"
    namespace: dict = {}
    exec("from grt import *", namespace)
    assert set(grt.__all__) <= namespace.keys()


def test_type_checkers_see_the_public_names():
    """The names under TYPE_CHECKING are those that resolve, from the same modules."""
    source = (ROOT / "grt" / "__init__.py").read_text(encoding="utf-8")
    seen = {
        name: module
        for module, names in re.findall(r"^    from ([\w.]+) import ([\w, ]+)$", source, re.M)
        for name in names.split(", ")
    }
    assert seen == grt._HOMES and {*seen, "__version__"} == set(grt.__all__)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'grt' has no attribute 'Training'"):
        grt.Training  # noqa: B018
    with pytest.raises(ImportError):
        exec("from grt import nothing_of_the_kind")


def test_the_version_is_that_of_the_package():
    assert f'version = "{grt.__version__}"' in (ROOT / "pyproject.toml").read_text(encoding="utf-8")


# As a process


def run_grt(*arguments: str, **options) -> subprocess.CompletedProcess[str]:
    return python("-m", "grt", *arguments, **options)


def test_errors_leave_stdout_empty():
    done = run_grt("train", "grt-nanoo", "--out", "nowhere")
    assert (done.returncode, done.stdout) == (2, "") and done.stderr.count("\n") == 1


def test_a_reader_that_leaves_is_no_error():
    """As in `grt info grt-nano | true`: no traceback, and nothing at the interpreter's end either."""
    for arguments in (["info", "grt-nano"], ["--help"]):  # a rich table and plain text
        reader, writer = os.pipe()
        os.close(reader)
        command = [sys.executable, "-m", "grt", *arguments]
        done = subprocess.run(command, check=False, stdout=writer, stderr=subprocess.PIPE, cwd=ROOT, timeout=60)
        os.close(writer)
        assert (done.returncode, done.stderr) == (0, b""), arguments


def test_training_goes_on_when_its_reader_leaves(tmp_path):
    (tmp_path / "text.txt").write_text("a line of text\n" * 200)
    tiny = "--model.d-model=16 --model.n-heads=2 --model.context=16 --train.tokens-per-step=32 --train.batch-size=2"
    options = f"{tiny} --train.steps=3 --train.dtype=fp32 --data.path={tmp_path / 'text.txt'} --out={tmp_path / 'run'}"
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "grt", "train", "grt-nano", *options.split()]
    environment = {**os.environ, "GRT_CACHE": str(tmp_path / "cache")}
    done = subprocess.run(command, check=False, stdout=writer, stderr=subprocess.PIPE, env=environment, cwd=ROOT)
    os.close(writer)
    assert done.returncode == 0 and b"Traceback" not in done.stderr
    assert (tmp_path / "run" / "sample.txt").exists()  # the last thing that is done


def test_output_for_a_terminal_that_is_not_unicode():
    done = run_grt("info", "grt-nano", env={**os.environ, "PYTHONIOENCODING": "ascii"})
    assert done.returncode == 0 and done.stdout.isascii() and "parameters, total" in done.stdout


def test_json_is_the_only_thing_on_stdout():
    done = run_grt("info", "grt-nano", "--json")
    assert done.stderr == "" and json.loads(done.stdout)["name"] == "grt-nano"


@pytest.mark.skipif(os.name != "posix", reason="Ctrl-C is sent as a signal")
def test_ctrl_c_leaves_130_without_traceback():
    code = (
        "import signal, sys, time; from grt import cli; from grt.cli import info\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # a shell ignores it in its background
        "info.run_info = lambda _: print('go', flush=True) or time.sleep(50)\n"
        "sys.exit(cli.main(['info']))"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT)
    assert process.stdout is not None and process.stdout.readline() == b"go\n"
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert (process.returncode, err) == (130, b"grt: interrupted\n")
