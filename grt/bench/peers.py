"""Other people's GPT-2 as contestants of the training bench, set to what grt's dense model computes.

nanoGPT's code is no part of this repository: it is loaded from the model.py that the user names. transformers is
imported here, inside the function that needs it.
"""

import contextlib
import importlib.util
import io
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from grt.config import ConfigError, ModelConfig

LossOf = Callable[[Tensor, Tensor], Tensor]  # ids (B, T), targets (B, T) -> mean cross-entropy


def nanogpt(path: Path | None, config: ModelConfig) -> tuple[nn.Module, LossOf]:
    """GPT of nanoGPT's model.py with biases, without dropout, with the tanh form of GELU."""
    if path is None or not path.is_file():
        named = "is not given" if path is None else f"{path} is no file"
        raise ConfigError(f"--nanogpt {named}: name the model.py of a checkout of karpathy/nanoGPT.")
    spec = importlib.util.spec_from_file_location("nanogpt_model", path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclass looks itself up there
    try:
        with contextlib.redirect_stdout(io.StringIO()):  # it prints its size
            spec.loader.exec_module(module)
            theirs: Any = module.GPTConfig(
                block_size=config.context, vocab_size=config.vocab_size, n_layer=config.blocks.n_executions(),
                n_head=config.n_heads, n_embd=config.d_model, dropout=0.0, bias=True,
            )  # fmt: skip
            model = module.GPT(theirs)
    except (SyntaxError, ImportError, AttributeError, TypeError) as error:
        raise ConfigError(f"--nanogpt {path} is not nanoGPT's model.py ({error}): name that file.") from None
    for part in list(model.modules()):
        for name, child in part.named_children():
            if isinstance(child, nn.GELU):
                setattr(part, name, nn.GELU(approximate="tanh"))
    return model, lambda ids, targets: model(ids, targets)[1]


def transformers_gpt2(config: ModelConfig) -> tuple[nn.Module, LossOf]:
    """GPT2LMHeadModel without dropout, on PyTorch's fused attention."""
    try:
        from transformers import GPT2Config, GPT2LMHeadModel
    except ImportError:
        raise ConfigError("--peers transformers needs that package: pip install transformers.") from None
    theirs = GPT2Config(
        vocab_size=config.vocab_size, n_positions=config.context, n_embd=config.d_model, n_head=config.n_heads,
        n_layer=config.blocks.n_executions(), activation_function="gelu_new", resid_pdrop=0.0, embd_pdrop=0.0,
        attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    theirs._attn_implementation = "sdpa"
    model: Any = GPT2LMHeadModel(theirs)

    def loss(ids: Tensor, targets: Tensor) -> Tensor:
        logits = model(ids, use_cache=False).logits
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())

    return model, loss
