"""Tensors to make states of, and disks that are full."""

from __future__ import annotations

import resource
import signal
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import pytest
import torch


@pytest.fixture
def make_tensors() -> Callable[..., dict[str, torch.Tensor]]:
    """Two fp32 vectors of so many values, and an odd small one before them, so that chunks span tensors."""

    def make(num_values: int, seed: int = 0) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(seed)
        return {
            "anchor": torch.randn(num_values, generator=generator),
            "aaa": torch.arange(3, dtype=torch.uint8),
            "momentum": torch.randn(num_values, generator=generator),
        }

    return make


@pytest.fixture
def file_size_limit() -> Callable[[int], AbstractContextManager[None]]:
    """Makes files of more than so many bytes fail, as a full disk does."""

    @contextmanager
    def limit(num_bytes: int) -> Iterator[None]:
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
            signal.signal(signal.SIGXFSZ, ignored)

    return limit
