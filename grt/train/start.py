"""Where a run's first weights come from when train.init_from names another run: the weights alone, nothing else."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from grt.config import RunConfig
from grt.errors import ConfigError
from grt.methods import build_model
from grt.model.convert import convert
from grt.model.loop import RecurrentDepthModel
from grt.runs.checkpoint import find_checkpoint, read_manifest, read_tensors, weights_file
from grt.runs.paths import same_tokenizer
from grt.train.stage import check_stage_source

# What the function of the weights depends on, beside what the rule names. The gate's start value and the noise may
# differ, they act in training only; data, optimizer, schedule and seed are the new run's own.
BACKBONE = ("d_model", "n_heads", "context", "vocab_size")


def load_initial(model: RecurrentDepthModel, config: RunConfig) -> dict[str, Any]:
    """Fill `model` from the run, checkpoint or model folder train.init_from; returns what env.json keeps of it.

    Of a run it takes the newest sound checkpoint. A recurrent model may also begin as a dense one of as many layers as
    it executes blocks, tied as train.init_tie says. Raises ConfigError where the source is of another model or
    tokenizer, and CheckpointError where it is missing or damaged.
    """
    folder, theirs = find_checkpoint(Path(config.train.init_from))
    ties = theirs.model.blocks.is_dense and not config.model.blocks.is_dense
    check_stage_source(config, theirs)
    check_source(theirs, config, ties, model.rule.weights_depend_on)
    expected = model.state_dict()
    if ties:
        with torch.device("meta"):
            expected = build_model(theirs.model).state_dict()
    path = weights_file(folder)
    tensors = {name: tensor.float() for name, tensor in read_tensors(path, expected).items()}
    manifest = read_manifest(folder)
    facts = {"path": str(folder), "step": manifest["step"], "sha256": manifest["files"][path.name]["sha256"]}
    if ties:
        return facts | {"tied": convert(model, tensors, theirs.model.blocks, config.train.init_tie)}
    model.load_state_dict(tensors)
    return facts


def check_source(theirs: RunConfig, config: RunConfig, ties: bool, of_rule: Sequence[str]) -> None:
    """ConfigError where weights of `theirs` cannot be this run's; a dense source need only have its width and depth."""
    source, ours = config.train.init_from, config.model.blocks
    n_layers, of_dense = ours.n_executions(), theirs.model.blocks.n_unique
    if ties and of_dense != n_layers:
        raise ConfigError(
            f"train.init_from {source} is dense with {of_dense} layers, but model.layout {ours} executes {n_layers} "
            f"blocks: start from a dense model of {n_layers} layers ({n_layers}L)."
        )
    pairs: list[tuple[str, Any, Any, str]] = [
        (f"model.{name}".removesuffix("_name"), theirs.model, config.model, name)
        for name in (BACKBONE if ties else ("method_name", "layout", *BACKBONE, *of_rule))
    ]
    if not same_tokenizer(theirs.data.tokenizer, config.data.tokenizer):
        pairs.append(("data.tokenizer", theirs.data, config.data, "tokenizer"))
    for label, there, here, name in pairs:
        if getattr(there, name) != getattr(here, name):
            structural = name in ("method_name", "layout")
            fitting = structural and not (ours.is_dense and theirs.model.blocks.is_dense)
            other = f"a dense model of {n_layers} layers ({n_layers}L)" if fitting else "other weights"
            remedy = f"set --{label.replace('_', '-')} to its value, or start from {other}"
            if fitting and ours.is_dense:  # its method is no setting
                remedy = f"start from {other}"
            what = f"{label} {getattr(there, name)}, this run {getattr(here, name)}"
            raise ConfigError(f"train.init_from {source} has {what}: {remedy}.")
