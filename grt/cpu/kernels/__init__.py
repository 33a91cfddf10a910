"""What decoding does with weights, for a few rows on a CPU: kernels.cpp, compiled when first needed, then in the cache.

`torch.ops.grt.row_product(x, weight, scale, bias)` is y = (x W^T) * scale + bias for x (..., k), contiguous, in fp32 or
bf16, which is y's dtype too; weight (n, k) in fp32, bf16 or int8, at any distance from row to row; scale (n,) in fp32
and bias (n,) in fp32 or bf16, or None. With gain and shift (k,) and eps, LayerNorm(x) is what is multiplied.
`rest_of_block` is what a block does after its keys and values went into the cache, `gate` is GRT's f_g. Sums are in
fp32. `path` is an index into torch.ops.grt.paths(), the instruction sets that this CPU has, the fastest first.

With int8, x is rounded to steps of s = max |x| / 32767 of its row (larger beyond k = 4,064, where 32 bits would not
hold the sums), so that y is off by at most s / 2 * sum |W|; the sums of integers are exact, and every path and number
of threads gives the same bits.
"""

import functools
import hashlib
import os
import platform
import secrets
import shlex
import subprocess
import sys
from pathlib import Path

import torch
from torch import Tensor
from torch.utils import cpp_extension

from grt.files import cache_folder

SOURCES = [Path(__file__).with_name(name) for name in ("kernels.cpp", "vectors.h", "loops.h", "team.h")]
# -fno-...: so that loops with comparisons in them become vectors; nothing here asks about traps or errno.
FLAGS = ["-O3", "-std=c++20", "-fPIC", "-shared", "-fopenmp-simd", "-ffp-contract=off"]
FLAGS += ["-fno-math-errno", "-fno-trapping-math"]


@functools.cache
def load() -> bool:
    """Whether the kernels are there; where they cannot be compiled, a line on stderr says once that they are not."""
    try:
        torch.ops.load_library(compiled())
    except subprocess.CalledProcessError as error:
        lines = error.stderr.strip().splitlines()
        return _without(next((line for line in lines if "error" in line), f"{error.cmd[0]} failed"))
    except OSError as error:
        return _without(str(error))
    for name, shape in (("row_product", _of_product), ("rest_of_block", _like_x), ("gate", _like_x)):
        torch.library.register_fake(f"grt::{name}", shape)
    return True


def _without(why: str) -> bool:
    print(f"warning: no kernels for single rows ({why}): torch's, which are slower, stand in", file=sys.stderr)
    return False


def best() -> str | None:
    """The instruction set that they use here; None where there are no kernels."""
    return torch.ops.grt.paths().split()[0] if load() else None


def compiled() -> Path:
    """The library, made now unless the cache has it whole: its name tells the hash of what is in it. So several
    processes may make it at once. Raises OSError or CalledProcessError."""
    compiler = cpp_extension.get_cxx_compiler()
    command = [
        *shlex.split(compiler),
        *FLAGS,
        *(f"-I{folder}" for folder in cpp_extension.include_paths()),
        str(SOURCES[0]),
    ]
    command += [*(f"-L{folder}" for folder in cpp_extension.library_paths()), "-ltorch_cpu"]
    key = hashlib.sha256("\n".join([torch.__version__, platform.machine(), *command]).encode())
    for source in SOURCES:
        key.update(source.read_bytes())
    folder, name = cache_folder() / "kernels", f"kernels-{key.hexdigest()[:16]}"
    for library in folder.glob(f"{name}-*.so"):
        if library.name == f"{name}-{digest(library)}.so":
            return library
        library.unlink(missing_ok=True)
    folder.mkdir(parents=True, exist_ok=True)
    temporary = folder / f".{name}.{secrets.token_hex(4)}.so"
    try:
        subprocess.run([*command, "-o", str(temporary)], check=True, capture_output=True, text=True)
        library = folder / f"{name}-{digest(temporary)}.so"
        os.replace(temporary, library)
    finally:
        temporary.unlink(missing_ok=True)
    return library


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


# Shapes of what they return, for the compiler


def _of_product(x: Tensor, weight: Tensor, *_: object, **__: object) -> Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0])


def _like_x(x: Tensor, *_: object, **__: object) -> Tensor:
    return torch.empty_like(x)
