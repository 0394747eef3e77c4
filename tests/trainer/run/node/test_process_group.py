"""Ranks that start again meet each other, and not what was left of those before them."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist

from trainer.run.node.process_group import meeting_prefix

TIMEOUT_S = 20.0


@pytest.fixture
def server() -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=TIMEOUT_S))


def meet(server: dist.TCPStore, size: int, ranks: range, timeout_s: float = TIMEOUT_S) -> list[str]:
    def one(rank: int) -> str:
        store = dist.TCPStore("127.0.0.1", server.port, is_master=False, timeout=timedelta(seconds=timeout_s))
        return meeting_prefix(store, rank, size, timeout_s)

    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(one, ranks))


@pytest.mark.parametrize("size", [1, 2, 4])
def test_ranks_of_one_start_share_a_prefix_that_no_other_start_has(server: dist.TCPStore, size: int) -> None:
    starts = [meet(server, size, range(size)) for _ in range(3)]
    assert [len(set(prefixes)) for prefixes in starts] == [1, 1, 1]
    assert len({prefixes[0] for prefixes in starts}) == 3


@pytest.mark.parametrize("alive", [range(1), range(1, 4)])
def test_a_start_that_some_ranks_never_came_to_is_not_taken_for_the_next(server: dist.TCPStore, alive: range) -> None:
    """Killed in the midst of starting: rank 0 waits for others, or others for rank 0; all of them end."""
    with pytest.raises(RuntimeError):
        meet(server, 4, alive, timeout_s=0.5)
    assert len(set(meet(server, 4, range(4)))) == 1
