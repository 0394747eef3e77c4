"""The node's event loop as other threads see it, while it goes on and once it has ended."""

from __future__ import annotations

import asyncio
import threading

import pytest

from trainer.errors import TrainerError
from trainer.run.node.loop_thread import LoopThread


def test_whoever_waits_for_a_loop_that_ends_is_told_so() -> None:
    loop = LoopThread("ends")
    loop.start()
    began = threading.Event()

    async def wait() -> None:
        began.set()
        await asyncio.sleep(60)

    ending = threading.Thread(target=lambda: (began.wait(10), loop.stop()))
    ending.start()
    with pytest.raises(TrainerError, match="has ended"):
        loop.run(wait(), 30)
    ending.join(10)
    with pytest.raises(TrainerError, match="has ended"):
        loop.run(asyncio.sleep(0), 10)
