"""What the MFU is of: the most that this machine was ever seen to do."""

import json
import math

import pytest
import torch

from grt import device

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("GRT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def at(speed: float, monkeypatch, dtype: torch.dtype = torch.float32) -> tuple[float, str]:
    monkeypatch.setattr(device, "matmul_speed", lambda *_, **__: speed)
    return device.peak_flops(CPU, dtype)


def test_a_busy_machine_has_the_peak_of_an_idle_one(monkeypatch):
    assert at(2e11, monkeypatch) == (2e11, "matrix product measured at start")
    assert at(1e11, monkeypatch) == (2e11, "matrix product measured before, with less to do")
    assert at(3e11, monkeypatch) == (3e11, "matrix product measured at start")
    assert at(1e11, monkeypatch)[0] == 3e11


def test_precisions_and_threads_have_their_own(monkeypatch):
    at(2e11, monkeypatch)
    assert at(1e11, monkeypatch, torch.bfloat16)[0] == 1e11
    monkeypatch.setattr(torch, "get_num_threads", lambda: 7)
    assert at(1e11, monkeypatch)[0] == 1e11


@pytest.mark.parametrize("content", ["", "[]", '{"a": "b"}', "null", "Infinity"])
def test_a_damaged_file_is_written_anew(cache, monkeypatch, content):
    cache.mkdir()
    (cache / "peaks.json").write_text(content)
    assert at(1e11, monkeypatch)[0] == 1e11
    assert list(json.loads((cache / "peaks.json").read_text()).values()) == [1e11]


def test_no_peak_is_infinite(cache, monkeypatch):
    at(1e11, monkeypatch)
    (name,) = json.loads((cache / "peaks.json").read_text())
    (cache / "peaks.json").write_text(json.dumps({name: math.inf}))
    assert at(1e11, monkeypatch)[0] == 1e11


def test_without_a_cache_it_is_what_was_measured(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("GRT_CACHE", str(tmp_path / "file"))
    assert at(2e11, monkeypatch)[0] == 2e11
    assert at(1e11, monkeypatch)[0] == 1e11
