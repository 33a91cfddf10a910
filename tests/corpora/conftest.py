"""A folder of texts, and a cache of its own for every test."""

import pytest


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """Every test has a cache of its own."""
    monkeypatch.setenv("GRT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def texts(tmp_path):
    """A folder of 60 documents, enough for a split by hash at 20 %."""
    folder = tmp_path / "texts"
    (folder / "deep").mkdir(parents=True)
    for i in range(60):
        (folder / ("deep" if i % 2 else ".") / f"{i:02}.txt").write_text(f"document {i}\n" * (i + 1))
    return folder
