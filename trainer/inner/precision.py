"""Device, precision and compilation.

Under autocast only products are bf16. On a CPU both are off unless requested: compiling takes a minute that small
models never earn back, and a CPU without bf16 units is slower with it.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TypeVar, cast

import torch

from trainer.errors import TrainerUsageError
from trainer.inner.config import Compile, Precision

_Function = TypeVar("_Function", bound=Callable[..., object])


def choose_device(name: str = "auto") -> torch.device:
    """Returns the device to train on; ``auto`` is the GPU that ``LOCAL_RANK`` names, else the first, else the CPU."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if name == "cpu" or (name == "auto" and not count):
        return torch.device("cpu")
    if name in ("auto", "cuda"):
        name = f"cuda:{os.environ.get('LOCAL_RANK', '0')}"
    kind, _, index = name.partition(":")
    if kind != "cuda" or not index.isdecimal():
        raise TrainerUsageError(f"device: expected auto, cpu, cuda or cuda:N, found {name!r}")
    if int(index) >= count:
        raise TrainerUsageError(f"device: expected one of the {count} GPUs that torch sees here, found {name!r}")
    return torch.device(kind, int(index))


def autocast_for(device: torch.device, precision: Precision) -> Callable[[], AbstractContextManager[object]]:
    """Returns what makes a context for each forward pass."""
    on_cuda = device.type == "cuda"
    if precision == "fp32" or (precision == "auto" and not (on_cuda and torch.cuda.is_bf16_supported())):
        return nullcontext
    if on_cuda and not torch.cuda.is_bf16_supported():
        raise TrainerUsageError(f"precision: expected a GPU with bf16, found {torch.cuda.get_device_name(device)}")
    return partial(torch.autocast, device.type, dtype=torch.bfloat16)


def compiled(function: _Function, setting: Compile, device: torch.device) -> _Function:
    """Returns a module or function that is compiled at its first call, where that pays; its parameters are the same."""
    if setting == "off" or (setting == "auto" and device.type != "cuda"):
        return function
    return cast(_Function, torch.compile(function))
