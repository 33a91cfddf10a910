"""The registry: one line a method."""

from collections.abc import Callable
from typing import NamedTuple

from grt.config import ModelConfig
from grt.errors import ConfigError, did_you_mean
from grt.methods.grt import GRT, Reinjection
from grt.methods.ladder import StateNoise
from grt.methods.mor import ExpertChoice, TokenChoice
from grt.methods.ouro import Ouro
from grt.methods.poisson import Huginn, Poisson, heavy_tail
from grt.methods.rrt import RRT
from grt.model.depth import DepthSampler, fixed, uniform
from grt.model.loop import RecurrentDepthModel
from grt.model.rule import UpdateRule


class Method(NamedTuple):
    rule: type[UpdateRule]
    sampler: Callable[[ModelConfig], DepthSampler]


def any_depth(config: ModelConfig) -> DepthSampler:
    """r ~ U{1..R} (subsec:depth_sampling)."""
    return uniform(config.blocks.R)


def full_depth(config: ModelConfig) -> DepthSampler:
    return fixed(config.blocks.R)


METHODS = {
    "ladder": Method(UpdateRule, any_depth),  # plain weight tying, the base of the paper's ablation ladder
    "ladder-noise": Method(StateNoise, any_depth),
    "ladder-inject": Method(Reinjection, any_depth),
    "grt": Method(GRT, any_depth),
    "poisson": Method(Poisson, heavy_tail),
    "huginn": Method(Huginn, heavy_tail),
    "rrt": Method(RRT, full_depth),
    "mor": Method(ExpertChoice, full_depth),
    "mor-token": Method(TokenChoice, full_depth),
    "ouro": Method(Ouro, full_depth),
}


def find_method(config: ModelConfig) -> Method:
    """The method that `config` names (ConfigError names the nearest where there is none)."""
    if config.method not in METHODS:
        known = f"this version has {', '.join(METHODS)}."
        raise ConfigError(f"model.method is {config.method!r}: {did_you_mean(config.method, METHODS, known)}")
    return METHODS[config.method]


def build_model(config: ModelConfig) -> RecurrentDepthModel:
    """A freshly initialised model (it draws from torch's global generator: seed that first)."""
    rule = UpdateRule if config.blocks.is_dense else find_method(config).rule
    return RecurrentDepthModel(config, rule(config))


def depth_sampler(config: ModelConfig, how: str = "method") -> DepthSampler:
    """Draws training depths: as the method does, or always R ("fixed")."""
    if config.blocks.is_dense:
        return fixed(0)
    sampler = find_method(config).sampler(config)
    return fixed(config.blocks.R, sampler.grad_steps) if how == "fixed" else sampler
