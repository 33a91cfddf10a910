"""vLLM's engine in this process, without a server, of a model with random weights: what `grt bench serve` times."""

import json
import os
import tempfile
from collections.abc import Sequence
from typing import Any

from grt.config import ModelConfig
from grt.hf.config import GRTConfig
from grt.schema import to_dict
from grt.vllm.memory import BLOCK

# Of one process and not two, so that who takes turns does not also compete; threads are torch's.
os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}


def ours(config: ModelConfig, kv: str = "full") -> dict[str, Any]:
    """config.json of a model of grt."""
    return GRTConfig(**to_dict(config), kv=kv, architectures=["GRTForCausalLM"]).to_dict()


def gpt2(config: ModelConfig) -> dict[str, Any]:
    """config.json of vLLM's own GPT-2, of the size of a dense model."""
    return {
        "model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "vocab_size": config.vocab_size,
        "n_embd": config.d_model, "n_head": config.n_heads, "n_layer": config.blocks.n_executions(),
        "n_positions": config.context,
    }  # fmt: skip


class Engine:
    """document: config.json of a model of the size of `config`; requests: how many of `length` tokens run at once."""

    def __init__(
        self, document: dict[str, Any], config: ModelConfig, *, requests: int, length: int, dtype: str, compiled: bool
    ) -> None:
        from vllm import LLM

        precision = {"bf16": "bfloat16", "fp32": "float32"}[dtype]
        tokens, kv_bytes = (requests + 1) * (length + BLOCK), config.blocks.n_executions() * 2 * config.d_model * 4
        with tempfile.TemporaryDirectory() as folder:
            with open(f"{folder}/config.json", "w", encoding="utf-8") as file:
                json.dump(document, file)
            self.llm = LLM(
                folder, load_format="dummy", skip_tokenizer_init=True, dtype=precision, enforce_eager=not compiled,
                max_model_len=length, max_num_seqs=requests, enable_prefix_caching=False,
                kv_cache_memory_bytes=tokens * kv_bytes, disable_log_stats=True,
            )  # fmt: skip

    def generate(self, prompts: Sequence[Sequence[int]], new: int) -> list[list[int]]:
        """`new` tokens after each prompt, all requests being there at once."""
        from vllm import SamplingParams

        params = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True, detokenize=False)
        asked = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        return [list(output.outputs[0].token_ids) for output in self.llm.generate(asked, params, use_tqdm=False)]
