"""The tests of the vLLM plug-in: `make vllm-test` runs them in an environment of their own."""

from pathlib import Path

import pytest

from grt.hf.exchange import export_hf

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def nano(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """models/grt-nano, exported."""
    folder = tmp_path_factory.mktemp("exported") / "grt-nano"
    export_hf(ROOT / "models/grt-nano", folder)
    return folder
