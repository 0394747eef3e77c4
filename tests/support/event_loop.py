"""Tests that are coroutines: each in an event loop of its own, with a deadline, and nothing left running after it."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable
from typing import ParamSpec

ParamsP = ParamSpec("ParamsP")

DEADLINE_S = 60.0


def on_event_loop(test: Callable[ParamsP, Awaitable[None]]) -> Callable[ParamsP, None]:
    """Runs a coroutine function as a test; tasks that are still there at its end fail it."""

    async def run(*args: ParamsP.args, **kwargs: ParamsP.kwargs) -> None:
        async with asyncio.timeout(DEADLINE_S):
            await test(*args, **kwargs)
        await asyncio.sleep(0)
        left = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        assert not left, left

    @functools.wraps(test)
    def wrapper(*args: ParamsP.args, **kwargs: ParamsP.kwargs) -> None:
        asyncio.run(run(*args, **kwargs))

    return wrapper
