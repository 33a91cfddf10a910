"""grt in Hugging Face's ecosystem. `import grt.hf` registers the classes, so that the Auto classes load what
`grt export` writes without running the code beside it."""

from grt.errors import ConfigError

try:
    from transformers import AutoConfig, AutoModel, AutoModelForCausalLM
except ImportError:
    raise ConfigError("grt.hf needs transformers: pip install 'gated-recurrent-transformer[hf]'.") from None

from grt.hf.cache import GRTCache
from grt.hf.causal import GRTForCausalLM
from grt.hf.config import GRTConfig
from grt.hf.model import GRTModel

__all__ = ["GRTCache", "GRTConfig", "GRTForCausalLM", "GRTModel"]

AutoConfig.register(GRTConfig.model_type, GRTConfig)
AutoModel.register(GRTConfig, GRTModel)
AutoModelForCausalLM.register(GRTConfig, GRTForCausalLM)
