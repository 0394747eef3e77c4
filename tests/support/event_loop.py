"""Tests that are coroutines: each in an event loop of its own, with a deadline, and nothing left behind it."""

from __future__ import annotations

import asyncio
import functools
import gc
from collections.abc import Awaitable, Callable
from typing import Any, ParamSpec

ParamsP = ParamSpec("ParamsP")

DEADLINE_S = 100.0
SETTLE_S = 3.0


def on_event_loop(test: Callable[ParamsP, Awaitable[None]]) -> Callable[ParamsP, None]:
    """Runs a coroutine function as a test; it fails on tasks still there at its end, and on errors nobody looked at."""

    async def run(unseen: list[dict[str, Any]], *args: ParamsP.args, **kwargs: ParamsP.kwargs) -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _loop, context: unseen.append(context))
        async with asyncio.timeout(DEADLINE_S):
            await test(*args, **kwargs)
        await _until_alone()

    @functools.wraps(test)
    def wrapper(*args: ParamsP.args, **kwargs: ParamsP.kwargs) -> None:
        unseen: list[dict[str, Any]] = []
        asyncio.run(run(unseen, *args, **kwargs))
        # What was left open, or failed unseen, says so when it is collected: here, so that the right test fails.
        gc.collect()  # Not of modules and tests, which `tests/conftest.py` has frozen.
        assert not unseen, unseen

    return wrapper


async def _until_alone() -> None:
    """gRPC's own tasks end some turns of the loop after the calls they belong to."""
    this = asyncio.current_task()
    try:
        async with asyncio.timeout(SETTLE_S):
            while asyncio.all_tasks() != {this}:
                await asyncio.sleep(0.005)
    except TimeoutError:
        raise AssertionError(f"left running: {asyncio.all_tasks() - {this}}") from None
