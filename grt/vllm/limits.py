"""What vLLM cannot serve of ours, said before anything is loaded."""

from vllm.config import ModelConfig, VllmConfig
from vllm.model_executor.models.config import VerifyAndUpdateConfig

from grt.config import ConfigError
from grt.hf.config import GRTConfig
from grt.methods import find_method
from grt.model.rule import UpdateRule

SHARING = ("full", "first:all")


def rule_of(config: GRTConfig) -> type[UpdateRule]:
    return UpdateRule if config.blocks.is_dense else find_method(config.recurrent).rule


class Limits(VerifyAndUpdateConfig):
    """vLLM calls these with what it has read; each raises a ConfigError (a ValueError) for what cannot be."""

    @staticmethod
    def verify_and_update_model_config(model_config: ModelConfig) -> None:
        config, method = model_config.hf_config, model_config.hf_config.recurrent.method_name
        if rule_of(config).routing is not None:
            raise ConfigError(
                f"{method} has a router, which decides how deep each token goes, and vLLM takes all tokens of a batch "
                "equally deep: use grt generate, or serve another method."
            )
        if getattr(config, "exit", None) is not None:
            raise ConfigError(
                "exit lets tokens leave one by one, and vLLM takes all tokens of a batch equally deep: give num_steps."
            )
        if config.kv not in SHARING:
            raise ConfigError(f"kv is {config.kv!r}, and vLLM can share keys only as first:all: use that, or full.")

    @staticmethod
    def verify_and_update_config(vllm_config: VllmConfig) -> None:
        config, n_ranks = vllm_config.model_config.hf_config, vllm_config.parallel_config.tensor_parallel_size
        if n_ranks > 1 and rule_of(config).adds_low_rank:
            raise ConfigError(
                f"{config.recurrent.method_name} adds low-rank factors to linears, which are not split over ranks: "
                "leave tensor-parallel-size out."
            )
        if vllm_config.quant_config is not None:
            raise ConfigError("quantization is not supported for grt's models: leave it out.")
