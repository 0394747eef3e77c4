"""Who is let in and who is next, and one thread that computes: what becomes of those who do not wait."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.errors import NonFiniteActivationError, RefusedError, TrainerError
from trainer.pipeline.worker import Runtime, WorkerConfig
from trainer.pipeline.worker.link import SuspendDetector
from trainer.pipeline.worker.runtime import EvaluationBudget, Job, Priority, WaitingJobs


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


async def _queued(runtime: Runtime, *jobs: Job) -> list[asyncio.Task[Any]]:
    tasks = [asyncio.create_task(runtime.compute(job)) for job in jobs]
    await asyncio.sleep(0)
    return tasks


async def _reason(asked: Awaitable[object], match: str | None = None) -> str:
    with pytest.raises(RefusedError, match=match) as caught:
        await asked
    return caught.value.reason


async def test_jobs_go_by_priority_and_those_of_a_group_in_one_call_and_fail_apart() -> None:
    calls: list[list[int]] = []

    def halve(items: Sequence[int]) -> list[int | TrainerError]:
        calls.append(list(items))
        return [item // 2 if item % 2 == 0 else NonFiniteActivationError(f"{item} is odd") for item in items]

    with _running(max_batch_size=6) as runtime:
        with _held(runtime):
            groups = {2: "g", 3: "g", 12: "h", 14: None, 4: "g", 6: "g"}
            forward = [Job(Priority.FORWARD, "a", it, halve, group, num_rows=2) for it, group in groups.items()]
            tail, backward = Job(Priority.TAIL, "a", 10, halve), Job(Priority.BACKWARD, "a", 8, halve)
            waits = await _queued(runtime, *forward, tail, backward)
            assert runtime.figures.queued == 8
        results = await asyncio.gather(*waits, return_exceptions=True)
        assert runtime.figures.computed == 8
    assert calls == [[8], [10], [2, 3, 4], [12], [14], [6]]
    assert [getattr(result, "value", None) for result in results] == [1, None, 6, 7, 2, 3, 5, 4]
    assert isinstance(results[1], NonFiniteActivationError)


async def test_a_request_that_is_given_up_or_too_late_leaves_the_queue_and_is_not_computed() -> None:
    computed: list[str] = []
    with _running() as runtime:
        with _held(runtime):
            (task,) = await _queued(runtime, _of(computed.append, item="given up", size_bytes=1000))
            assert runtime.figures.queued_bytes == 1000
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            assert (runtime.figures.queued, runtime.figures.queued_bytes) == (0, 0)
            late = _of(computed.append, item="late", begin_before_s=runtime.clock() - 1)
            (task,) = await _queued(runtime, late)
        assert await _reason(task) == "expired"
        await runtime.compute(_of(computed.append, item="wanted"))
    assert computed == ["wanted"]


async def test_an_error_of_a_job_is_that_jobs_and_a_device_that_is_lost_ends_the_runtime_and_says_so() -> None:
    def fail(error: Exception) -> None:
        raise error

    with _running() as runtime:
        with pytest.raises(NonFiniteActivationError):
            await runtime.compute(_of(fail, item=NonFiniteActivationError("not finite")))
        assert await _reason(runtime.compute(_of(fail, item=RuntimeError("memory"))), "RuntimeError") == "internal"
        assert (await runtime.compute(_of(len, item="abc"))).value == 3
        refused = 0
        while not runtime.failure.done():
            assert refused < 100
            await _reason(runtime.compute(_of(fail, item=RuntimeError("CUDA error: device-side assert triggered"))))
            refused += 1
            await asyncio.sleep(0.001)
        assert refused >= 10
        with pytest.raises(TrainerError, match="10 in a row"):
            runtime.failure.result()


async def test_between_runs_in_the_compute_thread_after_jobs_and_when_woken_and_may_end_the_runtime() -> None:
    threads: list[str] = []

    def between() -> None:
        threads.append(threading.current_thread().name)
        if len(threads) >= 3:
            raise TrainerError("the loss stayed NaN")

    with _running(between) as runtime:
        await runtime.control(lambda: None)
        while not runtime.failure.done():
            runtime.wake()
            await asyncio.sleep(0.001)
        with pytest.raises(TrainerError, match="stayed NaN"):
            runtime.failure.result()
        assert await _reason(runtime.compute(_of(str))) == "stopping"
    assert threads == ["genesis-compute"] * 3


async def test_when_jobs_are_refused_nothing_but_its_own_business_is_computed() -> None:
    done: list[str] = []
    with _running() as runtime:
        with _held(runtime):
            waits = await _queued(runtime, *(_of(done.append, priority, "waits") for priority in list(Priority)[1:]))
            waits += await _queued(runtime, _of(done.append, item="owed", is_owed=True))
            handed_over = asyncio.create_task(runtime.control(lambda: done.append("control")))
            await asyncio.sleep(0)
            runtime.refuse_jobs()
            assert runtime.figures.queued == 1
            assert {await _reason(refused, "going down") for refused in waits} == {"stopping"}
        await handed_over
        for is_owed in (False, True):
            await _reason(runtime.compute(_of(done.append, item="comes", is_owed=is_owed)), "going down")
        with pytest.raises(RefusedError, match="going down"):
            runtime.check_room(Priority.BACKWARD, "a", 1)
    with _running() as runtime:  # The compute thread itself may say so.
        with _held(runtime):
            last = asyncio.create_task(runtime.control(runtime.refuse_jobs))
            (waits_too,) = await _queued(runtime, _of(done.append, Priority.BACKWARD, "waits", is_owed=True))
        await last
        await _reason(waits_too, "going down")
    assert done == ["control"]


# -- admission ---------------------------------------------------------------------------------------------------------

MIB = 1 << 20


def _waits(priority: Priority, owner: str = "a", **changes: Any) -> Job:
    return Job(priority, owner, None, lambda items: items, **changes)


def _waiting(**changes: Any) -> WaitingJobs:
    return WaitingJobs(WorkerConfig(**changes))


def _served(waiting: WaitingJobs, number: int, each_s: float) -> list[str]:
    """Computes so many jobs, one after another; whose they were."""
    order = []
    for _ in range(number):
        (job,) = waiting.take()
        waiting.served(job.owner, each_s)
        order.append(job.owner)
    return order


def _add(waiting: WaitingJobs, *jobs: Job) -> None:
    for job in jobs:
        waiting.check_room(job.priority, job.owner, job.size_bytes, 1.0)
        waiting.add(job, 0.0)


@pytest.mark.slow
@given(st.lists(st.sampled_from(list(Priority)), min_size=1, max_size=30))
def test_backward_before_tail_before_forward_and_the_oldest_of_each_first(prioritys: list[Priority]) -> None:
    waiting = _waiting()
    jobs = [_waits(priority) for priority in prioritys]
    _add(waiting, *jobs)
    taken = [waiting.take()[0] for _ in jobs]
    assert taken == sorted(jobs, key=lambda job: (job.priority, jobs.index(job)))
    assert waiting.take() == []
    assert (len(waiting), waiting.size_bytes) == (0, 0)


def test_a_driver_may_have_so_many_requests_waiting_and_forward_requests_do_not_fill_the_queue() -> None:
    waiting = _waiting(max_queue_per_driver=3, max_queue_bytes=100 * MIB)
    _add(waiting, *[_waits(Priority.BACKWARD) for _ in range(3)])
    with pytest.raises(RefusedError, match=r"try again in 1\.0 s") as caught:
        waiting.check_room(Priority.BACKWARD, "a", 0, 1.0)
    assert caught.value.reason == "busy"
    waiting.check_room(Priority.BACKWARD, "b", 0, 1.0)
    waiting.check_room(Priority.CONTROL, "a", 0, 1.0)
    _add(waiting, _waits(Priority.FORWARD, "b", size_bytes=70 * MIB))
    with pytest.raises(RefusedError):
        waiting.check_room(Priority.FORWARD, "c", 10 * MIB, 1.0)
    _add(waiting, _waits(Priority.TAIL, "c", size_bytes=10 * MIB))


@pytest.mark.parametrize("num_flooding", [1, 2, 5])
def test_flooding_drivers_leave_room_for_another(num_flooding: int) -> None:
    waiting = _waiting(max_queue_bytes=100 * MIB, max_queue_per_driver=1000)
    for owner in [f"flood {number}" for number in range(num_flooding)] * 200:
        try:
            _add(waiting, _waits(Priority.BACKWARD, owner, size_bytes=MIB))
        except RefusedError:
            continue
    share = 100 // (num_flooding + 1)
    assert waiting.size_bytes == pytest.approx(num_flooding * share * MIB, abs=(num_flooding + 1) * MIB)
    _add(waiting, _waits(Priority.BACKWARD, "another", size_bytes=8 * MIB))


def test_a_driver_that_was_served_much_more_waits_whatever_it_asks_for() -> None:
    waiting = _waiting(max_compute_lead_s=2.0)
    _add(waiting, *(_waits(Priority.BACKWARD, "flood") for _ in range(20)))
    _add(waiting, *(_waits(Priority.FORWARD, "meek") for _ in range(5)))
    order = _served(waiting, 12, 0.5)
    assert order[:5] == ["flood"] * 5  # The lead, and one more that finds out.
    assert order[5:].count("meek") >= 3


def test_evaluations_have_a_share_of_the_time_that_is_not_saved_up() -> None:
    now_s = [1e6]
    evaluations = EvaluationBudget(lambda: now_s[0])
    for compute_s in (5.0, 7.0):
        evaluations.check("a")
        evaluations.spend("a", compute_s)
    with pytest.raises(RefusedError, match="took more"):
        evaluations.check("a")
    with pytest.raises(RefusedError, match="all drivers"):
        evaluations.check("another")
    now_s[0] += 4.1
    evaluations.check("another")
    with pytest.raises(RefusedError, match="this driver"):
        evaluations.check("a")
    now_s[0] += 4.1
    evaluations.check("a")


@pytest.mark.parametrize(
    ("beats_s", "now_s", "sent_by_s"),
    [
        pytest.param((0.0, 0.25, 1.0, 1.25), 1.4, {0.1: 0.1, 1.0: 1.0, 1.4: 1.4}, id="never suspended"),
        pytest.param((0.0, 0.25, 60.0), 60.5, {0.1: 0.1, 60.0: 0.25, 60.5: 0.25}, id="read after a suspension"),
        pytest.param((0.0, 0.25), 60.0, {60.0: 0.25}, id="read before the beat"),
        pytest.param((0.0, 60.0, 60.25, 90.0, 90.25), 90.3, {90.3: 0.0}, id="suspended again while still reading"),
    ],
)
def test_a_request_may_have_been_sent_when_the_process_was_suspended(beats_s, now_s, sent_by_s):
    clock = [0.0]
    detector = SuspendDetector(lambda: clock[0])
    for clock[0] in beats_s:
        detector.beat()
    clock[0] = now_s
    assert {received_s: detector.sent_by_s(received_s) for received_s in sent_by_s} == sent_by_s
