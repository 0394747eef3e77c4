"""Joins the process group that torchrun describes in the environment, also after torchrun has started its ranks again.

torchrun keeps one store for all starts of a job (torch 2.5 and later, pytorch issue 135712), and its count of restarts
differs between machines. A rank that starts again could thus read where the killed one listened, and wait for it. So
the ranks first agree on a prefix of the store that no earlier start has used.
"""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

_POLL_S = 0.02


def join_process_group(device: torch.device, timeout: timedelta) -> None:
    """Makes the default process group: NCCL for GPUs, else gloo.

    Raises:
        RuntimeError, ValueError: the environment is not torchrun's, or the ranks did not meet in time.
    """
    store, rank, size = next(iter(rendezvous("env://", timeout=timeout)))
    store.set_timeout(timeout)
    backend = "nccl" if device.type == "cuda" else "gloo"
    prefix = meeting_prefix(store, rank, size, timeout.total_seconds())
    own = dist.PrefixStore(prefix, store)  # type: ignore[attr-defined]
    dist.init_process_group(backend, timeout=timeout, store=own, rank=rank, world_size=size)


def meeting_prefix(store: Any, rank: int, size: int, timeout_s: float) -> str:
    """Returns a prefix of a torch ``Store`` that ranks which run at the same time share, and no ranks before them.

    Each rank takes the number of its start from a counter in the store. Rank 0 answers each number that it sees, those
    of ranks which have ended included, until all ranks have taken up its own.

    Raises:
        RuntimeError: not all ranks came in time.
    """
    start = store.add(f"genesis/starts/{rank}", 1)
    if rank:
        prefix = str(store.get(f"genesis/answers/{rank}/{start}"), "utf-8")
        store.add(f"{prefix}/arrived", 1)
        return prefix
    prefix = f"genesis/meeting/{start}"
    answered = dict.fromkeys(range(1, size), 0)
    deadline_s = time.monotonic() + timeout_s
    while (arrived := store.add(f"{prefix}/arrived", 0)) < size - 1:
        if time.monotonic() > deadline_s:
            raise RuntimeError(f"expected {size} ranks within {timeout_s:.0f} s, found {arrived + 1}")
        for other in answered:
            found = store.add(f"genesis/starts/{other}", 0)
            if found > answered[other]:
                store.set(f"genesis/answers/{other}/{found}", prefix)
                answered[other] = found
        time.sleep(_POLL_S)
    return prefix
