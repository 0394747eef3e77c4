"""Who is let in, who is next, what evaluations may take; and when a request was received by a suspended process."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.errors import RefusedError
from trainer.pipeline.worker import WorkerConfig
from trainer.pipeline.worker.admission import EvaluationBudget, Job, Priority, WaitingJobs
from trainer.pipeline.worker.received import SuspendDetector

MIB = 1 << 20


def _job(priority: Priority, owner: str = "a", **changes: object) -> Job:
    return Job(priority, owner, None, lambda items: items, **changes)  # type: ignore[arg-type]


def _waiting(**changes: object) -> WaitingJobs:
    return WaitingJobs(WorkerConfig(**changes))  # type: ignore[arg-type]


def _add(waiting: WaitingJobs, *jobs: Job) -> None:
    for job in jobs:
        waiting.check_room(job.priority, job.owner, job.size_bytes, 1.0)
        waiting.add(job, 0.0)


@pytest.mark.slow
@given(st.lists(st.sampled_from(list(Priority)), min_size=1, max_size=30))
def test_backward_before_tail_before_forward_and_the_oldest_of_each_first(prioritys: list[Priority]) -> None:
    waiting = _waiting()
    jobs = [_job(priority) for priority in prioritys]
    _add(waiting, *jobs)
    taken = [waiting.take()[0] for _ in jobs]
    assert taken == sorted(jobs, key=lambda job: (job.priority, jobs.index(job)))
    assert waiting.take() == []
    assert (len(waiting), waiting.size_bytes) == (0, 0)


def test_forward_requests_of_one_shape_go_together_up_to_the_batch() -> None:
    waiting = _waiting(max_batch_size=4)
    short = [_job(Priority.FORWARD, group=8, num_rows=2) for _ in range(3)]
    long = _job(Priority.FORWARD, group=16, num_rows=1)
    alone = _job(Priority.FORWARD, num_rows=1)
    _add(waiting, short[0], long, short[1], alone, short[2])
    assert [waiting.take() for _ in range(4)] == [short[:2], [long], [alone], [short[2]]]


def test_a_driver_may_have_so_many_requests_waiting() -> None:
    waiting = _waiting(max_queue_per_driver=3)
    _add(waiting, *[_job(Priority.BACKWARD) for _ in range(3)])
    with pytest.raises(RefusedError, match=r"try again in 1\.0 s") as caught:
        waiting.check_room(Priority.BACKWARD, "a", 0, 1.0)
    assert caught.value.reason == "busy"
    waiting.check_room(Priority.BACKWARD, "b", 0, 1.0)
    waiting.check_room(Priority.CONTROL, "a", 0, 1.0)


@pytest.mark.parametrize("num_flooding", [1, 2, 5])
def test_flooding_drivers_leave_room_for_another(num_flooding: int) -> None:
    waiting = _waiting(max_queue_bytes=100 * MIB, max_queue_per_driver=1000)
    for owner in [f"flood {number}" for number in range(num_flooding)] * 200:
        try:
            _add(waiting, _job(Priority.BACKWARD, owner, size_bytes=MIB))
        except RefusedError:
            continue
    share = 100 // (num_flooding + 1)
    assert waiting.size_bytes == pytest.approx(num_flooding * share * MIB, abs=(num_flooding + 1) * MIB)
    _add(waiting, _job(Priority.BACKWARD, "another", size_bytes=8 * MIB))


def test_forward_requests_do_not_fill_the_queue() -> None:
    waiting = _waiting(max_queue_bytes=100 * MIB)
    _add(waiting, _job(Priority.FORWARD, size_bytes=70 * MIB))
    with pytest.raises(RefusedError):
        waiting.check_room(Priority.FORWARD, "b", 10 * MIB, 1.0)
    _add(waiting, _job(Priority.TAIL, "b", size_bytes=10 * MIB))


def test_a_driver_that_was_served_much_more_waits_whatever_it_asks_for() -> None:
    waiting = _waiting(max_compute_lead_s=2.0)
    order = []
    _add(
        waiting,
        *[_job(Priority.BACKWARD, "flood") for _ in range(20)],
        *[_job(Priority.FORWARD, "meek") for _ in range(5)],
    )
    for _ in range(12):
        (job,) = waiting.take()
        order.append(job.owner)
        waiting.served(job.owner, 0.5)
    assert order[:5] == ["flood"] * 5  # The lead, and one more that finds out.
    assert order[5:].count("meek") >= 3


def test_who_comes_back_from_idling_has_no_credit() -> None:
    waiting = _waiting(max_compute_lead_s=1.0)
    for _ in range(10):
        _add(waiting, _job(Priority.FORWARD, "busy"))
        waiting.take()
        waiting.served("busy", 10.0)
    _add(waiting, _job(Priority.FORWARD, "busy"))
    assert waiting.take()[0].owner == "busy"
    _add(
        waiting,
        *[_job(Priority.BACKWARD, "late") for _ in range(9)],
        *[_job(Priority.FORWARD, "busy") for _ in range(9)],
    )
    order = []
    for _ in range(9):
        (job,) = waiting.take()
        order.append(job.owner)
        waiting.served(job.owner, 1.0)
    assert "busy" in order[:4]


def test_what_nobody_waits_for_is_taken_out() -> None:
    waiting = _waiting()
    late, timely = _job(Priority.FORWARD, begin_before_s=5.0, size_bytes=7), _job(Priority.FORWARD, begin_before_s=9.0)
    _add(waiting, late, timely)
    assert waiting.take_if(lambda job: job.begin_before_s < 6.0) == [late]
    waiting.remove(late)
    assert (waiting.size_bytes, waiting.take()) == (0, [timely])


def test_drivers_by_the_thousand_do_not_pile_up() -> None:
    waiting = _waiting()
    for number in range(5000):
        _add(waiting, _job(Priority.FORWARD, f"driver {number}"))
        waiting.take()
        waiting.served(f"driver {number}", 0.001)
    assert len(waiting._served_s) <= 1025


def _evaluations() -> tuple[EvaluationBudget, list[float]]:
    now_s = [0.0]
    return EvaluationBudget(lambda: now_s[0]), now_s


def test_a_driver_that_had_its_share_of_evaluations_waits_and_the_others_do_not() -> None:
    evaluations, now_s = _evaluations()
    evaluations.check("a")
    evaluations.spend("a", 5.0)
    evaluations.check("a")
    evaluations.spend("a", 7.0)
    with pytest.raises(RefusedError, match="this driver"):
        evaluations.check("a")
    now_s[0] = 8.2
    evaluations.check("a")


def test_evaluations_of_all_drivers_together_have_half_of_the_time() -> None:
    evaluations, now_s = _evaluations()
    for number in range(6):
        evaluations.spend(f"driver-{number}", 2.0)
    with pytest.raises(RefusedError, match="all drivers"):
        evaluations.check("another")
    now_s[0] = 4.1
    evaluations.check("another")


def test_a_share_of_evaluations_that_was_not_used_is_not_saved_up() -> None:
    evaluations, now_s = _evaluations()
    now_s[0] = 1e6
    evaluations.spend("a", 20.0)
    with pytest.raises(RefusedError, match="took more"):
        evaluations.check("a")


@pytest.mark.parametrize(
    ("beats_s", "now_s", "sent_by_s"),
    [
        pytest.param((0.0, 0.25, 1.0, 1.25), 1.4, {0.1: 0.1, 1.0: 1.0, 1.4: 1.4}, id="never suspended"),
        pytest.param((0.0, 0.25, 60.0), 60.5, {0.1: 0.1, 60.0: 0.25, 60.5: 0.25}, id="read after a suspension"),
        pytest.param((0.0, 0.25, 60.0, 60.5), 61.5, {61.5: 61.5}, id="read long after one"),
        pytest.param((0.0, 0.25), 60.0, {60.0: 0.25}, id="read before the beat"),
        pytest.param((0.0, 60.0, 60.25, 90.0, 90.25), 90.3, {90.3: 0.0}, id="suspended again while still reading"),
        pytest.param((), 60.0, {59.0: 59.0}, id="no beat yet"),
    ],
)
def test_a_request_may_have_been_sent_when_the_process_was_suspended(
    beats_s: tuple[float, ...], now_s: float, sent_by_s: dict[float, float]
) -> None:
    clock = [0.0]
    detector = SuspendDetector(lambda: clock[0])
    for clock[0] in beats_s:
        detector.beat()
    clock[0] = now_s
    assert {received_s: detector.sent_by_s(received_s) for received_s in sent_by_s} == sent_by_s
