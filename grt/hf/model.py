"""GRTModel: the recurrent loop of grt/model as a Hugging Face model without its head (grt/hf/causal.py adds that). It
wraps one RecurrentDepthModel, whatever its method, and computes what that computes.

Shapes: B batch, T tokens, H heads, d width, k steps.
"""

import inspect
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.utils import logging

from grt.backbone.context import LoopContext
from grt.errors import ConfigError
from grt.hf.cache import GRTCache
from grt.hf.config import GRTConfig
from grt.methods import build_model
from grt.model.depth import Depth
from grt.model.loop import RecurrentDepthModel

logger = logging.get_logger(__name__)

# What transformers calls a cache: "cache" since 5.2x, "past_key_values" before.
_GENERATION_INPUTS = inspect.signature(vars(GenerationMixin)["prepare_inputs_for_generation"]).parameters
CACHE = "cache" if "cache" in _GENERATION_INPUTS else "past_key_values"


@dataclass
class GRTOutput(BaseModelOutputWithPast):
    """router_loss: what a method with routers adds to its loss in training."""

    router_loss: Tensor | None = None


class GRTPreTrainedModel(PreTrainedModel):
    config: GRTConfig
    config_class = GRTConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _supports_sdpa = True
    _no_split_modules = ["RecurrentDepthModel"]

    @property
    def loop(self) -> RecurrentDepthModel:
        raise NotImplementedError

    def get_input_embeddings(self) -> nn.Module:
        return self.loop.embed.tokens

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.loop.embed.tokens = value  # type: ignore[assignment]

    @torch.no_grad()
    def initialize_weights(self) -> None:
        """Parameters that no file gave begin as in a model built afresh: transformers knows neither biases of gates nor
        stacked factors. All others stay as they are."""
        super().initialize_weights()
        missing = {n: p for n, p in self.loop.named_parameters() if not getattr(p, "_is_hf_initialized", False)}
        if missing:
            fresh = dict(build_model(self.config.recurrent).named_parameters())
            for name, parameter in missing.items():
                parameter.copy_(fresh[name])


class GRTModel(GRTPreTrainedModel):
    """last_hidden_state is what a head reads, ln_f(coda(h_k)), (B, T, d)."""

    def __init__(self, config: GRTConfig) -> None:
        super().__init__(config)
        self.recurrent = build_model(config.recurrent)
        self.gradient_checkpointing = False
        if not self.recurrent.embed.tokens.weight.is_meta:  # it is initialised; else the file's tensors are to come
            for parameter in self.recurrent.parameters():
                parameter._is_hf_initialized = True  # type: ignore[attr-defined]
        self.post_init()

    @property
    def loop(self) -> RecurrentDepthModel:
        return self.recurrent

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        cache: GRTCache | None = None,
        past_key_values: GRTCache | None = None,
        use_cache: bool | None = None,
        num_steps: int | None = None,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        return_dict: bool | None = None,
        **others: Any,
    ) -> GRTOutput | tuple[Any, ...]:
        """ids (B, T); attention_mask (B, tokens in the cache + T): 0 where there is padding; num_steps: k (default: the
        config's). hidden_states: h_pre, h_0, ..., h_k, each (B, T, d); attentions: of each block execution, in order.
        Raises ConfigError (a ValueError) for what cannot work.
        """
        steps = self.config.num_steps if num_steps is None else num_steps
        self.loop.check_depth(steps, least=1)
        cache = self._cache(past_key_values if cache is None else cache, use_cache, steps)
        past = 0 if cache is None else cache.get_seq_length()
        ids, mask = checked(input_ids, attention_mask, past, others)
        states = bool(self.config.output_hidden_states if output_hidden_states is None else output_hidden_states)
        attentions = bool(self.config.output_attentions if output_attentions is None else output_attentions)
        size = 1 if cache is not None and cache.one_at_a_time else ids.shape[1]
        if attentions and size < ids.shape[1]:
            raise ConfigError(f"kv {self.config.kv} decodes these tokens one by one: leave output_attentions out.")
        outputs = []
        for end in range(size, ids.shape[1] + 1, size):
            real = None if mask is None else mask[:, : past + end]
            outputs.append(self._pass(ids[:, end - size : end], real, cache, Depth(steps), states, attentions))
        output = joined(outputs)
        return output.to_tuple() if return_dict is False else output

    def _cache(self, cache: GRTCache | None, use_cache: bool | None, steps: int) -> GRTCache | None:
        """The cache of this pass, a new one where one is wanted; none where gradients are, which no cache keeps."""
        if cache is not None and not isinstance(cache, GRTCache):
            raise ConfigError(
                f"the cache is a {type(cache).__name__}, but a recurrent model needs a slot for each step and block: "
                "give a GRTCache(model.config), or none."
            )
        if cache is not None and cache.exit is not None:
            raise ConfigError("the cache has an exit, which reads out by the head: use GRTForCausalLM with it.")
        if cache is not None or not (self.config.use_cache if use_cache is None else use_cache):
            return cache
        if torch.is_grad_enabled():
            if use_cache:
                logger.warning_once("`use_cache=True` keeps no gradients and is ignored: use torch.no_grad() with it.")
            return None
        return GRTCache(self.config, num_steps=steps)

    def _pass(
        self, ids: Tensor, real: Tensor | None, cache: GRTCache | None, depth: Depth, states: bool, attentions: bool
    ) -> GRTOutput:
        """One pass; real (B, tokens in the cache + T): False where there is padding."""
        ctx, h_s, weights = LoopContext(), [], []
        if states:
            ctx.taps = {**ctx.taps, "anchor": lambda h_pre, ctx: h_s.append(h_pre)}
        if attentions:
            ctx.taps = {**ctx.taps, "attention": lambda p, ctx: weights.append(p)}
        if self.gradient_checkpointing and self.training:
            ctx.around = self._checkpointed
        if cache is not None:
            ctx.cache = cache.begin(self.loop, ids, real)
        if real is not None:
            new = real[:, -ids.shape[1] :]
            ctx.real = None if new.all() else new
        h = None
        for h in self.loop.states(ids, ctx, depth):
            h_s += [h] if states else []
        assert h is not None
        return GRTOutput(
            last_hidden_state=self.loop.ln_f(self.loop.coda(h, ctx)),
            hidden_states=tuple(h_s) or None,
            attentions=tuple(weights) or None,
            router_loss=torch.stack(ctx.aux).sum() if ctx.aux else None,
            **{CACHE: cache},
        )

    def _checkpointed(self, block: nn.Module, x: Tensor, ctx: LoopContext) -> Tensor:
        """The block, computed again in the backward pass. Whatever of it has a gradient is an argument: reentrant
        checkpointing sees no other tensors."""
        names = list(ctx.low_rank or ())
        here = replace(ctx)

        def run(x: Tensor, *factors: Tensor) -> Tensor:
            pairs = zip(factors[::2], factors[1::2], strict=True)
            return block(x, replace(here, low_rank=dict(zip(names, pairs, strict=True)) if names else None))

        factors = [factor for name in names for factor in (ctx.low_rank or {})[name]]
        return self._gradient_checkpointing_func(run, x, *factors)


def joined(outputs: list[GRTOutput]) -> GRTOutput:
    """Of passes over one token each."""
    first = outputs[0]
    if len(outputs) > 1:
        first["last_hidden_state"] = torch.cat([output["last_hidden_state"] for output in outputs], 1)
        if first.hidden_states is not None:
            each = zip(*(output["hidden_states"] for output in outputs), strict=True)
            first["hidden_states"] = tuple(torch.cat(states, 1) for states in each)
    return first


def checked(ids: Tensor | None, mask: Tensor | None, past: int, others: dict[str, Any]) -> tuple[Tensor, Tensor | None]:
    """The ids, and the mask as booleans; ConfigError for inputs that mean nothing here, and would be missed."""
    given = sorted(name for name, value in others.items() if value is not None and value is not False)
    if given:
        raise ConfigError(f"{given[0]} is no input of a GRT model: leave it out, give input_ids and attention_mask.")
    if ids is None or ids.dim() != 2 or not ids.shape[1]:
        raise ConfigError("input_ids is missing or has no token: give ids of shape (rows, tokens).")
    wanted = (len(ids), past + ids.shape[1])
    if mask is not None and mask.shape != wanted:
        raise ConfigError(
            f"attention_mask has shape {tuple(mask.shape)}, but of {len(ids)} rows {past} tokens are in the cache and "
            f"{ids.shape[1]} are new: give one of shape {wanted}, with 0 for padding."
        )
    return ids, None if mask is None else mask.bool()
