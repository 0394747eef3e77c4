"""The peak FLOP/s of the device that a model is trained on, by its name or by a measured product.

Makers state dense bf16 products with fp32 sums; that is what `STATED_TFLOPS` has. For any other device, a CPU among
them, and for fp32 on a GPU, the best of some products of square matrices stands for it: 0.1 s on a core, and some 75 %
of what is stated on an H100. Utilisation against a measured product is therefore higher; the source says which it is.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

import torch

from trainer.inner.config import Precision
from trainer.monitor.speed import Peak

STATED_TFLOPS: Final[Mapping[str, float]] = MappingProxyType(
    {
        "GB200": 2500.0,
        "B200": 2250.0,
        "GH200": 989.0,
        "H200": 989.0,
        "H100 NVL": 835.0,
        "H100 PCIe": 756.0,
        "H100": 989.0,
        "A100": 312.0,
        "L40S": 362.0,
        "L4": 121.0,
        "RTX 4090": 165.0,
        "RTX 3090": 71.0,
    }
)
"""Dense bf16 by a part of the device's name, the more exact name first."""

_OTHER_DEVICES: Final = frozenset({"D", "Laptop", "Max", "Max-Q", "Mobile"})
"""Words behind the name of a device that is slower than what has the name without them."""
_CUDA_SIZE, _CPU_SIZE = 8192, 1024
_CUDA_PRODUCTS, _CPU_PRODUCTS = 20, 3


def stated_flops_per_s(device_name: str) -> float | None:
    """Returns what its maker states for bf16; None for a device that is not in the table."""
    words = device_name.replace("-", " ").split()
    for name, tflops in STATED_TFLOPS.items():
        if all(word in words for word in name.split()) and not _OTHER_DEVICES & set(words):
            return tflops * 1e12
    return None


def measured_flops_per_s(device: torch.device, dtype: torch.dtype, size: int = 0) -> float:
    """Returns the FLOP/s of the best of some products of square matrices, with ``size`` rows each; 0: by device."""
    on_cuda = device.type == "cuda"
    size = size or (_CUDA_SIZE if on_cuda else _CPU_SIZE)
    left, right, out = (torch.ones(size, size, device=device, dtype=dtype) for _ in range(3))
    best_s = float("inf")
    for _ in range(_CUDA_PRODUCTS if on_cuda else _CPU_PRODUCTS):
        _wait(device)
        began_s = time.perf_counter()
        torch.matmul(left, right, out=out)
        _wait(device)
        best_s = min(best_s, time.perf_counter() - began_s)
    return 2 * size**3 / best_s


def peak_of(device: torch.device, precision: Precision) -> Peak:
    """Returns the peak of the device in the type that the model's products have."""
    on_cuda = device.type == "cuda"
    in_bf16 = precision == "bf16" or (precision == "auto" and on_cuda and torch.cuda.is_bf16_supported())
    dtype, text = (torch.bfloat16, "bf16") if in_bf16 else (torch.float32, "fp32")
    name = torch.cuda.get_device_name(device) if on_cuda else "CPU"
    stated = stated_flops_per_s(name) if in_bf16 and on_cuda else None
    if stated is not None:
        return Peak(stated, "stated", f"{name}, {text}")
    return Peak(measured_flops_per_s(device, dtype), "measured", f"{name}, {text}")


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
