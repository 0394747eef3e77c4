"""Real processes in a real gloo group on 127.0.0.1, all gone when the call returns, whatever happened."""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

RUN_S = 90.0
GROUP_TIMEOUT_S = 30.0

Scenario = Callable[[int, int], object]


def run_ranks(scenario: Scenario, num_ranks: int, directory: Path, *, may_die: frozenset[int] = frozenset()) -> list:
    """Run a function once in each rank.

    Args:
        scenario: called with rank and number of ranks; at module level, so that a process can import it.
        num_ranks: processes.
        directory: for the store and the results.
        may_die: ranks that are allowed to end without a result.

    Returns:
        What each returned, through ``torch.save``; None for a rank that died as it was allowed to.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed", "torch._dynamo"])  # what optimizers import late
    processes = [
        context.Process(target=_rank_main, args=(scenario, rank, num_ranks, str(directory)), daemon=True)
        for rank in range(num_ranks)
    ]
    deadline_s = time.monotonic() + RUN_S
    try:
        for process in processes:
            process.start()
        for process in processes:
            process.join(max(0.0, deadline_s - time.monotonic()))
        codes = [process.exitcode for process in processes]
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()
            if process.pid is not None:
                process.join(10)
    assert all(code == 0 or rank in may_die for rank, code in enumerate(codes)), f"exit codes {codes}"
    results = [directory / f"rank-{rank}.pt" for rank in range(num_ranks)]
    return [torch.load(path, weights_only=True) if path.exists() else None for path in results]


def _rank_main(scenario: Scenario, rank: int, num_ranks: int, directory: str) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(str(Path(directory) / "store"), num_ranks),
        rank=rank,
        world_size=num_ranks,
        timeout=timedelta(seconds=GROUP_TIMEOUT_S),
    )
    result = scenario(rank, num_ranks)
    torch.save(result, Path(directory) / f"rank-{rank}.pt")
    dist.destroy_process_group()
    sys.stderr.flush()
