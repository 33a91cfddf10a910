"""GRTConfig: a ModelConfig in Hugging Face's form, field by field, and how the model is to be run."""

from dataclasses import fields
from typing import Any

from transformers import PreTrainedConfig

from grt.config import Layout, ModelConfig
from grt.errors import ConfigError

# The vocabulary is padded for training only: what is saved has the true rows.
FIELDS = {field.name: field.default for field in fields(ModelConfig) if field.name != "vocab_multiple"}


class GRTConfig(PreTrainedConfig):
    """All fields of grt.config.ModelConfig, and

    num_steps: passes through the core (0: R). kv: how the core's steps share keys and values (full, first, last,
    mean, mod:K, first:all). Both can also be given to `generate`, or stand in a generation_config.

    num_hidden_layers is what a pass executes, p + n num_steps + c; to set it is to set num_steps. Raises ConfigError (a
    ValueError) for fields that no model can have.
    """

    model_type = "grt"
    attribute_map = {"hidden_size": "d_model", "num_attention_heads": "n_heads", "max_position_embeddings": "context"}
    keys_to_ignore_at_inference = ["past_key_values", "cache"]

    num_steps: int = 0
    kv: str = "full"
    use_cache: bool = True
    tie_word_embeddings: bool = True
    initializer_range: float = 0.02

    def __post_init__(self, **kwargs: Any) -> None:
        for name, default in FIELDS.items():
            setattr(self, name, kwargs.pop(name, default))
        kwargs.pop("vocab_multiple", None)
        super().__post_init__(**kwargs)
        self.layout = self.recurrent.layout
        self.num_steps = self.num_steps or self.blocks.R

    @property
    def recurrent(self) -> ModelConfig:
        """The model's own configuration (ConfigError where it cannot be one)."""
        return ModelConfig(**{name: getattr(self, name) for name in FIELDS})

    @property
    def blocks(self) -> Layout:
        return Layout.parse(getattr(self, "layout"))  # noqa: B009 (a field of FIELDS)

    @property
    def num_hidden_layers(self) -> int:
        """Block executions of a pass."""
        return self.blocks.n_executions(self.num_steps)

    @num_hidden_layers.setter
    def num_hidden_layers(self, executions: int) -> None:
        blocks = self.blocks
        steps, rest = divmod(executions - blocks.p - blocks.c, max(blocks.n, 1))
        if rest or steps < min(blocks.R, 1) or (blocks.is_dense and steps):
            k = f" + {blocks.n} k, k at least 1" if blocks.n else ""
            raise ConfigError(
                f"num_hidden_layers is {executions}, but {blocks} executes {blocks.p + blocks.c}{k}: set it to that."
            )
        self.num_steps = steps
