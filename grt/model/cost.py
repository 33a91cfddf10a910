"""What a model costs: parameters, FLOPs, KV-cache bytes and decode memory, in closed form.

Conventions, each under its own name:
- parameters: `total`, `without_positions` (nanoGPT's count), `without_embeddings`; a shared weight counts once. All
  of this, FLOPs and bytes too, is for the true vocabulary; `padding` names the parameters in rows of padding, apart.
- FLOPs per token of one forward pass: `paper` is eq:flops (T^2 in full, no head); `executed` is what this code runs
  (GRT's anchor halves once a pass), head apart; `train_mean` is executed + head at the mean drawn depth.
- KV bytes in bf16 (2 bytes), keys and values of one token: 4 d for each slot.
"""

from grt.config import Layout, ModelConfig
from grt.model.recurrent import RecurrentDepthModel


def parameters(model: RecurrentDepthModel) -> dict[str, int]:
    padding = model.config.n_padding * model.config.d_model
    total = sum(p.numel() for p in model.parameters()) - padding
    positions = model.embed.positions.weight.numel()
    return {
        "total": total,
        "without_positions": total - positions,
        "without_embeddings": total - positions - model.config.vocab_size * model.config.d_model,
        "padding": padding,
    }


def block_flops(d: int, tokens: int) -> int:
    """One block, per token of a sequence of `tokens`: projections and MLP 24 d^2, attention products 4 T d."""
    return 24 * d * d + 4 * tokens * d


def paper_flops(config: ModelConfig, tokens: int) -> int:
    """eq:flops, per token: block executions plus 10 d^2 per recurrence (also for methods that do without a gate)."""
    layout, d = config.blocks, config.d_model
    return layout.n_executions() * block_flops(d, tokens) + layout.R * 10 * d * d


def executed_flops(model: RecurrentDepthModel, steps: int, tokens: int) -> int:
    """Per token, without the head; equal to torch's FlopCounterMode."""
    blocks = model.config.blocks.n_executions(steps) * block_flops(model.config.d_model, tokens)
    return blocks + model.rule.flops(steps)


def head_flops(config: ModelConfig) -> int:
    return 2 * config.d_model * config.vocab_size


def forward_flops(model: RecurrentDepthModel, steps: float, tokens: int) -> float:
    """Executed FLOPs per token, head included, at a depth that may be a mean (the cost is affine in the depth)."""
    at_0, at_1 = (executed_flops(model, k, tokens) for k in (0, 1))
    return at_0 + steps * (at_1 - at_0) + head_flops(model.config)


def kv_slots(layout: Layout) -> dict[str, int]:
    """Slots of keys and values that the decode phase keeps for one token, by sharing strategy (subsec:kvcache)."""
    shared = layout.n_unique
    return {"full": layout.n_executions(), "first": shared, "last": shared, "mean": shared, "first:all": shared}


def kv_bytes_per_token(config: ModelConfig) -> dict[str, int]:
    """Keys and values of one token in bf16."""
    return {name: slots * 4 * config.d_model for name, slots in kv_slots(config.blocks).items()}


def decode_memory(model: RecurrentDepthModel, batch_sizes: tuple[int, ...] = (1, 32)) -> dict[str, dict[str, int]]:
    """Bytes of weights plus caches in bf16 with a full context (tab:decode_mem)."""
    weights = 2 * parameters(model)["total"]
    return {
        strategy: {str(B): weights + B * model.config.context * per_token for B in batch_sizes}
        for strategy, per_token in kv_bytes_per_token(model.config).items()
    }
