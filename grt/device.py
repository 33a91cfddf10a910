"""Where to compute and in which precision; and how fast the machine multiplies matrices, for the MFU."""

import contextlib
import json
import os
import time
from contextlib import AbstractContextManager

import torch

from grt.errors import ConfigError
from grt.files import cache_folder, replace_file

# Dense bf16 / TF32 matrix peaks in FLOP/s, from the vendors' data sheets.
CUDA_PEAKS = {
    "H200": (989e12, 495e12),
    "H100": (989e12, 495e12),
    "A100": (312e12, 156e12),
    "L40S": (362e12, 183e12),
    "L4": (121e12, 60e12),
    "4090": (165e12, 83e12),
    "3090": (71e12, 36e12),
    "V100": (125e12, 16e12),
    "T4": (65e12, 8e12),
}


DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def resolve_device(name: str) -> torch.device:
    """The device that `auto`, cpu, cuda or mps stands for here (ConfigError where it is missing)."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    available = {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if not available.get(name, False):
        usable = ", ".join(["auto", *(n for n, yes in available.items() if yes)])
        raise ConfigError(f"device {name!r} is not available on this machine: choose one of {usable}.")
    return torch.device(name)


def resolve_dtype(name: str, device: torch.device, width: int) -> torch.dtype:
    """fp32 or bf16. `auto` is bf16 on CUDA; on a CPU the faster of the two, measured on products of this width."""
    if name == "auto" and device.type == "cpu":
        speeds = {dtype: matmul_speed(device, dtype, width) for dtype in (torch.float32, torch.bfloat16)}
        return max(speeds, key=lambda dtype: speeds[dtype])
    return DTYPES["bf16" if name == "auto" else name]


def dtype_name(dtype: torch.dtype) -> str:
    return next(name for name, own in DTYPES.items() if own == dtype)


def autocast(device: torch.device, dtype: torch.dtype) -> AbstractContextManager:
    """Matrix products in `dtype`, everything else in fp32."""
    return torch.autocast(device.type, dtype, enabled=dtype != torch.float32)


def matmul_speed(device: torch.device, dtype: torch.dtype, width: int, seconds: float = 0.1) -> float:
    """FLOP/s of (4096, width) x (width, 4 width): the best of several tries, since other work only slows it down."""
    a = torch.randn(4096, width, device=device).to(dtype)
    b = torch.randn(width, 4 * width, device=device).to(dtype)
    best, end = 0.0, time.perf_counter() + seconds
    while best == 0.0 or time.perf_counter() < end:
        start = time.perf_counter()
        (a @ b)[0, 0].item()  # .item() waits for the device
        best = max(best, 2 * 4096 * width * 4 * width / (time.perf_counter() - start))
    return best


def peak_flops(device: torch.device, dtype: torch.dtype) -> tuple[float, str]:
    """(FLOP/s, where the number is from): the data sheet's peak of a known GPU, else the most that a matrix product was
    ever timed at on this machine, now included: other work makes it slower."""
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        for key, (bf16, tf32) in CUDA_PEAKS.items():
            if key in name:
                return (bf16 if dtype == torch.bfloat16 else tf32), f"data sheet of {name}"
    now = matmul_speed(device, dtype, 1024, seconds=0.3)
    best = _best_so_far(
        f"{cpu_name()}, {torch.get_num_threads()} threads, {device.type}, {dtype}, {torch.__version__}", now
    )
    return (
        best,
        "matrix product measured at start" if best == now else "matrix product measured before, with less to do",
    )


def _best_so_far(machine: str, speed: float) -> float:
    """The largest of the speeds that were measured so; kept in the cache, where that can be written."""
    path = cache_folder() / "peaks.json"
    try:
        known = {name: float(value) for name, value in json.loads(path.read_bytes()).items() if value < 1e18}
    except (OSError, ValueError, AttributeError, TypeError):
        known = {}
    if speed <= known.get(machine, 0.0):
        return known[machine]
    with contextlib.suppress(OSError, ConfigError):
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, json.dumps(known | {machine: speed}, indent=2) + "\n")
    return speed


def cpu_name() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        import platform

        return platform.processor() or platform.machine()


def hardware(device: torch.device) -> dict[str, object]:
    """What ran it, for env.json."""
    facts: dict[str, object] = {"cpu": cpu_name(), "cores": os.cpu_count(), "threads": torch.get_num_threads()}
    facts["device"] = device.type
    if device.type == "cuda":
        facts["gpu"] = torch.cuda.get_device_name(device)
    return facts
