"""AdamW as the paper's recipe sets it (sec:experiments): its groups, its schedule, its state in a checkpoint."""

import math
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from grt.config import OptimConfig

MOMENTS = ("exp_avg", "exp_avg_sq")


def learning(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """The parameters that are trained, with their names."""
    return ((name, p) for name, p in model.named_parameters() if p.requires_grad)


def make_optimizer(model: nn.Module, config: OptimConfig) -> torch.optim.AdamW:
    """AdamW with weight decay on matrices (two dimensions or more) only; what is frozen is left out."""
    matrices = [p for _, p in learning(model) if p.ndim >= 2]
    vectors = [p for _, p in learning(model) if p.ndim < 2]
    groups = [
        {"params": matrices, "weight_decay": config.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=config.lr, betas=(config.beta1, config.beta2), fused=True)


def learning_rate(config: OptimConfig, step: int, steps: int) -> float:
    """Rate of optimizer step `step` (0-based) of `steps`: linear warm-up, then a cosine to min_lr_ratio x lr."""
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    progress = (step - config.warmup_steps) / max(1, steps - config.warmup_steps)
    low = config.lr * config.min_lr_ratio
    return low + 0.5 * (config.lr - low) * (1 + math.cos(math.pi * progress))


def optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """AdamW's moments under the parameters' names, of the rows that are saved."""
    saved = model.state_dict()
    return {
        f"{name}.{key}": optimizer.state[p][key][: len(saved[name])].cpu()
        for name, p in learning(model)
        for key in MOMENTS
    }


def restore_optimizer(
    model: nn.Module, optimizer: torch.optim.Optimizer, tensors: dict[str, Tensor], step: int
) -> None:
    for name, p in learning(model):
        moments = {key: torch.zeros_like(p) for key in MOMENTS}
        for key, moment in moments.items():
            saved = tensors[f"{name}.{key}"]
            moment[: len(saved)] = saved
        optimizer.state[p] = {"step": torch.tensor(float(step), device=p.device), **moments}
