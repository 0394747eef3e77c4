"""What the contestants of `bench_swarm.py call` have in common: one cheap module, one form of tensor, one way to time.

The module scales each feature, 0.1 ms a MB, so that what is measured is the way there and back. A tensor is
[rows, 256, 1024] in fp32: 1 MiB a row.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

DIM = 1024
NUM_POSITIONS = 256
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_CALLS_TIMEOUT_S = 100.0


class Scale(nn.Module):
    """A gain for each feature."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((DIM,), 2.0))

    def forward(self, x: Tensor) -> Tensor:
        """Same shape."""
        return x * self.weight


class SlowScale(Scale):
    """The same, by a slower machine.

    Args:
        pass_s: seconds a forward pass takes at least.
    """

    def __init__(self, pass_s: float) -> None:
        super().__init__()
        self._pass_s = pass_s

    def forward(self, x: Tensor) -> Tensor:
        """Same shape."""
        time.sleep(self._pass_s)
        return super().forward(x)


def activation(rows: int) -> Tensor:
    """An input; the same for everyone."""
    return torch.randn(rows, NUM_POSITIONS, DIM, generator=torch.Generator().manual_seed(rows))


def session_cpu_s() -> float:
    """Processor time of this process and all that it started, which are of its session."""
    session, ticks = os.getsid(0), 0
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue  # It ended meanwhile.
            if int(fields[3]) == session:
                ticks += sum(map(int, fields[11:15]))  # Its own and that of its children that have ended.
    return ticks / _TICKS_PER_S


def timed_calls(call: Callable[[], Any], count: int, in_flight: int) -> dict[str, Any]:
    """So many calls, so many at once.

    Returns:
        ``seconds`` of each, ``total_s`` of all, ``session_cpu_s`` of this side.
    """

    def timed(_: int) -> float:
        began_s = time.perf_counter()
        call()
        return time.perf_counter() - began_s

    began_cpu_s, began_s = session_cpu_s(), time.perf_counter()
    if in_flight == 1:
        seconds = [timed(number) for number in range(count)]
    else:
        with ThreadPoolExecutor(in_flight) as threads:
            seconds = list(threads.map(timed, range(count), timeout=_CALLS_TIMEOUT_S))
    total_s = time.perf_counter() - began_s
    return {"seconds": seconds, "total_s": total_s, "session_cpu_s": session_cpu_s() - began_cpu_s}
