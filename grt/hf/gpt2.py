"""GPT-2 as Hugging Face keeps it, read as a dense model: a folder with config.json and safetensors."""

import json
from pathlib import Path
from typing import Any

import safetensors
import torch
from safetensors.torch import load_file
from torch import Tensor

from grt.config import ModelConfig
from grt.errors import ConfigError

# Theirs -> ours; the weights of their Conv1D layers are (d_in, d_out).
OUTSIDE = {"wte.weight": "embed.tokens.weight", "wpe.weight": "embed.positions.weight"}
LAYER = {
    "ln_1": "ln1", "attn.c_attn": "attn.qkv", "attn.c_proj": "attn.out", "ln_2": "ln2", "mlp.c_fc": "mlp.up",
    "mlp.c_proj": "mlp.down",
}  # fmt: skip
# What our blocks compute: field of their config, its default there, and the values that mean the same.
SAME: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "activation_function": ("gelu_new", ("gelu_new", "gelu_pytorch_tanh")),
    "layer_norm_epsilon": (1e-5, (1e-5,)),
    "scale_attn_weights": (True, (True,)),
    "scale_attn_by_inverse_layer_idx": (False, (False,)),
    "add_cross_attention": (False, (False,)),
    "tie_word_embeddings": (True, (True,)),
}


def read_gpt2(folder: Path) -> tuple[ModelConfig, dict[str, Tensor]]:
    """The dense model's configuration, and its weights in float32 under our names. Raises ConfigError where the folder
    holds something else, or lacks a tensor."""
    config = read_config(folder / "config.json")
    theirs = {name.removeprefix("transformer."): x for name, x in read_tensors(folder).items()}
    head, tokens = theirs.pop("lm_head.weight", None), theirs.get("wte.weight")
    if head is not None and tokens is not None and not torch.equal(head, tokens):
        raise ConfigError(f"{folder} has a head of its own, and ours is the embedding: import a model with a tied one.")
    ours = {}
    for their_name, name in expected(config.blocks.p).items():
        if their_name not in theirs:
            raise ConfigError(f"{folder} lacks tensor {their_name}: it is damaged, or no GPT-2 of this config.json.")
        x = theirs.pop(their_name).float()
        conv1d = x.dim() == 2 and their_name.startswith("h.")
        ours[name] = x.T.contiguous() if conv1d else x
    # masks that older versions saved with the weights
    if unknown := [name for name in theirs if not name.endswith((".attn.bias", ".attn.masked_bias"))]:
        raise ConfigError(f"{folder} has tensor {unknown[0]}, which no GPT-2 has: import a plain GPT-2.")
    return config, ours


def expected(n_layers: int) -> dict[str, str]:
    """Their name -> ours."""
    names = dict(OUTSIDE)
    for kind in ("weight", "bias"):
        names[f"ln_f.{kind}"] = f"ln_f.{kind}"
        for i in range(n_layers):
            names |= {f"h.{i}.{a}.{kind}": f"prelude.{i}.{b}.{kind}" for a, b in LAYER.items()}
    return names


def read_config(path: Path) -> ModelConfig:
    try:
        theirs = json.loads(path.read_text(encoding="utf-8"))
        kind, d = theirs["model_type"], theirs.get("n_embd", 768)
    except FileNotFoundError:
        raise ConfigError(f"{path} does not exist: give a folder that save_pretrained of GPT-2 has written.") from None
    except (ValueError, TypeError, KeyError, OSError) as error:
        raise ConfigError(f"{path} is no model's config ({error}): restore it or give another folder.") from None
    if kind != "gpt2":
        raise ConfigError(f"{path} is of a {kind!r} model: only gpt2 can be imported.")
    if (inner := theirs.get("n_inner")) not in (None, 4 * d):
        raise ConfigError(f"{path} has n_inner {inner}, and our blocks have {4 * d}: import a model that has the same.")
    for name, (default, same) in SAME.items():
        if (value := theirs.get(name, default)) not in same:
            raise ConfigError(f"{path} has {name} {value!r}, and our blocks {same[0]!r}: import a model with the same.")
    return ModelConfig(
        layout=f"{theirs.get('n_layer', 12)}L", d_model=d, n_heads=theirs.get("n_head", 12),
        context=theirs.get("n_positions", 1024), vocab_size=theirs.get("vocab_size", 50257),
    )  # fmt: skip


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """Of model.safetensors, or of the files that an index names."""
    index = folder / "model.safetensors.index.json"
    try:
        names = {"model.safetensors"}
        if index.exists():
            names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        return {name: x for file in sorted(names) for name, x in load_file(folder / file).items()}
    except FileNotFoundError as error:
        raise ConfigError(
            f"{error.filename or folder / 'model.safetensors'} does not exist: give safetensors."
        ) from None
    except (safetensors.SafetensorError, ValueError, TypeError, KeyError, OSError) as error:
        raise ConfigError(f"{folder} has weights that cannot be read ({error}): restore them.") from None
