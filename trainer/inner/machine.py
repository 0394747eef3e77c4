"""What is of the machine and the process: device, precision, compilation, and the state of every random generator.

Under autocast only products are bf16. On a CPU it and compilation are off unless requested: compiling takes a minute
that small models never earn back, and a CPU without bf16 units is slower with it. Random generators are python's,
numpy's, torch's on the CPU and on each GPU in use; those that the program seeds itself (the loader's, the init's) are
functions of their seeds and need no saving.
"""

from __future__ import annotations

import logging
import os
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, Final, TypeVar, cast

import numpy as np
import torch
from torch import nn

from trainer.errors import CheckpointMismatchError, TrainerUsageError
from trainer.inner.config import Compile, Precision
from trainer.model.layers import Layers
from trainer.model.stages import Readout

_VERSION: Final = 1
_Function = TypeVar("_Function", bound=Callable[..., object])

logger = logging.getLogger(__name__)


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


def use_device(name: str = "auto") -> torch.device:
    """Returns `choose_device`; a GPU is the current one from now on, which events, streams and free memory go by."""
    device = choose_device(name)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return device


def autocast_for(device: torch.device, precision: Precision) -> Callable[[], AbstractContextManager[object]]:
    """Returns what makes a context for each forward pass; on a GPU fp32 products are TF32 unless fp32 is requested."""
    on_cuda = device.type == "cuda"
    if on_cuda:
        torch.set_float32_matmul_precision("highest" if precision == "fp32" else "high")
    if precision == "fp32" or (precision == "auto" and not (on_cuda and torch.cuda.is_bf16_supported())):
        return nullcontext
    if on_cuda and not torch.cuda.is_bf16_supported():
        raise TrainerUsageError(f"precision: expected a GPU with bf16, found {torch.cuda.get_device_name(device)}")
    return partial(torch.autocast, device.type, dtype=torch.bfloat16)


def is_compiled(setting: Compile, device: torch.device) -> bool:
    """Whether models are compiled on this device."""
    return setting == "on" or (setting == "auto" and device.type == "cuda")


def compiled(function: _Function, setting: Compile, device: torch.device) -> _Function:
    """Compiles a module or its method at its first call, where that pays; returns it.

    Of our models regions are compiled and not the whole: all blocks are one code, so that 20 layers compile as fast as
    one, and what is between them (growing tables, ids of a vocabulary) never compiles anything again.
    """
    if not is_compiled(setting, device):
        return function
    whole = getattr(function, "__self__", function)
    parts = whole.modules() if isinstance(whole, nn.Module) else ()
    regions = [part for part in parts if isinstance(part, Layers | Readout)]
    for region in regions:
        region.compile_regions()
    return function if regions else cast(_Function, torch.compile(function))


def rng_state() -> dict[str, Any]:
    """Returns the state of all generators, as values that ``torch.load(weights_only=True)`` takes."""
    python_version, python_words, python_gauss = random.getstate()
    numpy_state = np.random.get_state(legacy=False)
    cuda_in_use: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return {
        "version": _VERSION,
        "python": (python_version, torch.tensor(python_words, dtype=torch.int64), python_gauss),
        "numpy": (
            torch.from_numpy(numpy_state["state"]["key"].astype(np.int64)),
            int(numpy_state["state"]["pos"]),
            int(numpy_state["has_gauss"]),
            float(numpy_state["gauss"]),
        ),
        "torch_cpu": torch.get_rng_state(),
        "torch_cuda": torch.cuda.get_rng_state_all() if cuda_in_use else [],
    }


def set_rng_state(state: Mapping[str, Any]) -> None:
    """Restores what `rng_state` returned; with another number of GPUs, for those that both have, with a warning.

    Raises CheckpointMismatchError if it is no such state; no generator was changed then.
    """
    if state.get("version") != _VERSION:
        raise CheckpointMismatchError(
            f"expected random state of version {_VERSION}, found {state.get('version')!r}; "
            "use the release that wrote it"
        )
    try:
        python_version, python_words, python_gauss = state["python"]
        python = (int(python_version), tuple(python_words.tolist()), python_gauss)
        key, position, has_gauss, gauss = state["numpy"]
        numpy = ("MT19937", key.numpy().astype(np.uint32), int(position), int(has_gauss), float(gauss))
        cpu, cuda = state["torch_cpu"], list(state["torch_cuda"])
        random.Random().setstate(python)
        np.random.RandomState().set_state(numpy)
        torch.Generator().set_state(cpu)
    except (LookupError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise CheckpointMismatchError(f"expected the state of the random generators, found another: {error}") from error
    random.setstate(python)
    np.random.set_state(numpy)
    torch.set_rng_state(cpu)
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if cuda and len(cuda) != count:
        logger.warning("random state was saved with %d GPUs and there are %d: not resumed to the bit", len(cuda), count)
    for index, cuda_state in enumerate(cuda[:count]):
        torch.cuda.set_rng_state(cuda_state, index)


@contextmanager
def undisturbed_rng() -> Iterator[None]:
    """Encloses other people's code in the middle of a run: every generator goes on as if it had not been."""
    before = rng_state()
    try:
        yield
    finally:
        set_rng_state(before)
