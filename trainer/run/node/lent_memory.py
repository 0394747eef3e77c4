"""fp32 vectors in memory that the processes of one machine share, lent by one and mapped by the others.

The memory is anonymous (``memfd_create``) and the others open it through the lender's ``/proc``: it needs no room in
``/dev/shm``, of which a container has 64 MB, and is gone with the last process that maps it, also after SIGKILL. A
vector is allocated for each use, as torch's own are, so that whoever was given one may keep it.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from trainer.errors import TrainerUsageError

_VALUE_BYTES = 4


@dataclass(frozen=True, slots=True)
class Loan:
    """Where the others find a lent vector."""

    pid: int
    descriptor: int
    num_values: int


@contextmanager
def lent(num_values: int) -> Iterator[tuple[Tensor, Loan]]:
    """Lends a new vector, [num_values] fp32, for as long as the ``with`` lasts; the tensor itself outlives it.

    Raises `TrainerUsageError`: this system has no anonymous files.
    """
    if not hasattr(os, "memfd_create"):
        raise TrainerUsageError("a node of several ranks needs Linux, whose processes can share anonymous memory")
    descriptor = os.memfd_create("genesis-vector", os.MFD_CLOEXEC)
    try:
        os.ftruncate(descriptor, num_values * _VALUE_BYTES)
        yield _mapped(descriptor, num_values), Loan(os.getpid(), descriptor, num_values)
    finally:
        os.close(descriptor)


def borrowed(loan: Loan) -> Tensor:
    """Maps a vector that another process lends."""
    descriptor = os.open(f"/proc/{loan.pid}/fd/{loan.descriptor}", os.O_RDWR | os.O_CLOEXEC)
    try:
        return _mapped(descriptor, loan.num_values)
    finally:
        os.close(descriptor)


def _mapped(descriptor: int, num_values: int) -> Tensor:
    return torch.frombuffer(mmap.mmap(descriptor, num_values * _VALUE_BYTES), dtype=torch.float32)
