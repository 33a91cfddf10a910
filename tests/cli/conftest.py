"""The path of a user: `grt` is called in this process, as the console script calls it."""

import json
import warnings

import pytest
import torch
from tiny_run import TINY, write_texts

from grt import cli


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory):
    """A cache of prepared text for this file, no warning format that outlives it, and no timing of the machine."""
    shown = warnings.formatwarning
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("grt.train.loop.peak_flops", lambda device, dtype: (1e11, "made up"))
        patch.setenv("GRT_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield
    warnings.formatwarning = shown


@pytest.fixture(autouse=True)
def threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    return write_texts(tmp_path_factory.mktemp("text") / "texts")


@pytest.fixture(scope="module")
def run(tmp_path_factory, texts):
    """A finished run of four steps; tests only read it."""
    out = tmp_path_factory.mktemp("runs") / "tiny"
    assert cli.main(["train", "grt-nano", *TINY, "--data.path", str(texts), "--out", str(out)]) == 0
    return out


@pytest.fixture
def grt(capsys):
    """Call a command that must work; returns what it printed on stdout."""

    def call(*arguments) -> str:
        capsys.readouterr()
        code = cli.main([str(a) for a in arguments])
        out, err = capsys.readouterr()
        assert code == 0, err
        return out

    return call


@pytest.fixture
def document(grt):
    """Call a command with --json; stdout must be one JSON document without NaN, in one line."""

    def call(*arguments) -> dict:
        out = grt(*arguments, "--json")
        assert out.count("\n") == 1

        def refuse(constant: str) -> None:
            raise AssertionError(f"{constant} is no JSON")

        return json.loads(out, parse_constant=refuse)

    return call


@pytest.fixture
def refused(capsys):
    """Call a command that must be refused: exit code 2, one line on stderr, nothing on stdout. Returns the line."""

    def call(*arguments) -> str:
        capsys.readouterr()
        code = cli.main([str(a) for a in arguments])
        out, err = capsys.readouterr()
        assert (code, out) == (2, ""), (code, out, err)
        assert err.startswith("grt: ") and err.count("\n") == 1, err
        return err

    return call
