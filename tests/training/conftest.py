"""A tiny run on generated text, for all that training has to do; tiny.py has ways to stop and to kill one."""

import shutil

import pytest
from tiny import finish, quick, result, run_until, tiny, write_text

from grt.presets import change


@pytest.fixture(autouse=True)
def fast(monkeypatch):
    quick(monkeypatch)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_text(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def config(data):
    return tiny(data)


@pytest.fixture
def endless(config):
    return change(config, train={"steps": 10**6, "checkpoint_every": 10**6, "eval_every": 10**6})


@pytest.fixture(scope="module")
def trained(data, tmp_path_factory):
    """A finished run of 30 steps: (folder, trainer)."""
    with pytest.MonkeyPatch.context() as patch:
        quick(patch, curve=True)
        out = tmp_path_factory.mktemp("trained") / "run"
        return out, finish(tiny(data), out)


@pytest.fixture(scope="module")
def straight(data, tmp_path_factory):
    """The result of 30 steps that nothing interrupted."""
    with pytest.MonkeyPatch.context() as patch:
        quick(patch)
        out = tmp_path_factory.mktemp("straight") / "run"
        finish(tiny(data), out)
        return result(out)


@pytest.fixture(scope="module")
def interrupted(config, tmp_path_factory):
    """A run with checkpoints at steps 5 and 10, to be copied."""
    with pytest.MonkeyPatch.context() as patch:
        quick(patch)
        out = tmp_path_factory.mktemp("interrupted") / "run"
        run_until(config, out, 11)
        return out


@pytest.fixture
def run(interrupted, tmp_path):
    shutil.copytree(interrupted, tmp_path / "run")
    return tmp_path / "run"


@pytest.fixture
def new(run):
    return run / "checkpoints" / "step-00000010"
