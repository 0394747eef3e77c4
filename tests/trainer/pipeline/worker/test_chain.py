"""Chains that break: who is named, what is counted, and that asking again the same way mends what can be mended."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.support.model_configs import random_tokens
from tests.support.stage_worker import (
    RunningWorker,
    StageDriver,
    WorkerSetup,
    held,
    queued,
    running_driver,
    running_worker,
)
from tests.support.waiting import until
from trainer.errors import RefusedError
from trainer.network.rpc import Peer
from trainer.pipeline.protocol.messages import Hop

KEY = "e0.s0.r0"
IDS, LABELS = random_tokens(64, 2, 8)
SETUPS = {stage: WorkerSetup(stage) for stage in ("head", "body-1", "tail")}


@asynccontextmanager
async def _chain(
    setups: Sequence[WorkerSetup] = tuple(SETUPS.values()),
) -> AsyncIterator[tuple[list[RunningWorker], StageDriver]]:
    async with AsyncExitStack() as stack:
        workers = [await stack.enter_async_context(running_worker(setup)) for setup in setups]
        yield workers, await stack.enter_async_context(running_driver())


async def _refused(asking: StageDriver, workers: list[RunningWorker], **changes: object) -> RefusedError:
    with pytest.raises(RefusedError) as caught:
        await asking.chain(workers, KEY, IDS, LABELS, **changes)
    return caught.value


def _counts(workers: list[RunningWorker]) -> list[int]:
    return [running.worker.replica.accumulated.num_micro_batches for running in workers]


async def test_a_lost_answer_is_had_by_asking_again_and_a_later_worker_that_is_gone_is_named_and_replaced() -> None:
    async with _chain() as (workers, driver), running_worker(SETUPS["tail"]) as other_tail:
        async with held(workers[1]):
            (asked,) = await queued(workers[1], driver.chain(workers, KEY, IDS, LABELS))
            asked.cancel()
            await asyncio.gather(asked, return_exceptions=True)
            await until(lambda: workers[1].worker.runtime.figures.queued == 0)
        assert _counts(workers) == [0, 0, 0]
        first = await driver.chain(workers, KEY, IDS, LABELS)
        again = await driver.chain(workers, KEY, IDS, LABELS)
        assert again.body == first.body
        assert _counts(workers) == [1, 1, 1]
        tail, workers[2] = workers[2], other_tail
        await tail.endpoint.stop()
        error = await _refused(driver, [*workers[:2], tail], micro_batch="e0.s0.r2")
        assert error.reason == "hop"
        assert f"tail {tail.endpoint.peer_id}: " in str(error)
        assert f"body-1 {workers[1].endpoint.peer_id}: " not in str(error)
        reply = await driver.chain(workers, "e0.s0.r2", IDS, LABELS)
        assert reply.body.applied == ("head", "body-1", "tail")
        assert _counts(workers) == [2, 2, 1]


@pytest.mark.slow
async def test_nonsense_is_a_later_workers_and_what_is_counted_behind_alone_is_said_and_found_by_a_second_head():
    async with _chain() as (workers, driver), running_worker(SETUPS["head"]) as other_head:
        replica, link = workers[0].worker.replica, workers[1].worker.link
        gradient, backward = link.gradient, replica.backward

        async def nonsense(value: Tensor) -> dict[str, Tensor]:
            return {"gradient": torch.full_like(value, float("nan"))}

        def fail(*arguments: object, **options: object) -> object:
            raise RefusedError("expired", "a stop of some seconds")

        link.gradient = nonsense
        error = await _refused(driver, workers)
        assert error.reason == "hop-malformed-answer"
        assert str(error).startswith(f"peer {workers[0].endpoint.peer_id[:12]}")
        assert f"body-1 {workers[1].endpoint.peer_id}: " in str(error)
        assert _counts(workers) == [0, 1, 1]
        link.gradient, replica.backward = gradient, fail
        assert (await _refused(driver, workers, micro_batch="e0.s0.r2")).reason == "partly"
        assert _counts(workers) == [0, 2, 2]
        replica.backward = backward
        reply = await driver.chain([other_head, *workers[1:]], "e0.s0.r2", IDS, LABELS)
        assert reply.body.applied == ("head", "body-1", "tail")
        assert _counts([other_head, *workers[1:]]) == [1, 2, 2]


async def test_refusals_of_later_workers_keep_their_reason_and_name() -> None:
    setups = [SETUPS["head"], SETUPS["body-1"], replace(SETUPS["tail"], worker={"max_request_tokens": 4})]
    async with _chain(setups) as (workers, driver):
        error = await _refused(driver, workers)
        assert error.reason == "hop-size"
        assert str(error).count(workers[2].endpoint.peer_id) == 1
        assert _counts(workers) == [0, 0, 0]
        assert all(running.worker.replica.cached_bytes == 0 for running in workers)
        assert (await _refused(driver, workers, route=())).reason == "malformed"
        assert (await _refused(driver, workers, apply_within_s=0.0)).reason == "expired"
        assert (await driver.status(workers[0])).refused == {"hop-size": 1, "malformed": 1, "expired": 1}


class _Known:
    """Whom workers have heard of."""

    def __init__(self) -> None:
        self.drivers: set[str] = set()
        self.workers: dict[str, dict[str, Peer]] = {stage: {} for stage in SETUPS}

    @asynccontextmanager
    async def chain(self) -> AsyncIterator[tuple[list[RunningWorker], StageDriver]]:
        async with AsyncExitStack() as stack:
            workers = [await stack.enter_async_context(self.worker(stage)) for stage in SETUPS]
            driver = await stack.enter_async_context(running_driver())
            self.drivers.add(driver.endpoint.peer_id)
            yield workers, driver

    @asynccontextmanager
    async def worker(self, stage: str) -> AsyncIterator[RunningWorker]:
        async with running_worker(SETUPS[stage], drivers=lambda: self.drivers) as running:
            running.worker.service.workers = lambda stage: self.workers[stage]
            self.workers[stage][running.endpoint.peer_id] = running.peer
            yield running


async def test_a_chain_is_passed_on_by_workers_of_the_stage_before_for_a_driver_that_is_known() -> None:
    known = _Known()
    async with known.chain() as (workers, driver), known.worker("head") as other_head, running_driver() as body:
        known.workers["body-1"][body.endpoint.peer_id] = body.endpoint.peer
        for named in ("", "0" * 64):
            assert (await _refused(body, workers[2:], driver=named)).reason == "not-a-driver"
        assert (await _refused(body, workers[2:], driver=driver.endpoint.peer_id)).reason == "malformed"  # It has ids.
        assert _counts(workers) == [0, 0, 0]
        await driver.chain(workers, KEY, IDS, LABELS)
        again = await driver.chain([other_head, *workers[1:]], KEY, IDS, LABELS)
        assert again.body.applied == ("head", "body-1", "tail")
        assert _counts([other_head, *workers[1:]]) == [1, 1, 1], "whose micro-batch it is was not passed on"
        known.workers["head"].clear()
        error = await _refused(driver, workers, micro_batch="e0.s0.r2")
        assert error.reason == "hop-not-a-driver"
        assert f"body-1 {workers[1].endpoint.peer_id}: " in str(error)
        known.drivers.clear()
        assert (await _refused(driver, workers, micro_batch="e0.s0.r2")).reason == "not-a-driver"
        assert _counts(workers) == [1, 1, 1]


async def test_a_worker_connects_only_to_where_announced_workers_are() -> None:
    known = _Known()
    connections: list[object] = []
    server = await asyncio.start_server(lambda *streams: connections.append(streams), "127.0.0.1", 0)
    async with server, known.chain() as (workers, driver):
        elsewhere = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        places = {it.setup.stage: it.endpoint.peer_id for it in workers[1:]}
        route = tuple(Hop(stage=stage, peer_id=key, address=elsewhere) for stage, key in places.items())
        reply = await driver.chain(workers, KEY, IDS, LABELS, route=route)
        assert reply.body.applied == ("head", "body-1", "tail")
        unknown = route[0].model_copy(update={"peer_id": "0" * 64})
        error = await _refused(driver, workers, micro_batch="e0.s0.r2", route=(unknown, route[1]))
        assert (error.reason, "body-1 " + "0" * 64 in str(error)) == ("hop-busy", True)
        assert not connections
