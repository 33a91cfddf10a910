"""How much memory vLLM takes for keys and values on a CPU, where nobody says. By itself it wants 92 % of the machine,
and ends where something else has some of that.
"""

import psutil
from vllm.config import CacheConfig, VllmConfig
from vllm.platforms import current_platform

from grt.hf.config import GRTConfig

BLOCK = 128  # tokens; vLLM gives a request whole blocks


def slots(config: GRTConfig) -> int:
    """Keys and values that each token keeps."""
    return config.blocks.n_unique if config.kv == "first:all" else config.num_hidden_layers


def modest_cache(vllm_config: VllmConfig) -> None:
    """Room for as many requests as run at once, each as long as the context, but at most half of what is free."""
    cache, config = vllm_config.cache_config, vllm_config.model_config.hf_config
    told = cache.kv_cache_memory_bytes is not None or cache.gpu_memory_utilization != CacheConfig.gpu_memory_utilization
    if told or not current_platform.is_cpu():
        return
    per_token = slots(config) * 2 * config.d_model * vllm_config.model_config.dtype.itemsize
    tokens = vllm_config.scheduler_config.max_num_seqs * (vllm_config.model_config.max_model_len + BLOCK)
    cache.kv_cache_memory_bytes = min(tokens * per_token, psutil.virtual_memory().available // 2)
