"""What a model costs: parameters, FLOPs, KV-cache bytes and decode memory, in closed form.

Conventions, each under its own name:
- parameters: `total`, `without_positions` (nanoGPT's count), `without_embeddings`; a shared weight counts once. All
  of this, FLOPs and bytes too, is for the true vocabulary; `padding` names the parameters in rows of padding, apart.
- FLOPs per token of one forward pass: `paper` is eq:flops (T^2 in full, no head); `executed` is what this code runs
  (GRT's anchor halves once a pass), head apart; `train_mean` is the mean over the drawn depths of what a pass of
  training runs, with every read-out that the loss asks for; `training` adds the backward pass, twice the forward one
  except for the steps that truncated back-propagation leaves out.
- KV bytes in bf16 (2 bytes), keys and values of one token: 4 d for each slot.
- bytes read to decode a token: a matrix counts as often as it is read, whatever a processor's caches keep of a shared
  one, and so do keys and values. Vectors (biases, norms, the embedding's rows) and what is written are left out.
"""

import math
from collections.abc import Callable, Mapping, Sequence

from grt.backbone.block import block_flops
from grt.cache.sharing import parse_strategy
from grt.config import ModelConfig
from grt.model.depth import Depth, DepthSampler
from grt.model.loop import RecurrentDepthModel


def parameters(model: RecurrentDepthModel) -> dict[str, int]:
    padding = model.config.n_padding * model.config.d_model
    # By storage, so that a weight which two modules share counts once even where each has a Parameter of its own.
    own = {(p.untyped_storage()._cdata, p.storage_offset()): p.numel() for p in model.parameters()}
    total = sum(own.values()) - padding
    positions = model.embed.positions.weight.numel()
    return {
        "total": total,
        "without_positions": total - positions,
        "without_embeddings": total - positions - model.config.vocab_size * model.config.d_model,
        "padding": padding,
    }


def paper_flops(config: ModelConfig, tokens: int) -> int:
    """eq:flops, per token: block executions plus 10 d^2 per recurrence (also for methods that do without a gate)."""
    layout, d = config.blocks, config.d_model
    return layout.n_executions() * block_flops(d, tokens) + layout.R * 10 * d * d


def per_token(flops: int, tokens: int) -> float:
    """An int wherever it is one: routed tokens make a sequence's FLOPs that its length does not divide."""
    return flops // tokens if flops % tokens == 0 else flops / tokens


def executed_flops(model: RecurrentDepthModel, steps: int, tokens: int) -> float:
    """Per token of a sequence of `tokens`, without the head; equal to torch's FlopCounterMode."""
    layout, one = model.config.blocks, block_flops(model.config.d_model, tokens)
    return (layout.p + layout.c) * one + per_token(model.rule.flops(steps, tokens), tokens)


def head_flops(config: ModelConfig) -> int:
    return 2 * config.d_model * config.vocab_size


def halting_flops(model: RecurrentDepthModel, shares: Mapping[int, float], tokens: int, reads_out: bool) -> float:
    """Per token where a share of the tokens takes each number of steps, head included; reads_out: coda and head after
    every step. Scores are no matrix products, and left out. As decoding runs it: a text read at once saves nothing."""
    readout = model.config.blocks.c * block_flops(model.config.d_model, tokens) + head_flops(model.config)
    one = {k: executed_flops(model, k, tokens) + head_flops(model.config) for k in shares}
    return math.fsum(share * (one[k] + readout * (k - 1) * reads_out) for k, share in shares.items())


def training_forward_flops(model: RecurrentDepthModel, steps: int, tokens: int) -> float:
    """Forward FLOPs per token of a pass of training at depth `steps`, its read-outs (coda and head) included."""
    layout, one = model.config.blocks, block_flops(model.config.d_model, tokens)
    readouts = model.rule.readout_flops(steps, layout.c * one + head_flops(model.config))
    return layout.p * one + per_token(model.rule.flops(steps, tokens), tokens) + readouts


def training_flops(model: RecurrentDepthModel, depth: Depth, tokens: int, stage: int = 1) -> float:
    """Forward and backward FLOPs per token at `depth`: the backward pass costs two forward ones of what it covers,
    which in a second stage, of a gate alone, is next to nothing."""
    if stage == 2:
        return training_forward_flops(model, depth.steps, tokens)
    learning = depth.steps if depth.grad_steps is None else min(depth.steps, depth.grad_steps)
    skipped = model.rule.flops(depth.steps, tokens) - model.rule.flops(learning, tokens)
    return 3 * training_forward_flops(model, depth.steps, tokens) - 2 * per_token(skipped, tokens)


def mean_over_depths(sampler: DepthSampler, cost: Callable[[Depth], float]) -> float:
    """Expected cost under the depths that `sampler` draws."""
    return math.fsum(p * cost(Depth(r, sampler.grad_steps)) for r, p in sampler.probabilities.items())


def kv_slots(model: RecurrentDepthModel, strategy: str) -> float:
    """Slots of keys and values that a token keeps under `strategy`; rules do not list mod:K, which keeps K steps."""
    name, K = parse_strategy(strategy)
    layout = model.config.blocks
    return layout.n_executions(min(K, layout.R)) if name == "mod" else model.rule.kv_slots()[name]


def kv_bytes_per_token(model: RecurrentDepthModel, strategies: Sequence[str] = ()) -> dict[str, int]:
    """Keys and values of one token in bf16; strategies: default all that the rule lists."""
    names = strategies or model.rule.kv_slots()
    return {name: round(kv_slots(model, name) * 4 * model.config.d_model) for name in names}


def decode_memory(
    model: RecurrentDepthModel, batch_sizes: tuple[int, ...] = (1, 32), strategies: Sequence[str] = ()
) -> dict[str, dict[str, int]]:
    """Bytes of weights plus caches in bf16 with a full context (tab:decode_mem); strategies: as above."""
    weights = 2 * parameters(model)["total"]
    return {
        strategy: {str(B): weights + B * model.config.context * per_token for B in batch_sizes}
        for strategy, per_token in kv_bytes_per_token(model, strategies).items()
    }


def decode_bytes(
    model: RecurrentDepthModel, steps: int, tokens: float, batch: int = 1, itemsize: int = 2, kv_itemsize: int = 0
) -> int:
    """Bytes read to decode one token of each of `batch` rows at depth `steps`, where it sees `tokens` keys. itemsize:
    of a weight; kv_itemsize: of a key's or value's element (0: the same)."""
    config, layout = model.config, model.config.blocks
    executions = layout.p + steps * layout.n + layout.c
    # With one row a matrix does 2 FLOPs for each of its weights, and attention to one token 4 d.
    products = executed_flops(model, steps, 1) + head_flops(config) - executions * 4 * config.d_model
    keys_and_values = executions * 2 * config.d_model * tokens  # shared or not, each execution reads its own
    return round(itemsize * products / 2 + (kv_itemsize or itemsize) * batch * keys_and_values)
