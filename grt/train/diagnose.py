"""Where a non-finite loss came from: the first module whose output, or whose gradient, is not finite."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from grt.backbone.context import LoopContext

BACKWARDS = ("ln_f", "coda", "core", "rule", "prelude", "embed")


class NonFiniteError(RuntimeError):
    """Training stopped at a loss or gradient that is not finite; the last good checkpoint is untouched."""


def _finite(value: object) -> bool:
    return not isinstance(value, Tensor) or bool(torch.isfinite(value).all())


def first_offender(model: nn.Module, rerun: Callable[[LoopContext], object]) -> str:
    """Name of the first module whose weights or output are not finite when `rerun` repeats the failed pass; where
    the pass is clean, the first parameter with a non-finite gradient."""
    for name, p in model.named_parameters():
        if not _finite(p):
            return f"{name} (its weights)"
    found: list[str] = []

    def watch(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: object, output: object) -> None:
            if not found and not _finite(output):
                found.append(name)

        return hook

    def look(name: str) -> Callable[[Tensor, LoopContext], None]:
        def tap(x: Tensor, ctx: LoopContext) -> None:
            if not found and not _finite(x):
                found.append(f"rule ({name} of step {ctx.step + 1})")

        return tap

    hooks = [m.register_forward_hook(watch(n)) for n, m in model.named_modules() if n and not list(m.children())]
    try:
        rerun(LoopContext(taps={name: look(name) for name in ("input", "gate", "state")}))
    finally:
        for hook in hooks:
            hook.remove()
    if found:
        return found[0]
    # A bad gradient spoils those of all that ran before it, and the tied embedding: look in the backward order.
    backwards = reversed(list(model.named_parameters()))
    for name, p in sorted(backwards, key=lambda item: BACKWARDS.index(item[0].split(".")[0])):
        if not _finite(p.grad):
            return f"{name} (its gradient)"
    return "the loss itself"
