"""The newest word of each node that was reached, for a while; bounded, shared out by address; refusals counted."""

from __future__ import annotations

from collections import Counter
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.announcements import announce
from trainer.network.discovery.announcement import Announcement
from trainer.network.discovery.peer_table import DIRECT, TOLD, PeerTable
from trainer.network.rpc.identity import Identity

_NOW = 1_800_000_000.0


_ME = Identity.create()


class _Clock:
    def __init__(self) -> None:
        self.now = _NOW

    def __call__(self) -> float:
        return self.now


def _table(clock: _Clock | None = None, **options: Any) -> PeerTable:
    limits = {"max_peers": 10, "max_clock_skew_s": 120.0}
    return PeerTable("run", _ME.peer_id, clock=clock or _Clock(), **(limits | options))


def _reach(table: PeerTable, wire: bytes, source: str = "") -> Announcement | None:
    said = table.offer(wire, source=source)
    if said is not None:
        table.answered(said.peer_id, said.address)
    return said


def _reachable(table: PeerTable) -> list[Announcement]:
    return [said for said, _ in table.to_reach()]


def _ids(table: PeerTable) -> set[str]:
    return {said.peer_id for said in table.announcements()}


def test_the_newest_word_counts_whatever_the_order() -> None:
    other = Identity.create()
    old, new = (announce(other, sent_at=_NOW + age, inner_step=step) for age, step in ((0, 1), (1, 2)))
    for first, second in ((old, new), (new, old)):
        table = _table()
        _reach(table, first)
        table.offer(second)
        assert [known.inner_step for known in table.announcements()] == [2]
        assert not table.refused


def test_it_is_news_once() -> None:
    other = Identity.create()
    wire = announce(other, sent_at=_NOW)
    table = _table()
    assert table.offer(wire, subkey=other.peer_id) is not None
    assert table.offer(wire, subkey=other.peer_id) is None
    assert table.offer(wire) is None
    assert table.offer(wire, subkey=_ME.peer_id) is None
    assert table.refused == {"subkey": 1}


def test_a_forgotten_one_expires() -> None:
    clock = _Clock()
    table = _table(clock)
    _reach(table, announce(Identity.create(), sent_at=_NOW, lifetime_s=10))
    clock.now = _NOW + 9.9
    assert len(table.announcements()) == 1
    clock.now = _NOW + 10
    assert table.announcements() == ()


def test_the_reader_bounds_the_lifetime() -> None:
    clock = _Clock()
    table = _table(clock)
    said = _reach(table, announce(Identity.create(), sent_at=_NOW, lifetime_s=3600))
    clock.now = _NOW + 50
    table.answered(said.peer_id, said.address)
    clock.now = _NOW + 109
    assert _ids(table) == {said.peer_id}
    clock.now = _NOW + 110
    assert table.heard_of() == ()


def test_an_announcement_again_is_no_new_evidence() -> None:
    clock = _Clock()
    table = _table(clock)
    wire = announce(Identity.create(), sent_at=_NOW, lifetime_s=3600)
    _reach(table, wire)
    clock.now = _NOW + 59
    table.offer(wire)
    clock.now = _NOW + 60
    assert table.heard_of() == ()


def test_a_candidate_that_was_busy_is_tried_again_and_not_forgotten() -> None:
    clock = _Clock()
    table = _table(clock)
    said = table.offer(announce(Identity.create(), sent_at=_NOW))
    table.retry_later(said.peer_id, 3.0)
    table.retry_later("a" * 64, 3.0)  # Whom nobody has heard of.
    assert _reachable(table) == []
    clock.now += 3.0
    assert _reachable(table) == [said]
    assert not table.refused


def test_only_who_was_reached_is_shown_and_told() -> None:
    table = _table(keeps_callers=True)
    other = Identity.create()
    said = table.offer(announce(other, sent_at=_NOW))
    assert (table.known(), table.announcements()) == ((), ())
    assert _reachable(table) == [said]
    table.answered(other.peer_id, "127.0.0.1:4101")  # It is somewhere else, too.
    assert table.known() == ()
    table.answered(other.peer_id, said.address)
    assert [known.announcement for known in table.known()] == [said] == list(table.announcements())
    assert _reachable(table) == []


def test_who_answered_before_it_was_heard_of_is_reached() -> None:
    table, other = _table(), Identity.create()
    table.answered(other.peer_id, "127.0.0.1:4100")
    table.offer(announce(other, sent_at=_NOW))
    assert _ids(table) == {other.peer_id}


def test_who_moves_is_to_be_reached_again() -> None:
    table, other = _table(), Identity.create()
    _reach(table, announce(other, sent_at=_NOW))
    moved = table.offer(announce(other, sent_at=_NOW + 1, address="127.0.0.1:4109"))
    assert (table.known(), _reachable(table)) == ((), [moved])
    table.answered(other.peer_id, moved.address)
    assert _ids(table) == {other.peer_id}


def test_who_does_not_answer_is_forgotten_until_it_says_something_newer() -> None:
    table, other = _table(), Identity.create()
    wire = announce(other, sent_at=_NOW)
    said = table.offer(wire)
    table.unreachable(other.peer_id, "127.0.0.1:1")
    assert table.heard_of()
    table.unreachable(other.peer_id, said.address)
    assert table.heard_of() == ()
    assert table.offer(wire) is None
    assert table.offer(announce(other, sent_at=_NOW + 1)) is not None


def test_the_word_of_a_peer_of_use_is_kept_though_it_is_out_of_reach() -> None:
    """A driver takes silence for a sign that a worker is gone."""
    clock = _Clock()
    table, other = _table(clock), Identity.create()
    said = _reach(table, announce(other, sent_at=_NOW))
    table.used(other.peer_id)
    table.unreachable(other.peer_id, said.address)
    assert (table.known(), table.announcements(), _reachable(table)) == ((), (), [])
    clock.now += 30.0
    newer = table.offer(announce(other, sent_at=clock.now))
    assert [known.announcement for known in table.heard_of()] == [newer]
    clock.now += 31.0
    assert _reachable(table) == [newer]  # After a lifetime it is tried again.


def test_a_caller_that_cannot_be_reached_is_seen_while_it_calls() -> None:
    clock = _Clock()
    table, other = _table(clock, keeps_callers=True), Identity.create()
    table.called(other.peer_id)
    said = table.offer(announce(other, sent_at=_NOW, lifetime_s=3600), source=f"{DIRECT}198.51.100.1")
    table.unreachable(other.peer_id, said.address)
    assert table.announcements() == (said,)
    assert table.known() == ()
    assert _reachable(table) == []
    clock.now += 59
    table.offer(announce(other, sent_at=clock.now, lifetime_s=3600))
    clock.now += 2
    assert table.announcements() == ()


def test_a_long_silence_calls_for_another_look() -> None:
    clock = _Clock()
    table, other = _table(clock), Identity.create()
    _reach(table, announce(other, sent_at=clock.now))
    for _ in range(11):
        clock.now += 30
        said = table.offer(announce(other, sent_at=clock.now))
    assert _reachable(table) == [said]


def test_what_cannot_be_used_takes_no_place() -> None:
    friend, stranger = Identity.create(), Identity.create()
    table = _table(
        objection=lambda address: "private" if address.startswith("10.") else "",
        allowed_peers=frozenset({friend.peer_id}),
    )
    assert table.offer(announce(stranger, sent_at=_NOW)) is None
    assert table.offer(announce(friend, sent_at=_NOW, address="10.0.0.1:4100")) is None
    assert table.refused == {"peer": 1, "address": 1}
    assert table.offer(announce(friend, sent_at=_NOW, address="198.51.100.1:4100")) is not None


def test_oneself_is_no_peer() -> None:
    table = _table()
    assert table.offer(announce(_ME, sent_at=_NOW)) is None
    assert table.heard_of() == ()


def test_refusals_are_counted_by_reason() -> None:
    table = _table()
    good = announce(Identity.create(), sent_at=_NOW)
    for wire in (
        b"junk",
        b"x" * 20_000,
        good.replace(b":4100", b":4101"),
        announce(Identity.create(), sent_at=_NOW, run_id="other"),
        announce(Identity.create(), sent_at=_NOW - 100, lifetime_s=60),
    ):
        assert table.offer(wire) is None
    assert table.refused == {"malformed": 1, "oversized": 1, "signature": 1, "run": 1, "expired": 1}
    assert table.heard_of() == ()


# -- who has to go when there are more ---------------------------------------------------------------------------------


def test_a_host_full_of_listening_sybils_keeps_nobody_out() -> None:
    clock = _Clock()
    table = _table(clock, max_peers=8)
    worker = Identity.create()
    _reach(table, announce(worker, sent_at=_NOW))
    table.used(worker.peer_id)
    for number in range(30):
        clock.now += 0.1
        _reach(table, announce(Identity.create(), sent_at=_NOW, address=f"127.0.0.1:{5000 + number}"))
        assert len(table.known()) <= 8
    for address in ("127.0.0.1:4200", "198.51.100.1:4200"):
        newcomer = Identity.create()
        clock.now += 0.1
        _reach(table, announce(newcomer, sent_at=_NOW, address=address))
        assert {worker.peer_id, newcomer.peer_id} <= _ids(table)


def test_sybils_that_make_themselves_useful_leave_room_for_other_hosts() -> None:
    table = _table(max_peers=8)
    for number in range(12):
        sybil = Identity.create()
        _reach(table, announce(sybil, sent_at=_NOW, address=f"198.51.100.66:{5000 + number}"))
        table.used(sybil.peer_id)
    newcomers = [Identity.create() for _ in range(6)]
    for number, newcomer in enumerate(newcomers):
        _reach(table, announce(newcomer, sent_at=_NOW, address=f"198.51.100.{number}:4100"))
        assert newcomer.peer_id in _ids(table)
        table.used(newcomer.peer_id)
    assert {newcomer.peer_id for newcomer in newcomers} <= _ids(table)
    assert len(_ids(table)) == 8


def test_a_flood_of_hearsay_leaves_room_for_who_comes_himself() -> None:
    clock = _Clock()
    table = _table(clock)
    newcomer = Identity.create()
    clock.now += 0.1
    table.offer(announce(newcomer, sent_at=_NOW), source=f"{DIRECT}127.0.0.1")
    for number in range(40):
        clock.now += 0.1
        table.offer(announce(Identity.create(), sent_at=_NOW, node_id=f"s{number}"), source=f"{TOLD}127.0.0.1")
    assert len(table.heard_of()) == 16
    assert _reachable(table)[0].peer_id == newcomer.peer_id


_HOSTS = ["198.51.100.1", "198.51.100.2", "198.51.100.3"]
_NUM_NODES = 24
_MAX_PEERS = 6


@cache
def _node(number: int) -> tuple[Identity, bytes]:
    identity = Identity.create()
    address = f"{_host(number)}:{5000 + number}"
    return identity, announce(identity, address=address, sent_at=_NOW, lifetime_s=3600.0)


def _host(number: int) -> str:
    return _HOSTS[min(number % 5, 2)]  # Three in five nodes are at one host.


_EVENTS = st.sampled_from(["offer", "tell", "answer", "use", "silence", "call"])
_STEPS = st.lists(st.tuples(_EVENTS, st.integers(0, _NUM_NODES - 1)), max_size=120)


@pytest.mark.slow
@settings(deadline=None, max_examples=200)
@given(steps=_STEPS)
def test_whatever_is_offered_the_shares_hold(steps: list[tuple[str, int]]) -> None:
    clock = _Clock()
    table = _table(clock, max_peers=_MAX_PEERS, lifetime_s=1000.0)
    number_of = {_node(number)[0].peer_id: number for number in range(_NUM_NODES)}
    used: set[int] = set()
    for what, number in steps:
        clock.now += 1.0
        identity, wire = _node(number)
        address = f"{_host(number)}:{5000 + number}"
        before = {number_of[it.announcement.peer_id] for it in table.known()}
        match what:
            case "offer" | "tell":
                table.offer(wire, source=f"{DIRECT if what == 'offer' else TOLD}{_host(number)}")
            case "answer":
                table.answered(identity.peer_id, address)
            case "use":
                table.used(identity.peer_id)
            case "call":
                table.called(identity.peer_id)
            case "silence":
                table.unreachable(identity.peer_id, address)
        after = {number_of[it.announcement.peer_id] for it in table.known()}
        heard = {number_of[it.announcement.peer_id] for it in table.heard_of()}
        if what == "use" and number in heard:
            used.add(number)
        used &= heard
        lost = before - after - ({number} if what == "silence" else set())
        assert len(after) <= _MAX_PEERS
        assert len(heard - after) <= 16
        if what in ("use", "call", "silence") or number in before:
            assert not lost
        if lost:
            # A reached peer gives way only to one reached now, in a full table, and not to a larger group.
            [gone] = lost
            assert number in after - before
            assert len(before) == _MAX_PEERS
            size = Counter(_host(it) for it in [*before, number])
            assert size[_host(gone)] >= size[_host(number)]
            eligible_idle = {it for it in before - used if size[_host(it)] >= size[_host(number)]}
            assert gone not in used or not eligible_idle


@pytest.mark.parametrize("is_of_use", [False, True])
def test_a_lesser_peer_of_the_same_host_gives_way(is_of_use: bool) -> None:
    clock = _Clock()
    table = _table(clock, max_peers=1)
    first, second = Identity.create(), Identity.create()
    _reach(table, announce(first, sent_at=_NOW))
    table.used(first.peer_id)
    said = table.offer(announce(second, sent_at=_NOW))
    for _ in range(2 * is_of_use):
        clock.now += 2.0
        table.used(second.peer_id)
    table.answered(second.peer_id, said.address)
    assert _ids(table) == {(second if is_of_use else first).peer_id}
