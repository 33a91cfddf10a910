"""grt in vLLM: `vllm serve DIR`, where DIR is what `grt export` wrote. vLLM finds `register` by an entry point of this
package (vllm.general_plugins), in each of its processes."""


def register() -> None:
    """Make GRTConfig known to transformers, and to vLLM the model and what it cannot serve."""
    from vllm import ModelRegistry
    from vllm.model_executor.models.config import MODELS_CONFIG_MAP

    import grt.hf  # noqa: F401 (registers)
    from grt.vllm.limits import Limits

    ModelRegistry.register_model("GRTForCausalLM", "grt.vllm.model:GRTForCausalLM")
    MODELS_CONFIG_MAP["GRTForCausalLM"] = Limits
