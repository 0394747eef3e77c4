"""What the device can do for speed and memory: where to compute, in which precision, compiled, with less kept.

Parameters, moments and the loss stay fp32; under autocast the products alone are bf16, whose range is that of fp32, so
no loss scaling is needed. On a CPU all of it is off unless asked for: compiling takes a minute there that small models
never earn back, and a CPU without bf16 units is slower with it.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TypeVar, cast

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from trainer.errors import TrainerUsageError
from trainer.inner.config import Compile, Precision

__all__ = ["autocast_for", "checkpoint_activations", "choose_device", "compiled"]

_Function = TypeVar("_Function", bound=Callable[..., object])


def choose_device(name: str = "auto") -> torch.device:
    """The device to train on.

    Args:
        name: ``auto`` (the GPU that ``LOCAL_RANK`` names, else the first, else the CPU), ``cpu``, ``cuda``, ``cuda:N``.

    Raises:
        TrainerUsageError: it is no such name, or the device is not there.
    """
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
    """What to run the forward pass under: call it for a context of each pass.

    Raises:
        TrainerUsageError: bf16 was asked for, and the GPU has none.
    """
    on_cuda = device.type == "cuda"
    if precision == "fp32" or (precision == "auto" and not (on_cuda and torch.cuda.is_bf16_supported())):
        return nullcontext
    if on_cuda and not torch.cuda.is_bf16_supported():
        raise TrainerUsageError(f"precision: expected a GPU with bf16, found {torch.cuda.get_device_name(device)}")
    return partial(torch.autocast, device.type, dtype=torch.bfloat16)


def compiled(function: _Function, setting: Compile, device: torch.device) -> _Function:
    """A module or function, compiled where that pays: nothing is compiled before the first call.

    A module comes out wrapped around the same parameters; save and name those of the original.
    """
    if setting == "off" or (setting == "auto" and device.type != "cuda"):
        return function
    return cast(_Function, torch.compile(function))


def checkpoint_activations(model: nn.Module) -> int:
    """Has every repeated block of a model compute its activations again in the backward pass instead of keeping them.

    Repeated blocks are the entries of the innermost ``ModuleList``s. Names and values of parameters stay as they are,
    and so do losses and gradients, to the bit.

    Returns:
        How many blocks there are.

    Raises:
        TrainerUsageError: there are none.
    """
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    innermost = [
        each for each in lists if not any(isinstance(inside, nn.ModuleList) for inside in list(each.modules())[1:])
    ]
    blocks = [block for each in innermost for block in each]
    if not blocks:
        raise TrainerUsageError(
            f"activation_checkpointing: expected blocks in a ModuleList, found none in {type(model).__name__}"
        )
    for block in blocks:
        if isinstance(block.__dict__.get("forward"), partial):
            continue  # It was done before.
        # An instance's attribute, seen before the class's method: hooks and state_dict keep working.
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    return len(blocks)
