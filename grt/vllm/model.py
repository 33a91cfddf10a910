"""The recurrent loop of grt/model in vLLM. It is the same RecurrentDepthModel, rule and blocks included: what vLLM has
of its own takes the place of the blocks' linears and attention and of the embedding. The tokens that vLLM puts
together, of whatever requests, run through the loop as one row (T, d), at positions that need not follow one another.

Keys and values are kept by vLLM, for each of its Attention objects. So each block has one for every step that it takes.

Shapes: T tokens of a batch, d width, V vocabulary.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn
from vllm.compilation.decorators import support_torch_compile
from vllm.config import VllmConfig
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.linear import ColumnParallelLinear, QKVParallelLinear, RowParallelLinear
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.models.utils import AutoWeightsLoader
from vllm.sequence import IntermediateTensors

from grt.backbone.block import Block, Stack, project
from grt.backbone.context import LoopContext
from grt.backbone.head import largest_again
from grt.hf.config import GRTConfig
from grt.model.depth import Depth
from grt.model.rule import last_of
from grt.vllm.limits import without_weights


class PagedAttention(nn.Module):
    """A block's attention. slots: where in a pass the block is executed, once or in every step. shared: every step
    reads the keys and values of the first (first:all)."""

    def __init__(self, vllm_config: VllmConfig, slots: Sequence[int], shared: bool) -> None:
        super().__init__()
        config: GRTConfig = vllm_config.model_config.hf_config
        d, size = config.d_model, config.d_model // config.n_heads
        self.qkv = QKVParallelLinear(d, size, config.n_heads, return_bias=False)
        self.out = RowParallelLinear(d, d, return_bias=False)
        names = [f"layers.{slot}.attn" for slot in slots]  # vLLM wants one number in a name, each its own
        self.executions = nn.ModuleList(
            Attention(
                self.qkv.num_heads, size, size**-0.5, cache_config=vllm_config.cache_config, prefix=name,
                kv_sharing_target_layer_name=names[0] if shared and name != names[0] else None,
            )
            for name in names
        )  # fmt: skip

    def forward(self, x: Tensor, ctx: LoopContext) -> Tensor:  # (T, d) -> (T, d)
        q, k, v = project("attn.qkv", self.qkv, x, ctx).chunk(3, dim=-1)
        y = self.executions[ctx.step if ctx.section == "core" else 0](q, k, v)
        return project("attn.out", self.out, y, ctx)


@support_torch_compile
class GRTModel(nn.Module):
    """The loop without the head."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        config: GRTConfig = vllm_config.model_config.hf_config
        layout, steps = config.blocks, config.num_steps
        self.recurrent = without_weights(config).eval().to_empty(device=torch.get_default_device())
        self.depth = Depth(steps)
        self.recurrent.embed.tokens = VocabParallelEmbedding(config.vocab_size, config.d_model)
        coda = layout.p + steps * layout.n
        self._adapt(self.recurrent.prelude, vllm_config, [[i] for i in range(layout.p)])
        self._adapt(self.recurrent.core, vllm_config, [range(layout.p + i, coda, layout.n) for i in range(layout.n)])
        self._adapt(self.recurrent.coda, vllm_config, [[coda + i] for i in range(layout.c)])
        # Once before the compiler comes: a rule may keep for all passes what the first one makes (a table of starts).
        nowhere = LoopContext(positions=torch.zeros(1, dtype=torch.long))
        self.recurrent.rule.start(torch.zeros(1, config.d_model), nowhere)

    def _adapt(self, stack: Stack, vllm_config: VllmConfig, slots: Sequence[Sequence[int]]) -> None:
        """Give a section's blocks vLLM's linears and attention."""
        config: GRTConfig = vllm_config.model_config.hf_config
        for block, its_slots in zip(stack, slots, strict=True):
            assert isinstance(block, Block)
            block.attn = PagedAttention(vllm_config, its_slots, config.kv == "first:all")  # type: ignore[assignment]
            block.mlp.up = ColumnParallelLinear(config.d_model, 4 * config.d_model, return_bias=False)
            block.mlp.down = RowParallelLinear(4 * config.d_model, config.d_model, return_bias=False)

    def forward(
        self,
        input_ids: Tensor | None,
        positions: Tensor,
        intermediate_tensors: IntermediateTensors | None = None,
        inputs_embeds: Tensor | None = None,
    ) -> Tensor:
        """ids and positions (T,) -> what the head reads, (T, d). The other two are for models that take part of a pass,
        or no ids."""
        assert input_ids is not None
        ctx = LoopContext(positions=positions)
        h = last_of(self.recurrent.states(input_ids, ctx, self.depth))
        return self.recurrent.ln_f(self.recurrent.coda(h, ctx))


class GRTForCausalLM(nn.Module):
    """GRTModel with the language model's head."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        config: GRTConfig = vllm_config.model_config.hf_config
        self.model = GRTModel(vllm_config=vllm_config)
        self.lm_head = ParallelLMHead(config.vocab_size, config.d_model)
        if config.tie_word_embeddings:
            self.lm_head = self.lm_head.tie_weights(self.model.recurrent.embed.tokens)
        self.logits_processor = LogitsProcessor(config.vocab_size)

    def embed_input_ids(self, input_ids: Tensor) -> Tensor:
        return self.model.recurrent.embed.tokens(input_ids)

    def forward(
        self,
        input_ids: Tensor | None,
        positions: Tensor,
        intermediate_tensors: IntermediateTensors | None = None,
        inputs_embeds: Tensor | None = None,
    ) -> Tensor:
        return self.model(input_ids, positions, intermediate_tensors, inputs_embeds)

    def compute_logits(self, hidden_states: Tensor) -> Tensor | None:  # (T, d) -> (T, V)
        logits, weight = self.logits_processor(self.lm_head, hidden_states), self.lm_head.weight
        if logits is None or logits.dtype == torch.float32 or self.lm_head.tp_size > 1:  # a part of it
            return logits
        return largest_again(logits, hidden_states, weight)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """As grt/hf/export.py wrote them, under the same names."""
        dtype = self.lm_head.weight.dtype
        return AutoWeightsLoader(self).load_weights((name, x.to(dtype)) for name, x in weights)
