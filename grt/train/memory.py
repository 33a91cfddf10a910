"""Peak memory of training: the allocator's own count on CUDA, elsewhere the distinct storages alive at once.

torch.distributed._tools.MemTracker would do this too, but refuses a module that runs more than once in a pass, which
is what a recurrent core does.
"""

import weakref
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary


class LiveStorages(TorchDispatchMode):
    """While entered, counts the bytes of every storage that operations make, for as long as each is alive."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self.known = WeakIdKeyDictionary()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self.count(leaf)
        return result

    def count(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage not in self.known:
            size = storage.nbytes()
            self.known[storage] = size
            self.now += size
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self.release, size)

    def release(self, size: int) -> None:
        self.now -= size


def training_peak(model: nn.Module, run: Callable[[], Tensor]) -> int:
    """Bytes at the peak of one slot, `run` being its forward pass: weights, gradients, AdamW's two moments, and what
    the pass keeps for its backward. Gradients are dropped again."""
    storages = LiveStorages()
    for p in model.parameters():
        storages.count(p)
    moments = 2 * sum(p.nbytes for p in model.parameters() if p.requires_grad)
    with storages:
        run().backward()
    model.zero_grad(set_to_none=True)
    return storages.peak + moments
