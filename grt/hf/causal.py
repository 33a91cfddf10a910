"""GRTForCausalLM: GRTModel with the language model's head, its loss, and text from it (`generate`).

Shapes: B batch, T tokens, V vocabulary.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, GenerationMixin
from transformers.generation.configuration_utils import GenerationMode
from transformers.modeling_outputs import CausalLMOutputWithPast

from grt.errors import ConfigError
from grt.exits.policies import Exit, asked_exit
from grt.hf.cache import GRTCache
from grt.hf.config import GRTConfig
from grt.hf.early_exit import check_halting, halted
from grt.hf.model import CACHE, GRTModel, GRTPreTrainedModel, checked
from grt.model.loop import RecurrentDepthModel
from grt.schema import to_dict

OPTIONS = ("num_steps", "kv")  # fields of the config that `generate` may override
EXIT = ("exit", "threshold", "budget")  # of one generation alone
WITHOUT_PHASES = ("full", "first:all")  # strategies for which it makes no difference where the prompt ends
GROWING, STATIC = (None, "dynamic"), "static"


class GRTForCausalLM(GRTPreTrainedModel, GenerationMixin):
    """The head is tied to the embedding, unless config.tie_word_embeddings is off."""

    _tied_weights_keys = {"lm_head.weight": "model.recurrent.embed.tokens.weight"}
    accepts_loss_kwargs = True  # num_items_in_batch

    def __init__(self, config: GRTConfig) -> None:
        super().__init__(config)
        self.model = GRTModel(config)
        self.lm_head = nn.Linear(config.d_model, config.vocab_size, bias=False)
        self.exit: Exit | None = None  # of the generation in progress
        self.post_init()

    @classmethod
    def of(cls, model: RecurrentDepthModel, **fields: Any) -> "GRTForCausalLM":
        """With the weights of a grt model, in evaluation mode, on the CPU; fields: of GRTConfig."""
        ours = cls(GRTConfig(**to_dict(model.config), **fields))
        nn.Module.to(ours, model.embed.tokens.weight.dtype)
        ours.model.recurrent.load_state_dict(model.state_dict())
        return ours.eval()

    @property
    def loop(self) -> RecurrentDepthModel:
        return self.model.loop

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        cache: GRTCache | None = None,
        past_key_values: GRTCache | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        num_steps: int | None = None,
        logits_to_keep: int | Tensor = 0,
        num_items_in_batch: Tensor | int | None = None,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        return_dict: bool | None = None,
        **others: Any,
    ) -> CausalLMOutputWithPast | tuple[Any, ...]:
        """Logits (B, T, V), of the last logits_to_keep tokens (0: all) or of the places that it holds; the rest as for
        GRTModel. labels (B, T) are the ids themselves, -100 where there is nothing to learn: the loss is the mean
        cross-entropy of the next ones after the last step, over this batch or over num_items_in_batch; in training with
        what routers add. A method's other objectives (of all exits, of drawn depths) are what `grt train` minimises.
        """
        held: Any = past_key_values if cache is None else cache
        if isinstance(held, GRTCache) and held.exit is not None:
            wanted = {"labels": labels, "num_steps": num_steps, "output_hidden_states": output_hidden_states}
            check_halting(wanted | {"output_attentions": output_attentions})
            ids, mask = checked(input_ids, attention_mask, held.get_seq_length(), others)
            logits = halted(self.loop, ids, mask, held, last=isinstance(logits_to_keep, int) and logits_to_keep == 1)
            fields: dict[str, Any] = {CACHE: held}
            result = CausalLMOutputWithPast(logits=_kept(logits, logits_to_keep), **fields)
            return result.to_tuple() if return_dict is False else result
        output = self.model(
            input_ids, attention_mask, cache, past_key_values, use_cache, num_steps, output_hidden_states,
            output_attentions, **others,
        )  # fmt: skip
        logits = self.lm_head(_kept(output.last_hidden_state, logits_to_keep))
        loss = None
        if labels is not None:
            loss = self.loss_function(logits, labels, self.config.vocab_size, num_items_in_batch=num_items_in_batch)
            if output.router_loss is not None:
                n_items = (labels[:, 1:] != -100).sum()
                loss = loss + output.router_loss * (n_items / (num_items_in_batch or n_items))
        result = CausalLMOutputWithPast(
            loss=loss, logits=logits, hidden_states=output.hidden_states, attentions=output.attentions,
            **{CACHE: output.get(CACHE)},
        )  # fmt: skip
        return result.to_tuple() if return_dict is False else result

    # Generation

    @torch.no_grad()
    def generate(  # type: ignore[override]
        self, inputs: Tensor | None = None, generation_config: GenerationConfig | None = None, **kwargs: Any
    ) -> Any:
        """As transformers has it; also num_steps, passes through the core, and kv, how these share keys and values:
        each from here, from the generation_config, or from the model's config. And exit (`kl:0.01`, or `kl` with a
        threshold beside it): when each token leaves the core, at the latest after num_steps. budget, beside it or
        alone: no token goes deeper than leaves the mean depth of a row's new ones within this."""
        chosen = {name: kwargs.pop(name, None) for name in (*OPTIONS, *EXIT)}
        if not getattr(generation_config, "is_assistant", False):  # a draft is as deep as the config says at the time
            for config in (generation_config, self.generation_config):
                chosen = {name: getattr(config, name, None) if x is None else x for name, x in chosen.items()}
        plain: Any = super()
        with self._with(chosen):
            return plain.generate(inputs, generation_config, **kwargs)

    @contextmanager
    def _with(self, options: dict[str, Any]) -> Iterator[None]:
        """The config with these options (None: as it is); in the end as it was, whatever happens, also to num_steps
        that early-exit drafts have changed."""
        before = {name: getattr(self.config, name) for name in OPTIONS}
        try:
            for name in OPTIONS:
                if options[name] is not None:
                    setattr(self.config, name, options[name])
            if not isinstance(self.config.num_steps, int):
                raise ConfigError(f"num_steps is {self.config.num_steps!r}: give a whole number.")
            self.loop.check_depth(self.config.num_steps, least=1)
            self.exit = self._asked_exit(*(options[name] for name in EXIT))
            yield
        finally:
            self.exit = None
            for name, value in before.items():
                setattr(self.config, name, value)

    def _asked_exit(self, text: str | None, threshold: float | None, budget: float | None) -> Exit | None:
        if not isinstance(text, str | None):
            raise ConfigError(f"exit is {text!r}: give a policy as text, as in 'kl:0.01'.")
        for name, value in (("threshold", threshold), ("budget", budget)):
            if not isinstance(value, int | float | None):
                raise ConfigError(f"{name} is {value!r}: give a number.")
        exit = asked_exit(self.loop, text, threshold, budget, self.config.num_steps)
        if exit is not None and not self.config.tie_word_embeddings:
            raise ConfigError("exit reads out by the embedding, and this model has a head of its own: leave exit out.")
        return exit

    def _prepare_cache_for_generation(  # type: ignore[override]
        self,
        generation_config: GenerationConfig,
        model_kwargs: dict[str, Any],
        generation_mode: GenerationMode,
        batch_size: int,
        max_cache_length: int,
    ) -> None:
        how, given = generation_config.cache_implementation, model_kwargs.get(CACHE)
        if given is not None and how is not None:
            raise ConfigError(f"cache_implementation is {how!r} although there is a cache: give one of the two.")
        kv = getattr(given, "kv", self.config.kv)
        if generation_mode == GenerationMode.ASSISTED_GENERATION and kv not in WITHOUT_PHASES:
            raise ConfigError(
                f"kv is {kv!r}, whose prompt has to end before drafts: use {' or '.join(WITHOUT_PHASES)}."
            )
        if self.exit is not None and generation_mode == GenerationMode.ASSISTED_GENERATION:
            raise ConfigError(
                "a draft is completed to the full depth, never to one of its own: leave exit or drafts out."
            )
        if self.exit is not None and generation_config.use_cache is False:
            raise ConfigError("with exit, tokens go as deep as they need, through a cache: leave use_cache=False out.")
        if getattr(given, "exit", self.exit) != self.exit:
            raise ConfigError("the cache was made for another exit: give the same one, or another cache.")
        if given is not None or generation_config.use_cache is False:
            return
        if how not in (*GROWING, STATIC):
            raise ConfigError(f"cache_implementation is {how!r}: a recurrent model has dynamic and static caches.")
        room = max(max_cache_length, generation_config.max_cache_len or 0) if how == STATIC else None
        model_kwargs[CACHE] = GRTCache(self.config, room, exit=self.exit)

    def _prefill(  # type: ignore[override]
        self, input_ids: Tensor, generation_config: GenerationConfig, model_kwargs: dict[str, Any], **kwargs: Any
    ) -> Any:
        """The whole prompt, in however many pieces."""
        cache, plain = model_kwargs.get(CACHE), super()
        if isinstance(cache, GRTCache):
            mask = model_kwargs.get("attention_mask")  # None where nothing is padded
            cache.open_prompt(input_ids, (input_ids if mask is None else mask).shape[1])
        output = plain._prefill(input_ids, generation_config, model_kwargs, **kwargs)  # type: ignore[attr-defined]
        if isinstance(cache, GRTCache):
            cache.commit()
        return output


def _kept(x: Tensor, kept: int | Tensor) -> Tensor:
    """Of x (B, T, ...) the last `kept` places (0: all), or those that it holds."""
    return x[:, slice(-kept, None) if isinstance(kept, int) else kept]
