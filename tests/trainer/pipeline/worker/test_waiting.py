"""Who is let into the queue, and who is next."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.errors import RefusedError
from trainer.pipeline.worker import WorkerConfig
from trainer.pipeline.worker.waiting import Job, Rank, WaitingJobs

MIB = 1 << 20


def _job(rank: Rank, owner: str = "a", **changes: object) -> Job:
    return Job(rank, owner, None, lambda items: items, **changes)  # type: ignore[arg-type]


def _waiting(**changes: object) -> WaitingJobs:
    return WaitingJobs(WorkerConfig(**changes))  # type: ignore[arg-type]


def _add(waiting: WaitingJobs, *jobs: Job) -> None:
    for job in jobs:
        waiting.check_room(job.rank, job.owner, job.size_bytes, 1.0)
        waiting.add(job, 0.0)


@pytest.mark.slow
@given(st.lists(st.sampled_from(list(Rank)), min_size=1, max_size=30))
def test_backward_before_tail_before_forward_and_the_oldest_of_each_first(ranks: list[Rank]) -> None:
    waiting = _waiting()
    jobs = [_job(rank) for rank in ranks]
    _add(waiting, *jobs)
    taken = [waiting.take()[0] for _ in jobs]
    assert taken == sorted(jobs, key=lambda job: (job.rank, jobs.index(job)))
    assert waiting.take() == []
    assert (len(waiting), waiting.size_bytes) == (0, 0)


def test_forward_requests_of_one_shape_go_together_up_to_the_batch() -> None:
    waiting = _waiting(max_batch_size=4)
    short = [_job(Rank.FORWARD, group=8, num_rows=2) for _ in range(3)]
    long = _job(Rank.FORWARD, group=16, num_rows=1)
    alone = _job(Rank.FORWARD, num_rows=1)
    _add(waiting, short[0], long, short[1], alone, short[2])
    assert [waiting.take() for _ in range(4)] == [short[:2], [long], [alone], [short[2]]]


def test_a_driver_may_have_so_many_requests_waiting() -> None:
    waiting = _waiting(max_queue_per_driver=3)
    _add(waiting, *[_job(Rank.BACKWARD) for _ in range(3)])
    with pytest.raises(RefusedError, match=r"try again in 1\.0 s") as caught:
        waiting.check_room(Rank.BACKWARD, "a", 0, 1.0)
    assert caught.value.reason == "busy"
    waiting.check_room(Rank.BACKWARD, "b", 0, 1.0)
    waiting.check_room(Rank.CONTROL, "a", 0, 1.0)


@pytest.mark.parametrize("num_flooding", [1, 2, 5])
def test_flooding_drivers_leave_room_for_another(num_flooding: int) -> None:
    waiting = _waiting(max_queue_bytes=100 * MIB, max_queue_per_driver=1000)
    for owner in [f"flood {number}" for number in range(num_flooding)] * 200:
        try:
            _add(waiting, _job(Rank.BACKWARD, owner, size_bytes=MIB))
        except RefusedError:
            continue
    share = 100 // (num_flooding + 1)
    assert waiting.size_bytes == pytest.approx(num_flooding * share * MIB, abs=(num_flooding + 1) * MIB)
    _add(waiting, _job(Rank.BACKWARD, "another", size_bytes=8 * MIB))


def test_forward_requests_do_not_fill_the_queue() -> None:
    waiting = _waiting(max_queue_bytes=100 * MIB)
    _add(waiting, _job(Rank.FORWARD, size_bytes=70 * MIB))
    with pytest.raises(RefusedError):
        waiting.check_room(Rank.FORWARD, "b", 10 * MIB, 1.0)
    _add(waiting, _job(Rank.TAIL, "b", size_bytes=10 * MIB))


def test_a_driver_that_was_served_much_more_waits_whatever_it_asks_for() -> None:
    waiting = _waiting(max_compute_lead_s=2.0)
    order = []
    _add(waiting, *[_job(Rank.BACKWARD, "flood") for _ in range(20)], *[_job(Rank.FORWARD, "meek") for _ in range(5)])
    for _ in range(12):
        (job,) = waiting.take()
        order.append(job.owner)
        waiting.served(job.owner, 0.5)
    assert order[:5] == ["flood"] * 5  # The lead, and one more that finds out.
    assert order[5:].count("meek") >= 3


def test_who_comes_back_from_idling_has_no_credit() -> None:
    waiting = _waiting(max_compute_lead_s=1.0)
    for _ in range(10):
        _add(waiting, _job(Rank.FORWARD, "busy"))
        waiting.take()
        waiting.served("busy", 10.0)
    _add(waiting, _job(Rank.FORWARD, "busy"))
    assert waiting.take()[0].owner == "busy"
    _add(waiting, *[_job(Rank.BACKWARD, "late") for _ in range(9)], *[_job(Rank.FORWARD, "busy") for _ in range(9)])
    order = []
    for _ in range(9):
        (job,) = waiting.take()
        order.append(job.owner)
        waiting.served(job.owner, 1.0)
    assert "busy" in order[:4]


def test_what_nobody_waits_for_is_taken_out() -> None:
    waiting = _waiting()
    late, timely = _job(Rank.FORWARD, begin_before_s=5.0, size_bytes=7), _job(Rank.FORWARD, begin_before_s=9.0)
    _add(waiting, late, timely)
    assert waiting.take_expired(6.0) == [late]
    assert not waiting.remove(late)
    assert (waiting.size_bytes, waiting.take()) == (0, [timely])


def test_drivers_by_the_thousand_do_not_pile_up() -> None:
    waiting = _waiting()
    for number in range(5000):
        _add(waiting, _job(Rank.FORWARD, f"driver {number}"))
        waiting.take()
        waiting.served(f"driver {number}", 0.001)
    assert len(waiting._served_s) <= 1025
