"""How long a node stays in a round through a bucket, and for whom it waits, by a clock that the test turns."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.bucket_rounds import folder, settings_of
from trainer.bucket_rounds.documents import AgreedMember, Agreement, Claims
from trainer.bucket_rounds.rules import RoundFacts
from trainer.bucket_rounds.settings import BucketSettings
from trainer.bucket_rounds.waiting import RoundWait
from trainer.errors import RoundFailedError, RoundLeftError

A, B, C = ("a" * 64, "b" * 64, "c" * 64)


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def facts_after(*members: str) -> RoundFacts:
    claims = Claims(num_batches=1, age_s=0, progress=1, vocabulary_rows=0)
    listed = tuple(AgreedMember(member=each, payload_sha256="0" * 64, claims=claims, weight=1) for each in members)
    before = Agreement(
        run_id="test",
        member=A,
        round_index=4,
        attempt=0,
        follows="",
        state_digest="",
        form="dense-fp32",
        num_values=8,
        members=listed or (AgreedMember(member=A, payload_sha256="0" * 64, claims=claims, weight=1),),
    )
    return RoundFacts(5, "", "dense-fp32", 8, before if members else None)


@pytest.fixture
def settings(tmp_path: Path) -> BucketSettings:
    return settings_of(folder(tmp_path), gather_timeout_s=60.0)


@pytest.mark.parametrize(("has_work", "timeout_s"), [(True, 600.0), (False, 240.0)])
def test_a_round_fails_at_its_deadline_and_sooner_without_work(
    settings: BucketSettings, has_work: bool, timeout_s: float
) -> None:
    clock = Clock()
    wait = RoundWait(replace(settings, round_timeout_s=600.0), facts_after(A, B), has_work=has_work, clock=clock)
    clock.now_s += timeout_s
    wait.check_time()
    clock.now_s += 0.1
    with pytest.raises(RoundFailedError, match=f"no agreement within {timeout_s:.0f} s"):
        wait.check_time()


def test_a_node_that_is_to_stop_leaves_a_moment_later(settings: BucketSettings) -> None:
    clock = Clock()
    wait = RoundWait(replace(settings, stopping=lambda: clock.now_s >= 1020), facts_after(A, B), clock=clock)
    for now_s in (1000, 1020, 1030):
        clock.now_s = now_s
        wait.check_time()
    clock.now_s = 1030.1
    with pytest.raises(RoundLeftError):
        wait.check_time()


@pytest.mark.parametrize(
    ("before", "awaited", "members", "quorum", "waits_s"),
    [
        ((A, B), (), (A, B), 0, 0),  # All of the round before are there.
        ((A, B, C), (), (A,), 0, 600),  # Few of it are.
        ((A, B, C), (), (A, B), 0, 60),  # Most of it is.
        ((A, B), (C,), (A, B), 0, 60),  # Somebody holds the state, and is on its way.
        ((A, B), (C,), (A, B), 2, 0),  # A quorum waits for nobody.
        ((), (), (A,), 0, 60),  # Whoever is first waits for others.
    ],
)
def test_a_node_waits_for_those_before_and_those_on_their_way(
    settings: BucketSettings,
    before: tuple[str, ...],
    awaited: tuple[str, ...],
    members: tuple[str, ...],
    quorum: int,
    waits_s: float,
) -> None:
    clock = Clock()
    rules = replace(settings.rules, quorum=quorum, few_members_after_s=600.0)
    wait = RoundWait(replace(settings, rules=rules), facts_after(*before), lambda: awaited, clock=clock)
    if waits_s:
        clock.now_s += waits_s - 0.1
        assert wait.waits_for_others(members)
        clock.now_s += 0.1
    assert not wait.waits_for_others(members)


def test_whom_a_round_waits_for_is_said_once_a_minute(
    settings: BucketSettings, caplog: pytest.LogCaptureFixture
) -> None:
    clock = Clock()
    wait = RoundWait(settings, facts_after(A, B), lambda: (C,), clock=clock)
    with caplog.at_level(logging.INFO):
        for _ in range(700):
            wait.tell({A})
            clock.now_s += 0.1
    assert len(caplog.messages) == 2
    assert "the work of 1 is there, that of bbbbbbbb, cccccccc is not" in caplog.messages[0]
