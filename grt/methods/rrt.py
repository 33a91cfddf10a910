"""Relaxed Recursive Transformer (Bae et al., arXiv 2410.20672): a tied core whose linears differ by a low-rank delta
at every step. In block j at step r, each chosen linear gives

    y   = W x + b + s B_rj A_rj x             A_rj (rank, d_in), B_rj (d_out, rank)
    h_0 = h_pre,   h' = the n blocks so adapted, one after the other

W and every A and B are trained. Norms and biases are shared by the steps. The number of steps is fixed: there are no
factors beyond R.

From scratch, A ~ U(-1/sqrt(d_in), 1/sqrt(d_in)) and B = 0, so that all steps begin alike and A has no gradient until B
has moved. From a dense model (grt/model/convert.py), with W_src the layer that step r, block j stands for:

    W_src - W = U S V^T,   B_rj = U_rank S_rank / s,   A_rj = V_rank^T

Departures from the original: all four linears of GPT-2 by default (there q and v), one delta of that rank for q, k and
v together, since they are one linear, no dropout, and the division by s, without which s B A would be s times the
residual (the original leaves it out).

Shapes: B batch, T tokens, d width, R steps, n core blocks.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn

from grt.backbone.block import Stack
from grt.backbone.context import LoopContext
from grt.config import ModelConfig
from grt.errors import ConfigError
from grt.model.rule import Residual, UpdateRule

WIDTHS = {"attn.qkv": (1, 3), "attn.out": (1, 1), "mlp.up": (1, 4), "mlp.down": (4, 1)}  # d_in / d, d_out / d


def chosen(names: str) -> dict[str, tuple[int, int]]:
    """The linears that model.lora_targets names, in the block's order, with their widths."""
    targets = names.split(",")
    if unknown := [name for name in targets if name not in WIDTHS]:
        raise ConfigError(f"model.lora_targets has {unknown[0]!r}: choose among {', '.join(WIDTHS)}, with commas.")
    if len(set(targets)) < len(targets):
        raise ConfigError(f"model.lora_targets is {names!r}, which names a linear twice: name each once.")
    return {name: widths for name, widths in WIDTHS.items() if name in targets}


def key(target: str) -> str:
    return target.replace(".", "_")  # a parameter's name has no dots


class RRT(UpdateRule):
    """The factors of all steps and blocks are one parameter each, rule.A.* and rule.B.*: at any depth all are used."""

    extrapolates = False
    adds_low_rank = True
    weights_depend_on = ("lora_rank", "lora_scale", "lora_targets")

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.rank, self.scale = config.lora_rank, config.lora_scale
        if not 1 <= self.rank <= self.d:
            raise ConfigError(f"model.lora_rank is {self.rank}: it must lie between 1 and model.d_model, {self.d}.")
        if self.scale <= 0:
            raise ConfigError(f"model.lora_scale is {self.scale}: it must be above 0.")
        self.targets = chosen(config.lora_targets)
        self.A, self.B = nn.ParameterDict(), nn.ParameterDict()
        for name, (d_in, d_out) in self.targets.items():
            self.A[key(name)] = nn.Parameter(torch.zeros(self.layout.R, self.layout.n, self.rank, d_in * self.d))
            self.B[key(name)] = nn.Parameter(torch.zeros(self.layout.R, self.layout.n, d_out * self.d, self.rank))

    def init_parameters(self, model: nn.Module) -> None:
        for A in self.A.values():
            bound = 1 / math.sqrt(A.shape[-1])  # Kaiming's uniform law with a = sqrt(5), for each matrix
            nn.init.uniform_(A, -bound, bound)

    def start(self, h_pre: Tensor, ctx: LoopContext) -> Tensor:
        # Taken apart once a pass: the gradients are put together once then, with zeros for the steps that a shallow
        # pass leaves out. Indexing at every use would fill a whole stack with zeros each time.
        factors = {
            name: list(
                zip(self.A[key(name)].flatten(0, 1), (self.scale * self.B[key(name)]).flatten(0, 1), strict=True)
            )
            for name in self.targets
        }
        ctx.carry["factors"] = [
            {name: pairs[i] for name, pairs in factors.items()} for i in range(self.layout.R * self.layout.n)
        ]
        return h_pre

    def transform(self, u: Tensor, core: Stack, ctx: LoopContext) -> Tensor:
        first = ctx.step * self.layout.n
        return core(u, ctx, ctx.carry["factors"][first : first + self.layout.n])

    @torch.no_grad()
    def adopt(self, residual: Residual) -> dict[str, Any]:
        """The best approximation of this rank to each residual; returns the share of their squared norm it keeps."""
        kept = whole = 0.0
        for name in self.targets:
            for r in range(self.layout.R):
                for j in range(self.layout.n):
                    U, S, Vt = torch.linalg.svd(residual(r, j, name), full_matrices=False)
                    self.B[key(name)][r, j] = U[:, : self.rank] * S[: self.rank] / self.scale
                    self.A[key(name)][r, j] = Vt[: self.rank]
                    kept += S[: self.rank].square().sum().item()
                    whole += S.square().sum().item()
        return {"lora": "singular vectors of the residuals", "kept": kept / whole if whole else 1.0}

    def flops(self, steps: int, tokens: int) -> int:
        # 2 rank (d_in + d_out) for each chosen linear of each block.
        widths = self.d * sum(d_in + d_out for d_in, d_out in self.targets.values())
        return super().flops(steps, tokens) + steps * self.layout.n * tokens * 2 * self.rank * widths
