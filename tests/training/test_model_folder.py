"""Model folders: weights without the means to train on."""

from pathlib import Path

import pytest
import safetensors.torch
import torch
import zstandard
from damage import cut, empty, longer, refused, remove, seal

from grt.config import config_hash, dump
from grt.runs.checkpoint import load_model, write_folder


@pytest.fixture
def model_folder(config, new, tmp_path):
    """Makes a model folder: config, weights (plain or compressed, fp32 or bf16) and manifest side by side."""

    def make(dtype: torch.dtype = torch.float32, compress: bool = False) -> Path:
        tensors = {k: v.to(dtype) for k, v in safetensors.torch.load_file(new / "model.safetensors").items()}
        content, name = safetensors.torch.save(tensors), "model.safetensors"
        if compress:
            content, name = zstandard.ZstdCompressor().compress(content), name + ".zst"
        files = {"config.json": dump(config).encode(), name: content}
        write_folder(tmp_path / "model", files, config_hash(config), 10)
        return tmp_path / "model"

    return make


@pytest.mark.parametrize("compress", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_folder_loads(config, run, model_folder, dtype, compress):
    folder = model_folder(dtype, compress)
    (model, loaded), (original, _) = load_model(folder), load_model(run)
    assert loaded == config
    for name, tensor in model.state_dict().items():
        assert tensor.dtype == torch.float32
        assert torch.equal(tensor, original.state_dict()[name].to(dtype).float())


@pytest.mark.parametrize("damage", [cut, empty, remove, longer])
@pytest.mark.parametrize("name", ["model.safetensors.zst", "config.json"])
def test_a_damaged_model_folder(model_folder, name, damage):
    folder = model_folder(compress=True)
    damage(folder / name)
    refused(folder, folder)


@pytest.mark.parametrize("content", [b"", b"no frame", None])
def test_weights_that_are_no_zstd(model_folder, content):
    weights = model_folder(compress=True) / "model.safetensors.zst"
    weights.write_bytes(weights.read_bytes()[:-20] if content is None else content)
    seal(weights.parent)
    refused(weights.parent, weights)


def test_only_listed_weights_are_read(run, model_folder):
    folder = model_folder(compress=True)
    zeros = {k: torch.zeros_like(v) for k, v in load_model(run)[0].state_dict().items()}
    safetensors.torch.save_file(zeros, folder / "model.safetensors")
    assert torch.equal(load_model(folder)[0].ln_f.weight, load_model(run)[0].ln_f.weight)
