"""A second stage of training: the language model stays as it is, what the method names learns."""

from grt.config import RunConfig
from grt.errors import ConfigError
from grt.model.loop import RecurrentDepthModel


def enter_stage(model: RecurrentDepthModel, config: RunConfig) -> None:
    """Freeze what train.stage does not train (ConfigError where there is no such stage, or nothing to begin from)."""
    if config.train.stage == 1:
        return
    if not model.rule.second_stage:
        method = config.model.method_name
        raise ConfigError(f"train.stage is 2, but {method} is trained in one stage: leave --train.stage out.")
    if config.model.blocks.R < 2:
        raise ConfigError(
            f"train.stage is 2, but model.layout {config.model.layout} has one recurrence, which leaves no choice: "
            "train a layout with more of them."
        )
    if not config.train.init_from:
        raise ConfigError("train.stage is 2, but train.init_from names no run: give that of stage 1, --init-from RUN.")
    for name, p in model.named_parameters():
        p.requires_grad_(any(f"{name}.".startswith(f"{part}.") for part in model.rule.second_stage))


def check_stage_source(config: RunConfig, source: RunConfig) -> None:
    """A second stage goes on with a run of the same method, whatever other weights a first stage may start from."""
    here, there = config.model.method_name, source.model.method_name
    if config.train.stage == 2 and here != there:
        raise ConfigError(
            f"train.stage is 2, but train.init_from {config.train.init_from} is a run of {there}: give one of {here}."
        )
