"""Where a run's first weights come from when train.init_from names another run: the weights alone, nothing else."""

from pathlib import Path
from typing import Any

from grt.config import ConfigError, RunConfig
from grt.model.recurrent import RecurrentDepthModel
from grt.train.checkpoint import find_checkpoint, read_manifest, read_tensors, weights_file
from grt.train.stage import check_source

# What the function of the weights depends on. The gate's start value and the noise may differ, they act in training
# only; data, optimizer, schedule and seed are the new run's own.
SHARED = (
    "method_name", "layout", "d_model", "n_heads", "context", "vocab_size", "gate_temperature", "start_std",
    "lora_rank", "lora_scale", "lora_targets", "router", "router_scale", "loop_carry",
)  # fmt: skip


def load_initial(model: RecurrentDepthModel, config: RunConfig) -> dict[str, Any]:
    """Fill `model` from the run, checkpoint or model folder train.init_from; returns what env.json keeps of it.

    Of a run it takes the newest sound checkpoint. Raises ConfigError where the source is of another model or
    tokenizer, and CheckpointError where it is missing or damaged.
    """
    source = Path(config.train.init_from)
    folder, theirs = find_checkpoint(source)
    check_source(config, theirs)
    pairs: list[tuple[str, Any, Any, str]] = [
        (f"model.{name}".removesuffix("_name"), theirs.model, config.model, name) for name in SHARED
    ]
    pairs.append(("data.tokenizer", theirs.data, config.data, "tokenizer"))
    for label, there, here, name in pairs:
        if getattr(there, name) != getattr(here, name):
            raise ConfigError(
                f"train.init_from {source} has {label} {getattr(there, name)}, this run {getattr(here, name)}: "
                f"set --{label.replace('_', '-')} to its value, or start from other weights."
            )
    path = weights_file(folder)
    tensors = read_tensors(path, model.state_dict())
    model.load_state_dict({name: tensor.float() for name, tensor in tensors.items()})
    manifest = read_manifest(folder)
    return {"path": str(folder), "step": manifest["step"], "sha256": manifest["files"][path.name]["sha256"]}
