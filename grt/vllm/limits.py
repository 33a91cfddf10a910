"""What vLLM cannot serve of ours, said before a weight is loaded."""

import torch
from vllm.config import ModelConfig, VllmConfig
from vllm.model_executor.models.config import VerifyAndUpdateConfig

from grt.errors import ConfigError
from grt.hf.config import GRTConfig
from grt.methods import build_model
from grt.model.loop import RecurrentDepthModel
from grt.vllm.memory import modest_cache

SHARING = ("full", "first:all")
OVERRIDES = ("num_steps", "num_hidden_layers", "kv")  # what may differ from the exported config


def without_weights(config: GRTConfig) -> RecurrentDepthModel:
    """The model that `config` describes, on the meta device."""
    with torch.device("meta"):
        return build_model(config.recurrent)


class Limits(VerifyAndUpdateConfig):
    """vLLM calls these with what it has read; each raises a ConfigError (a ValueError) for what cannot be."""

    @staticmethod
    def verify_and_update_model_config(model_config: ModelConfig) -> None:
        config, given = model_config.hf_config, model_config.hf_overrides
        given = given if isinstance(given, dict) else {}  # a function's result is in config
        method, steps = config.recurrent.method_name, config.num_steps
        model = without_weights(config)
        if not model.rule.halts:
            raise ConfigError(
                f"{method} has a router, which decides how deep each token goes, and vLLM takes all tokens of a batch "
                "equally deep: use grt generate, or serve another method."
            )
        if "exit" in given:
            raise ConfigError(
                "exit lets tokens leave one by one, and vLLM takes all tokens of a batch equally deep: give num_steps."
            )
        if others := [name for name in given if name not in OVERRIDES]:
            raise ConfigError(f"hf-overrides has {others[0]!r}: give num_steps or kv, the rest is the trained model's.")
        if config.kv not in SHARING:
            raise ConfigError(f"kv is {config.kv!r}, and vLLM can share keys only as first:all: use that, or full.")
        if type(steps) is not int:
            raise ConfigError(f"num_steps is {steps!r}: give a whole number.")
        model.check_depth(steps, least=1)

    @staticmethod
    def verify_and_update_config(vllm_config: VllmConfig) -> None:
        config, n_ranks = vllm_config.model_config.hf_config, vllm_config.parallel_config.tensor_parallel_size
        if n_ranks > 1 and without_weights(config).rule.adds_low_rank:
            raise ConfigError(
                f"{config.recurrent.method_name} adds low-rank factors to linears, which are not split over ranks: "
                "leave tensor-parallel-size out."
            )
        if vllm_config.parallel_config.pipeline_parallel_size > 1:
            raise ConfigError("pipeline-parallel-size is above 1, and a loop is not cut into stages: leave it out.")
        if vllm_config.quant_config is not None:
            raise ConfigError("quantization is not supported for grt's models: leave it out.")
        modest_cache(vllm_config)
