"""One thread computes: in what order, for how many at once, and what becomes of those who do not wait."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

from tests.support.event_loop import on_event_loop
from trainer.errors import NonFiniteActivationError, RefusedError, TrainerError
from trainer.pipeline.worker import Runtime, WorkerConfig
from trainer.pipeline.worker.admission import Job, Priority


@contextmanager
def _running(between: Callable[[], None] | None = None, **config: Any) -> Iterator[Runtime]:
    runtime = Runtime(WorkerConfig(**config), between=between)
    runtime.start()
    try:
        yield runtime
    finally:
        assert runtime.stop(10)


def _of(function: Callable[[Any], Any], priority: Priority = Priority.FORWARD, item: Any = None, **changes: Any) -> Job:
    return Job(priority, "a", item, lambda items: [function(item) for item in items], **changes)


@contextmanager
def _held(runtime: Runtime) -> Iterator[None]:
    """Holds the compute thread up within the block."""
    entered, released = threading.Event(), threading.Event()

    def wait(_: object) -> None:
        entered.set()
        assert released.wait(10)

    runtime.submit(_of(wait, Priority.CONTROL))
    assert entered.wait(10)
    try:
        yield
    finally:
        released.set()


async def _queued(runtime: Runtime, *jobs: Job, owed: bool = False) -> list[asyncio.Task[Any]]:
    tasks = [asyncio.create_task(runtime.compute(job, owed=owed)) for job in jobs]
    await asyncio.sleep(0)
    return tasks


async def _reason(asked: Awaitable[object], match: str | None = None) -> str:
    with pytest.raises(RefusedError, match=match) as caught:
        await asked
    return caught.value.reason


@on_event_loop
async def test_jobs_go_by_priority_and_those_of_a_group_in_one_call_and_fail_apart() -> None:
    calls: list[list[int]] = []

    def halve(items: Sequence[int]) -> list[int | TrainerError]:
        calls.append(list(items))
        return [item // 2 if item % 2 == 0 else NonFiniteActivationError(f"{item} is odd") for item in items]

    with _running(max_batch_size=3) as runtime:
        with _held(runtime):
            grouped = [Job(Priority.FORWARD, "a", item, halve, group="g") for item in (2, 3, 4, 6)]
            others = [
                Job(priority, "a", item, halve) for priority, item in zip(list(Priority)[1:3], (8, 10), strict=True)
            ]
            waits = await _queued(runtime, *grouped, *reversed(others))
            assert runtime.figures.queued == 6
        results = await asyncio.gather(*waits, return_exceptions=True)
        assert runtime.figures.computed == 6
    assert calls == [[8], [10], [2, 3, 4], [6]]
    assert [getattr(result, "value", None) for result in results] == [1, None, 2, 3, 5, 4]
    assert isinstance(results[1], NonFiniteActivationError)


@on_event_loop
async def test_a_request_that_is_given_up_or_too_late_leaves_the_queue_and_is_not_computed() -> None:
    computed: list[str] = []
    with _running() as runtime:
        with _held(runtime):
            (task,) = await _queued(runtime, _of(computed.append, item="given up", size_bytes=1000))
            assert runtime.figures.queued_bytes == 1000
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            assert (runtime.figures.queued, runtime.figures.queued_bytes) == (0, 0)
            late = _of(computed.append, item="late", begin_before_s=runtime.now_s - 1)
            (task,) = await _queued(runtime, late)
        assert await _reason(task) == "expired"
        await runtime.compute(_of(computed.append, item="wanted"))
    assert computed == ["wanted"]


@pytest.mark.slow
@on_event_loop
async def test_an_error_of_a_job_is_that_jobs_and_an_unforeseen_one_is_internal() -> None:
    def fail(error: Exception) -> None:
        raise error

    with _running() as runtime:
        with pytest.raises(NonFiniteActivationError):
            await runtime.compute(_of(fail, item=NonFiniteActivationError("not finite")))
        assert await _reason(runtime.compute(_of(fail, item=RuntimeError("memory"))), "RuntimeError") == "internal"
        assert (await runtime.compute(_of(len, item="abc"))).value == 3


@on_event_loop
async def test_a_device_that_is_lost_ends_the_runtime_and_says_so() -> None:
    def break_down(_: object) -> None:
        raise RuntimeError("CUDA error: device-side assert triggered")

    with _running() as runtime:
        refused = 0
        while not runtime.failure.done():
            assert refused < 100
            await _reason(runtime.compute(_of(break_down)))
            refused += 1
            await asyncio.sleep(0.001)
        assert refused >= 10
        with pytest.raises(TrainerError, match="10 in a row"):
            runtime.failure.result()


@on_event_loop
async def test_between_runs_in_the_compute_thread_after_every_job_and_when_woken() -> None:
    threads: list[str] = []
    woken = threading.Event()

    def between() -> None:
        threads.append(threading.current_thread().name)
        woken.set()

    with _running(between) as runtime:
        await runtime.control(lambda: None)
        while not threads:
            await asyncio.sleep(0.001)
        woken.clear()
        runtime.wake()
        assert await asyncio.get_running_loop().run_in_executor(None, woken.wait, 10)
    assert set(threads) == {"genesis-compute"}


@pytest.mark.slow
@on_event_loop
async def test_a_step_that_cannot_go_on_ends_the_runtime_and_says_so() -> None:
    def between() -> None:
        raise TrainerError("the loss stayed NaN")

    with _running(between) as runtime:
        with pytest.raises((TrainerError, RefusedError)):
            await asyncio.wrap_future(runtime.failure)
        assert await _reason(runtime.compute(_of(str))) == "stopping"


@on_event_loop
async def test_stopping_refuses_what_waits() -> None:
    runtime = Runtime(WorkerConfig())
    runtime.start()
    with _held(runtime):
        (task,) = await _queued(runtime, _of(str))
        stopping = asyncio.get_running_loop().run_in_executor(None, runtime.stop, 10)
        with pytest.raises(RefusedError):
            while True:
                runtime.check_room(Priority.CONTROL, "", 0)
                await asyncio.sleep(0.001)
    assert await _reason(task) == "stopping"
    assert await stopping
    assert runtime.failure.result() is None


@on_event_loop
async def test_figures_say_how_busy_it_is() -> None:
    clock = [100.0]

    def take_a_second(_: object) -> None:
        clock[0] += 1.0

    runtime = Runtime(WorkerConfig(), clock=lambda: clock[0])
    runtime.start()
    for _ in range(4):
        done = await runtime.compute(_of(take_a_second, num_rows=8))
        assert done.compute_s == 1.0
        clock[0] += 1.0
    figures = runtime.figures
    assert figures.rows_per_s == pytest.approx(8.0)
    assert figures.busy == pytest.approx(0.5, abs=0.1)
    assert (figures.batch_rows, figures.compute_s) == (8.0, 1.0)
    assert runtime.stop(10)


@on_event_loop
async def test_when_jobs_are_refused_nothing_but_its_own_business_is_computed() -> None:
    done: list[str] = []
    with _running() as runtime:
        with _held(runtime):
            waits = await _queued(runtime, *(_of(done.append, priority, "waits") for priority in list(Priority)[1:]))
            waits += await _queued(runtime, _of(done.append, item="owed"), owed=True)
            handed_over = asyncio.create_task(runtime.control(lambda: done.append("control")))
            await asyncio.sleep(0)
            runtime.refuse_jobs()
            assert runtime.figures.queued == 1
            assert {await _reason(refused, "going down") for refused in waits} == {"stopping"}
        await handed_over
        for owed in (False, True):
            await _reason(runtime.compute(_of(done.append, item="comes"), owed=owed), "going down")
        with pytest.raises(RefusedError, match="going down"):
            runtime.check_room(Priority.BACKWARD, "a", 1)
        await runtime.control(lambda: done.append("control"))
    assert done == ["control", "control"]


@on_event_loop
async def test_jobs_refused_by_the_compute_thread_itself_are_not_computed_afterwards() -> None:
    done: list[str] = []
    with _running() as runtime:
        with _held(runtime):
            last = asyncio.create_task(runtime.control(runtime.refuse_jobs))
            (waits,) = await _queued(runtime, _of(done.append, Priority.BACKWARD, "waits"), owed=True)
        await last
        await _reason(waits, "going down")
    assert not done
