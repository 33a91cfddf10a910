"""Other people's GPT-2 as contestants, set to what grt's dense model computes.

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

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from grt.config import ModelConfig
from grt.errors import ConfigError

# Names of our weights -> those of transformers' GPT-2
TRANSFORMERS = {
    "embed.tokens.": "wte.", "embed.positions.": "wpe.", "prelude.": "h.", "ln1.": "ln_1.", "ln2.": "ln_2.",
    "attn.qkv.": "attn.c_attn.", "attn.out.": "attn.c_proj.", "mlp.up.": "mlp.c_fc.", "mlp.down.": "mlp.c_proj.",
}  # fmt: skip

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


def copy_weights(theirs: nn.Module, ours: nn.Module) -> None:
    """Give transformers' GPT-2 the weights of our dense model."""
    weights = {}
    for name, x in ours.state_dict().items():
        x = x.T if name.startswith("prelude.") and x.ndim == 2 else x  # theirs multiply from the other side
        for mine, their in TRANSFORMERS.items():
            name = name.replace(mine, their)
        weights[f"transformer.{name}"] = x
    missing, unexpected = theirs.load_state_dict(weights, strict=False)
    assert missing == ["lm_head.weight"] and not unexpected, "the head is tied to the embedding"


class Ticking:
    """A streamer: calls `tick` for each new token, when its value is there."""

    def __init__(self, tick: Callable[[], None]) -> None:
        self.tick, self.puts = tick, 0

    def put(self, value: Tensor) -> None:
        self.puts += 1
        if self.puts > 1:  # the first is the prompt
            self.tick()

    def end(self) -> None:
        """Nothing is left to show."""


def transformers_generate(ours: nn.Module, config: ModelConfig) -> Callable[[Tensor, int, Callable[[], None]], Tensor]:
    """generate(prompts (B, P), new, tick) -> (B, new): theirs with its cache, greedy and never early, on the weights,
    device and dtype of our dense model."""
    theirs: Any = transformers_gpt2(config)[0]
    copy_weights(theirs, ours)
    example = next(ours.parameters())
    theirs.to(device=example.device, dtype=example.dtype).eval()
    theirs.generation_config.eos_token_id = None

    def generate(prompts: Tensor, new: int, tick: Callable[[], None]) -> Tensor:
        everything = theirs.generate(
            prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=new, do_sample=False, use_cache=True,
            pad_token_id=0, streamer=Ticking(tick),
        )  # fmt: skip
        return everything[:, prompts.shape[1] :]

    return generate
