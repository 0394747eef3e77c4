"""Chains that break: who is named, what is counted, and that asking again the same way mends what can be mended."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.support.event_loop import on_event_loop
from tests.support.model_configs import random_tokens
from tests.support.stage_driver import StageDriver, running_driver
from tests.support.stage_worker import RunningWorker, WorkerSetup, held, running_worker, until
from trainer.errors import RefusedError

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


async def _refused(driver: StageDriver, workers: list[RunningWorker], **changes: object) -> RefusedError:
    with pytest.raises(RefusedError) as caught:
        await driver.chain(workers, KEY, IDS, LABELS, **changes)
    return caught.value


def _counts(workers: list[RunningWorker]) -> list[int]:
    return [running.worker.replica.accumulated.num_micro_batches for running in workers]


@on_event_loop
async def test_a_later_worker_that_is_gone_is_named_and_another_takes_its_place() -> None:
    async with _chain() as (workers, driver), running_worker(SETUPS["tail"]) as other_tail:
        tail = workers[2]
        await tail.endpoint.stop()
        error = await _refused(driver, workers)
        assert error.reason == "hop"
        assert f"tail {tail.endpoint.peer_id}: " in str(error)
        assert f"body-1 {workers[1].endpoint.peer_id}: " not in str(error)
        workers[2] = other_tail
        assert (await driver.chain(workers, KEY, IDS, LABELS)).body.applied == ("head", "body-1", "tail")
        assert _counts(workers) == [1, 1, 1]


@on_event_loop
async def test_an_answer_that_was_lost_on_the_way_is_had_by_asking_again_the_same_way() -> None:
    async with _chain() as (workers, driver):
        async with held(workers[1]) as release:
            asked = asyncio.create_task(driver.chain(workers, KEY, IDS, LABELS))
            await until(lambda: workers[1].worker.runtime.figures.queued == 1)
            asked.cancel()
            await asyncio.gather(asked, return_exceptions=True)
            await until(lambda: workers[1].worker.runtime.figures.queued == 0)
            release()
        assert _counts(workers) == [0, 0, 0]
        first = await driver.chain(workers, KEY, IDS, LABELS)
        again = await driver.chain(workers, KEY, IDS, LABELS)
        assert again.body == first.body
        assert _counts(workers) == [1, 1, 1]


@on_event_loop
async def test_counted_behind_and_not_here_is_said_and_a_second_head_finds_the_answers() -> None:
    async with _chain() as (workers, driver), running_worker(SETUPS["head"]) as other_head:
        await driver.applied(workers[0], KEY)
        backward = workers[0].worker.replica.backward

        def fail(*arguments: object, **options: object) -> object:
            raise RefusedError("expired", "a stop of some seconds")

        workers[0].worker.replica.backward = fail  # type: ignore[method-assign,assignment]
        error = await _refused(driver, workers)
        assert error.reason == "partly"
        assert _counts(workers) == [0, 1, 1]
        workers[0].worker.replica.backward = backward  # type: ignore[method-assign]
        reply = await driver.chain([other_head, *workers[1:]], KEY, IDS, LABELS)
        assert reply.body.applied == ("head", "body-1", "tail")
        assert _counts([other_head, *workers[1:]]) == [1, 1, 1]


@on_event_loop
async def test_refusals_of_later_workers_keep_their_reason_and_name() -> None:
    setups = [SETUPS["head"], SETUPS["body-1"], replace(SETUPS["tail"], worker={"max_request_tokens": 4})]
    async with _chain(setups) as (workers, driver):
        error = await _refused(driver, workers)
        assert error.reason == "hop-size"
        assert str(error).count(workers[2].endpoint.peer_id) == 1
        assert _counts(workers) == [0, 0, 0]
        assert all(running.worker.replica.cached_bytes == 0 for running in workers)
        assert (await _refused(driver, workers, route=())).reason == "malformed"
        assert (await driver.status(workers[0])).refused == {"hop-size": 1, "malformed": 1}


@on_event_loop
async def test_a_later_worker_that_answers_nonsense_is_named() -> None:
    async with _chain() as (workers, driver):
        link = workers[1].worker.service._link
        gradient = link.gradient

        async def nonsense(value: Tensor) -> dict[str, Tensor]:
            return {"gradient": torch.full_like(value, float("nan"))}

        link.gradient = nonsense  # type: ignore[method-assign]
        error = await _refused(driver, workers)
        assert error.reason == "hop-malformed-answer"
        assert str(error).startswith(f"peer {workers[0].endpoint.peer_id[:12]}")
        assert f"body-1 {workers[1].endpoint.peer_id}: " in str(error)
        link.gradient = gradient  # type: ignore[method-assign]
        assert _counts(workers) == [0, 1, 1]


@on_event_loop
async def test_too_little_time_is_expired_before_anybody_is_asked() -> None:
    async with _chain() as (workers, driver):
        assert (await _refused(driver, workers, apply_within_s=0.0)).reason == "expired"
        assert _counts(workers) == [0, 0, 0]
