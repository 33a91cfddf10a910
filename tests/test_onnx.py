"""ONNX: a graph of a fixed depth with the same logits, and what has none."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from grt.cli import main

pytest.importorskip("transformers", reason="needs transformers, of the extra hf")


ROOT = Path(__file__).resolve().parent.parent
NANO = ROOT / "models/grt-nano"


@pytest.mark.parametrize("method", ["mor", "mor-token"])
def test_no_graph_of_routed_tokens(tiny, tmp_path, method):
    from grt.errors import ConfigError
    from grt.hf.onnx import write_onnx

    with pytest.raises(ConfigError, match=f"{method} computes as many rows as its router chooses"):
        write_onnx(tiny(method, dtype=torch.float32), tmp_path / "model.onnx")


def test_onnx_without_its_packages(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    assert main(["export", str(NANO), str(tmp_path / "a"), "--format", "onnx"]) == 2
    assert "pip install 'gated-recurrent-transformer[onnx]'" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("method", ["grt", "poisson", "rrt", "ouro", "dense"])
def test_onnx_has_the_same_logits(tiny, ids, tmp_path, method):
    """Also for other batches and lengths than the one that it was made with; at the depth that was asked for."""
    runtime = pytest.importorskip("onnxruntime", reason="needs onnxruntime, of the extra onnx")
    pytest.importorskip("onnxscript", reason="needs onnxscript, of the extra onnx")
    from grt.hf.onnx import write_onnx
    from grt.model.depth import Depth

    dense = method == "dense"
    model = tiny("ladder" if dense else method, "4L" if dense else "1+2x3+1", dtype=torch.float32)
    steps = None if dense else 2
    assert write_onnx(model, tmp_path / "model.onnx", steps) < 1e-5
    session = runtime.InferenceSession(tmp_path / "model.onnx")
    for x in (ids, ids[:1, :5], ids.repeat(2, 1)[:, :1]):
        got = torch.from_numpy(session.run(None, {"input_ids": x.numpy()})[0])
        with torch.no_grad():
            torch.testing.assert_close(got, model(x, None if dense else Depth(2)), rtol=0, atol=1e-5)
    context = model.config.context
    assert session.get_inputs()[0].shape == ["batch", f"tokens_at_most_{context}"]
    facts = {"context": str(context), "vocab_size": "23", "depth": "0" if dense else "2"}
    assert session.get_modelmeta().custom_metadata_map == facts
    with pytest.raises(Exception, match="ONNXRuntimeError"):
        session.run(None, {"input_ids": np.zeros((1, context + 1), np.int64)})
