"""Tape: the pass of one token, recorded while it runs once, then played again in a single call of our kernels.

A pass over a frozen cache (grt/cache/kv.py) does the same at the same addresses for every token. Python, dispatcher
and the threads' calling together cost GRT-small in int8 a fifth of its time; a tape costs none of them, and unlike
torch.compile it is there at once. What a pass consists of is our own products (grt/decode/kernels) and a dozen of
torch's operations on a single row, for which the kernels have works of their own; a pass with any other operation is
refused, and runs as before.
"""

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten


class Unrecordable(Exception):
    """A pass does something that no tape can repeat."""


class Tape:
    """Records function(x) at once, and returns what it returns on each further call; x and its result are tensors.

    The function's other tensors are read and written where they were; its Python code does not run any more. Raises
    Unrecordable, after function has run as far as it could.
    """

    def __init__(self, function: Callable[[Tensor], Tensor], x: Tensor) -> None:
        self.x = x.clone()
        recorder = Recorder()
        self.number = torch.ops.grt.record()
        self.erase = weakref.finalize(self, torch.ops.grt.erase, self.number)
        try:
            with recorder:
                self.result = function(self.x)
        finally:
            torch.ops.grt.recorded()
        self.seen = recorder.seen  # what is on the tape are addresses: all these have to stay

    def __call__(self, x: Tensor) -> Tensor:
        self.x.copy_(x)
        torch.ops.grt.play(self.number)
        return self.result.clone()


class Recorder(TorchDispatchMode):
    """Lets every operation run, and puts it onto the tape too. Our kernels do so by themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # no compiler looks at what is recorded; to keep one away, torch would load it, for seconds

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        y = func(*args, **(kwargs or {}))
        self.seen.append((args, kwargs, y))
        if func in WORKS:
            try:
                WORKS[func](y, *args, **(kwargs or {}))
            except RuntimeError as error:  # of a type, say, that they do not read
                raise Unrecordable(str(func)) from error
        elif func.namespace != "grt" and not only_looks(func, args, y):
            raise Unrecordable(str(func))
        return y


def only_looks(func: Any, args: tuple[Any, ...], y: Any) -> bool:
    """Whether y is another view of what was given."""
    given = {x.untyped_storage().data_ptr() for x in args if isinstance(x, Tensor)}
    views = y if isinstance(y, (list, tuple)) else [y]
    changes = any(returned.alias_info and returned.alias_info.is_write for returned in func._schema.returns)
    return not changes and all(isinstance(x, Tensor) and x.untyped_storage().data_ptr() in given for x in views)


def row(x: Tensor, y: Tensor) -> Tensor:
    """x as the works read it: one number for each of y's, or one for all of them."""
    if x.numel() not in (1, y.numel()) or not x.is_contiguous() or not y.is_contiguous():
        raise Unrecordable("an operation on more than one row")
    return x


def elementwise(kind: str) -> Callable[..., None]:
    def work(y: Tensor, *operands: Tensor, **options: Any) -> None:
        if options or not all(isinstance(x, Tensor) for x in operands):
            raise Unrecordable("an operation with a number")
        torch.ops.grt.elementwise(y, kind, *(row(x, y) for x in operands))

    return work


def to_dtype(y: Tensor, x: Tensor, *_: Any, **__: Any) -> None:
    if y.data_ptr() != x.data_ptr():
        torch.ops.grt.elementwise(y, "copy", row(x, y))


def layer_norm(
    y: Tensor,
    x: Tensor,
    shape: Any,
    gain: Tensor | None = None,
    shift: Tensor | None = None,
    eps: float = 1e-5,
    *__: Any,
) -> None:
    over_last_dimension(x, shape)
    torch.ops.grt.norm(y, row(x, y), gain, shift, eps, True)


def over_last_dimension(x: Tensor, shape: Any) -> None:
    if list(shape) != [x.shape[-1]]:
        raise Unrecordable("a norm over several dimensions")


def rms_norm(y: Tensor, x: Tensor, shape: Any, gain: Tensor | None = None, eps: float | None = None) -> None:
    over_last_dimension(x, shape)
    torch.ops.grt.norm(y, row(x, y), gain, None, torch.finfo(x.dtype).eps if eps is None else eps, False)


def pick(y: Tensor, table: Tensor, ids: Any, *_: Any) -> None:
    """Rows of a table: embedding, or table[ids]."""
    if isinstance(ids, (list, tuple)):
        [ids] = ids
    if not (table.is_contiguous() and y.is_contiguous() and ids.is_contiguous()):
        raise Unrecordable("rows that lie apart")
    torch.ops.grt.pick(y, table, ids, table[0].numel() * table.itemsize)


def copy(y: Tensor, _: Tensor, x: Tensor, *__: Any) -> None:
    torch.ops.grt.elementwise(y, "copy", row(x, y))


def stack(y: Tensor, parts: list[Tensor], dim: int = 0) -> None:
    if dim:
        raise Unrecordable("a stack along an inner dimension")
    for into, part in zip(y, parts, strict=True):
        torch.ops.grt.elementwise(into, "copy", row(part, into))


def index_copy(y: Tensor, store: Tensor, dim: int, index: Tensor, x: Tensor) -> None:
    if not (store.is_contiguous() and x.is_contiguous() and index.numel() == 1):
        raise Unrecordable("a store that lies apart")
    outer, inner = store.shape[:dim].numel(), store.shape[dim + 1 :].numel()
    torch.ops.grt.put(store, index, x, outer, store.shape[dim], inner * store.itemsize)


WORKS: dict[Any, Callable[..., None]] = {
    aten.to.dtype: to_dtype,
    aten.copy_.default: copy,
    aten.add.Tensor: elementwise("add"),
    aten.mul.Tensor: elementwise("mul"),
    aten.sigmoid.default: elementwise("sigmoid"),
    aten.lerp.Tensor: elementwise("lerp"),
    aten.layer_norm.default: layer_norm,
    aten.rms_norm.default: rms_norm,
    aten.embedding.default: pick,
    aten.index.Tensor: pick,
    aten.stack.default: stack,
    aten.index_copy_.default: index_copy,
}
