"""Workers in processes of their own that are stopped, continued and killed: what is told is what was counted."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator

import pytest
import torch

from tests.support.model_configs import random_tokens
from tests.support.stage_worker import TAIL_INPUT, StageProcess, WorkerSetup, running_driver, stage_worker_processes
from trainer.errors import PeerUnavailableError, RefusedError
from trainer.pipeline.protocol.wire import wire_ids

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def workers() -> Iterator[list[StageProcess]]:
    """One worker a stage."""
    options = {"max_queue_per_driver": 8, "reply_cache_bytes": 1 << 20}
    setups = [WorkerSetup(stage, worker=options) for stage in ("head", "body-1", "tail")]
    with stage_worker_processes(setups) as processes:
        yield processes


async def test_under_stops_what_the_driver_was_told_is_what_is_counted(workers: list[StageProcess]) -> None:
    """Hub and chain alike; each micro-batch is asked for again until it is clear."""
    ids, labels = random_tokens(64, 2, 8)
    async with running_driver() as driver:

        async def take(row: int) -> None:
            async with asyncio.timeout(40):
                while True:
                    with contextlib.suppress(RefusedError, PeerUnavailableError):
                        if row % 4:
                            await driver.chain(workers, f"e0.s0.r{row}", ids, labels, apply_within_s=3.0)
                        else:
                            await driver.hub(workers, f"e0.s0.r{row}", ids, labels)
                        return
                    await asyncio.sleep(0.1)

        async def disturb() -> None:
            for number in range(6):
                worker = workers[number % 3]
                worker.stop()
                await asyncio.sleep(0.3 + 0.2 * number)
                worker.resume()
                await asyncio.sleep(0.1)

        await asyncio.gather(disturb(), *(take(row) for row in range(0, 40, 2)))
        keys = [f"e0.s0.r{row}" for row in range(0, 40, 2)]
        for worker in workers:
            assert set(await driver.applied(worker, *keys)) == set(keys)
            status = await driver.status(worker)
            assert (status.applied, status.num_tokens) == (20, 20 * 16)


async def test_what_lay_in_the_socket_of_a_stopped_worker_is_not_counted_late(workers: list[StageProcess]) -> None:
    async with running_driver() as driver:
        await driver.tail(workers[2], "e1.s0.r0", TAIL_INPUT)
        workers[2].stop()
        asked = asyncio.create_task(driver.tail(workers[2], "e1.s0.r2", TAIL_INPUT, apply_within_s=1.0))
        await asyncio.sleep(2.5)
        workers[2].resume()
        with pytest.raises(RefusedError) as caught:
            await asked
        assert caught.value.reason == "expired"
        assert await driver.applied(workers[2], "e1.s0.r0", "e1.s0.r2") == ("e1.s0.r0",)


async def test_garbage_and_floods_leave_no_memory_behind(workers: list[StageProcess]) -> None:
    tail, given = workers[2], {"activation": torch.randn(32, 32, 16), "labels": wire_ids(random_tokens(64, 32, 32)[1])}
    spoilt = {**given, "activation": given["activation"] * float("nan")}
    async with running_driver() as driver:

        async def flood(start: int) -> None:
            asked = [driver.tail(tail, f"e2.s0.r{row}", (given, spoilt)[row % 2]) for row in range(start, start + 24)]
            for answer in (await asyncio.gather(*asked, return_exceptions=True))[1::2]:
                assert isinstance(answer, RefusedError)
                assert answer.reason in ("nonfinite", "busy")

        for start in range(0, 240, 24):
            await flood(start)
        before = tail.resident_bytes()
        for start in range(240, 960, 24):
            await flood(start)
        assert tail.resident_bytes() - before < 24 << 20
        assert (await driver.status(tail)).reply_bytes <= 1 << 20
