"""What was received when: of requests that may have lain in a socket while the process was stopped."""

from __future__ import annotations

from trainer.pipeline.worker.received import SuspendDetector


def _beating(*times_s: float) -> tuple[SuspendDetector, list[float]]:
    now_s = [0.0]
    pulse = SuspendDetector(lambda: now_s[0])
    for time_s in times_s:
        now_s[0] = time_s
        pulse.beat()
    return pulse, now_s


def test_without_a_stop_the_receipt_is_the_receipt() -> None:
    pulse, now_s = _beating(0.0, 0.25, 1.0, 1.25)
    now_s[0] = 1.4
    assert [pulse.sent_by_s(time_s) for time_s in (0.1, 1.0, 1.4)] == [0.1, 1.0, 1.4]


def test_what_comes_behind_a_stop_may_be_as_old_as_the_stop() -> None:
    pulse, now_s = _beating(0.0, 0.25, 60.0)
    now_s[0] = 60.5
    assert [pulse.sent_by_s(time_s) for time_s in (0.1, 60.0, 60.5)] == [0.1, 0.25, 0.25]
    now_s[0] = 61.5
    assert pulse.sent_by_s(61.5) == 61.5


def test_a_request_that_is_read_before_the_beat_is_dated_back_too() -> None:
    pulse, now_s = _beating(0.0, 0.25)
    now_s[0] = 60.0
    assert pulse.sent_by_s(60.0) == 0.25


def test_stopped_again_while_still_reading_counts_as_one_stop() -> None:
    pulse, now_s = _beating(0.0, 60.0, 60.25, 90.0, 90.25)
    now_s[0] = 90.3
    assert pulse.sent_by_s(90.3) == 0.0


def test_without_a_beat_nothing_is_known_of_stops() -> None:
    pulse, now_s = _beating()
    now_s[0] = 60.0
    assert pulse.sent_by_s(59.0) == 59.0
