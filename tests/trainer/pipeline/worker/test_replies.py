"""A micro-batch is counted once, whatever comes between: repetitions, callers that go, clocks, stops, other drivers."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.support.rpc_node import Clock
from trainer.errors import RefusedError
from trainer.pipeline.worker import ReplyCache, WorkerConfig
from trainer.pipeline.worker.replies import Acknowledgement, PendingCount, SharedThrough

KEYS = ("e0.s0.r0", "e0.s0.r1", "e0.s0.r2")
KEY = KEYS[0]
MANY_KEYS = tuple(f"e0.s0.r{row}" for row in range(6))
UNTIL_S = Clock.now_s + 100.0
KINDS = ("backward", "backward", "backward", "chain")


def _cache(clock: Clock | None = None, **changes: object) -> ReplyCache:
    return ReplyCache(WorkerConfig(**{"reply_cache_bytes": 1000, **changes}), clock=clock or Clock())


def _begin(cache: ReplyCache, key: str = KEY, until_s: float = UNTIL_S, owner: str = "") -> PendingCount:
    pending = cache.begin("backward", key, until_s, owner=owner)
    assert isinstance(pending, PendingCount)
    return pending


def _count(cache: ReplyCache, pending: PendingCount) -> Acknowledgement:
    cache.claim(pending)
    acknowledgement = cache.counted(pending)
    assert acknowledgement is not None
    return acknowledgement


def _answer(cache: ReplyCache, key: str, reply: str = "reply", size_bytes: int = 10) -> Acknowledgement:
    pending = _begin(cache, key)
    acknowledgement = _count(cache, pending)
    cache.settle(pending, reply, size_bytes)
    return acknowledgement


def _reason(cache: ReplyCache, kind: str, key: str = KEY, owner: str = "") -> str:
    with pytest.raises(RefusedError) as caught:
        cache.begin(kind, key, UNTIL_S, owner=owner)
    return caught.value.reason


def test_a_name_and_its_answer_belong_to_the_driver_it_was_counted_for() -> None:
    cache = _cache()
    first = _begin(cache, owner="a")
    assert _begin(cache, owner="a") is first
    assert {_reason(cache, kind, owner=owner) for kind, owner in (("backward", "b"), ("chain", "a"))} == {"busy"}
    _count(cache, first)
    assert _reason(cache, "backward", owner="b") == "counted-for-another"
    cache.settle(first, "the bytes", 10)
    assert cache.begin("backward", KEY, UNTIL_S, owner="a") == "the bytes"
    assert _reason(cache, "chain", owner="a") == "already-applied"
    assert _reason(cache, "backward", owner="b") == "counted-for-another"
    assert cache.applied == 1


def test_answers_go_before_names_do_and_both_are_bounded() -> None:
    cache = _cache(reply_cache_bytes=25, reply_cache_ids=4)
    for number in range(4):
        _answer(cache, f"e0.s0.r{number}", f"reply {number}", 10)
    assert cache.reply_bytes == 20
    assert _reason(cache, "backward") == "already-applied"
    assert cache.begin("backward", "e0.s0.r3", UNTIL_S) == "reply 3"
    _answer(cache, "e0.s0.r4")
    _begin(cache)  # Forgotten, long after any lease on it.
    _answer(cache, "e0.s0.r5", size_bytes=26)  # Larger than the cache.
    assert (cache.reply_bytes, _reason(cache, "backward", "e0.s0.r5")) == (0, "already-applied")


def test_the_end_of_what_was_dropped_is_tainted_and_leaves_alone_who_asks_anew() -> None:
    """Found by `Interleavings`, once in 10,000 runs: what was given away was counted nevertheless."""
    cache = _cache()
    dropped = _begin(cache)
    _count(cache, dropped)
    cache.taint()
    anew = _begin(cache)
    with pytest.raises(RefusedError, match="dropped again") as caught:
        cache.settle(dropped, "too late", 10)
    assert caught.value.reason == "tainted"
    cache.counted_among([KEY], refuse_from_now=True)
    with pytest.raises(RefusedError, match="given up"):
        cache.claim(anew)


def test_refused_from_now_neither_begun_nor_new_is_counted_for_a_while() -> None:
    clock = Clock()
    cache = _cache(clock, refuse_s=20.0)
    begun = _begin(cache)
    _answer(cache, KEYS[1])
    _, counted, undecided = cache.counted_among(KEYS, refuse_from_now=True)
    assert (list(counted), undecided) == ([KEYS[1]], [])
    with pytest.raises(RefusedError):
        cache.claim(begun)
    assert {_reason(cache, "backward", key) for key in (KEY, KEYS[2])} == {"busy"}
    assert cache.begin("backward", KEYS[1], UNTIL_S) == "reply"
    clock.now_s += 20.5
    pending = _begin(cache)
    cache.claim(pending)  # Who asks while it is being added up is told to wait.
    _, counted, (undecided,) = cache.counted_among([KEY], refuse_from_now=True)
    assert not counted
    assert not undecided.done()
    assert cache.counted(pending) is not None
    assert undecided.done()
    assert cache.counted_among([KEY], refuse_from_now=True)[1].keys() == {KEY}
    cache, keys = _cache(reply_cache_ids=8), [f"e0.s0.r{number}" for number in range(100)]
    cache.counted_among(keys, refuse_from_now=True)
    for key in keys[:-8]:  # Refusals are bounded.
        _begin(cache, key)
    assert {_reason(cache, "backward", key) for key in keys[-8:]} == {"busy"}


class Interleavings(RuleBasedStateMachine):
    """Drivers, a clock, the keeper and one compute thread, in any order; beside them what is in the weights."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.cache = _cache(self.clock, reply_cache_bytes=45, refuse_s=5.0)
        self.waiting: list[tuple[PendingCount, float]] = []  # Who asks, and until when.
        self.ready: list[PendingCount] = []  # For the compute thread.
        self.to_settle: list[tuple[PendingCount, Acknowledgement]] = []
        self.accumulated: list[str] = []
        self.stepped: list[str] = []
        self.acknowledged: dict[Acknowledgement, str] = {}
        self.given_away: dict[str, float] = {}  # Until when the keeper has it refused.

    @rule(key=st.sampled_from(MANY_KEYS), kind=st.sampled_from(KINDS), within_s=st.sampled_from([1.0, 20.0, 60.0]))
    def ask(self, key: str, kind: str, within_s: float) -> None:
        until_s = self.clock.now_s + within_s
        try:
            found = self.cache.begin(kind, key, until_s)
        except RefusedError as error:
            if error.reason == "already-applied":
                assert key in self.accumulated + self.stepped
            return
        if isinstance(found, str):
            assert key in self.accumulated + self.stepped
            assert found.startswith(key)
            return
        assert self.given_away.get(key, 0.0) <= self.clock.now_s
        self.waiting.append((found, until_s))
        if found not in self.ready and all(found is not pending for pending, _ in self.to_settle):
            self.ready.append(found)

    @precondition(lambda self: self.waiting)
    @rule(back=st.integers(1, 3))
    def go_away(self, back: int) -> None:
        pending, until_s = self.waiting.pop(-min(back, len(self.waiting)))
        self.cache.leave(pending, until_s)

    @rule(seconds=st.sampled_from([0.5, 2.0, 6.0]))
    def pass_time(self, seconds: float) -> None:
        self.clock.now_s += seconds

    @precondition(lambda self: self.ready)
    @rule(back=st.integers(1, 3), stopped_s=st.sampled_from([0.0, 0.0, 70.0]))
    def compute(self, back: int, stopped_s: float) -> None:
        pending = self.ready.pop(-min(back, len(self.ready)))
        try:
            self.cache.claim(pending)
        except RefusedError as error:
            assert error.reason == "expired"
            self.cache.fail(pending)
            return
        assert self.given_away.get(pending.key, 0.0) <= self.clock.now_s
        assert any(pending is other and until_s >= self.clock.now_s for other, until_s in self.waiting)
        self.accumulated.append(pending.key)
        self.clock.now_s += stopped_s
        acknowledgement = self.cache.counted(pending)
        if acknowledgement is None:
            self.accumulated.clear()
            self.cache.taint()
            self.cache.fail(pending)
            return
        self.to_settle.append((pending, acknowledgement))

    @precondition(lambda self: self.to_settle)
    @rule(back=st.integers(1, 3))
    def settle(self, back: int) -> None:
        pending, acknowledgement = self.to_settle.pop(-min(back, len(self.to_settle)))
        try:
            self.cache.settle(pending, f"{pending.key} {acknowledgement.applied_number}", 10)
        except RefusedError as error:
            assert error.reason == "tainted"
            assert acknowledgement.incarnation != self.cache.incarnation
        else:
            assert pending.key in self.accumulated + self.stepped
            assert acknowledgement not in self.acknowledged
            self.acknowledged[acknowledgement] = pending.key

    @precondition(lambda self: self.accumulated)
    @rule()
    def step(self) -> None:
        self.stepped += self.accumulated
        self.accumulated.clear()
        self.cache.stepped(len(self.stepped))

    @precondition(lambda self: self.waiting or self.accumulated)
    @rule(back=st.integers(1, 3))
    def give_away(self, back: int) -> None:
        keys = [pending.key for pending, _ in self.waiting] or self.accumulated
        key = keys[-min(back, len(keys))]
        _, counted, undecided = self.cache.counted_among([key], refuse_from_now=True)
        assert not undecided  # The compute thread is never interrupted between claim and counting here.
        assert (key in counted) == (key in self.accumulated + self.stepped)
        if not counted:
            self.given_away[key] = self.clock.now_s + 5.0

    @invariant()
    def counted_at_most_once(self) -> None:
        everything = self.accumulated + self.stepped
        assert len(everything) == len(set(everything))

    @invariant()
    def what_is_acknowledged_is_counted_unless_dropped_with_its_incarnation(self) -> None:
        for (incarnation, _), key in self.acknowledged.items():
            assert key in self.accumulated + self.stepped or incarnation != self.cache.incarnation


@given(st.integers(1, 4), st.lists(st.tuples(st.integers(0, 5), st.none() | st.integers(0, 12)), min_size=1))
def test_what_is_said_to_be_shared_is(num_fragments: int, steps: list[tuple[int, int | None]]) -> None:
    """Against a model: a fragment holds what was counted when the latest of its committed rounds began."""
    shared = SharedThrough(num_fragments)
    history, fragments, applied = [0], [0] * num_fragments, 0
    for version, (num_applied, steps_ago) in enumerate(steps, start=1):
        applied += num_applied
        history.append(applied)
        shared.stepped(version, applied)
        if steps_ago is not None:
            fragment = version % num_fragments
            shared.committed(fragment, steps_ago)
            fragments[fragment] = max(fragments[fragment], history[max(0, version - steps_ago)])
        assert shared.count == min(fragments)


def test_a_checkpoint_shares_what_it_holds_but_nothing_of_another_incarnation() -> None:
    """A worker that ran ahead alone took up a state further back: its newest file is still that of before."""
    shared = SharedThrough()
    for version, applied in ((1, 4), (2, 8), (480, 12)):
        shared.stepped(version, applied)
    shared.saved(479)
    assert (shared.count, shared.in_weights) == (8, 12)
    shared.start_over()
    assert (shared.count, shared.in_weights) == (0, 0)
    for version, applied in ((451, 2), (452, 4)):
        shared.stepped(version, applied)
        shared.saved(480)
        assert shared.count == 0
    shared.start_over()
    shared.stepped(480, 6)
    shared.saved(480)
    assert shared.count == 0
    shared.stepped(481, 8)
    shared.saved(481)
    assert shared.count == 8


Interleavings.TestCase.settings = settings(max_examples=70, stateful_step_count=50, deadline=None, database=None)
TestInterleavings = Interleavings.TestCase
