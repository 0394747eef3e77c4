"""Who keeps a place where there are more records than room: in a node's table of peers, and at a node of the DHT."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.announcements import announce
from tests.support.rpc_node import Clock
from trainer.network.discovery.announcement import Announcement
from trainer.network.discovery.dht_quotas import RecordQuotas
from trainer.network.discovery.peer_table import DIRECT, TOLD, KnownPeer, PeerTable
from trainer.network.rpc.identity import Identity

_NOW = 1_800_000_000.0
_ME = Identity.create()


class _Table(PeerTable):
    """One with a clock that is set, and announcements of made-up nodes."""

    def __init__(self, max_peers: int = 10, **options: Any) -> None:
        self.now = _NOW
        super().__init__(
            "run", _ME.peer_id, max_peers=max_peers, max_clock_skew_s=120.0, clock=lambda: self.now, **options
        )

    def hear(self, of: Identity | None = None, *, source: str = "", **fields: Any) -> Announcement:
        """Offers what a node announces now."""
        said = self.offer(announce(of or Identity.create(), **({"sent_at": self.now} | fields)), source=source)
        assert said is not None
        return said

    def reach(self, of: Identity | None = None, **fields: Any) -> Announcement:
        said = self.hear(of, **fields)
        self.answered(said.peer_id, said.address)
        return said

    @property
    def reachable(self) -> list[Announcement]:
        return [said for said, _ in self.to_reach()]

    @property
    def ids(self) -> set[str]:
        return {said.peer_id for said in self.announcements()}


def test_the_newest_record_counts_whatever_the_order_and_is_news_once() -> None:
    other = Identity.create()
    old, new = (announce(other, sent_at=_NOW + age, inner_step=step) for age, step in ((0, 1), (1, 2)))
    for first, second in ((old, new), (new, old)):
        table = _Table()
        table.answered(other.peer_id, table.offer(first, subkey=other.peer_id).address)
        assert table.offer(first) is table.offer(first, subkey=other.peer_id) is None
        table.offer(second)
        assert [known.inner_step for known in table.announcements()] == [2]
        assert not table.refused
    assert table.offer(first, subkey=_ME.peer_id) is None
    assert table.refused == {"subkey": 1}


@pytest.mark.parametrize(("lifetime_s", "contact_s", "ends_s"), [(10, 0, 10), (3600, 0, 60), (3600, 50, 110)])
def test_a_forgotten_one_expires_by_its_own_lifetime_or_the_readers(lifetime_s, contact_s, ends_s) -> None:
    table, other = _Table(), Identity.create()
    said = table.reach(other, lifetime_s=lifetime_s)
    table.now = _NOW + contact_s
    table.answered(said.peer_id, said.address)
    table.now = _NOW + ends_s - 0.1
    assert table.ids == {said.peer_id}
    table.offer(announce(other, sent_at=_NOW, lifetime_s=lifetime_s))  # The same again is no new evidence.
    table.now = _NOW + ends_s
    assert table.heard_of() == table.announcements() == ()


def test_a_long_silence_calls_for_another_look() -> None:
    table, other = _Table(), Identity.create()
    said = table.reach(other)
    for _ in range(11):
        assert table.reachable == []
        table.now += 30.0
        said = table.hear(other)
    assert table.reachable == [said]


def test_only_reached_nodes_are_shown_and_passed_on() -> None:
    table, other = _Table(keeps_callers=True), Identity.create()
    said = table.hear(other)
    assert (table.known(), table.announcements()) == ((), ())
    assert table.reachable == [said]
    table.answered(other.peer_id, "127.0.0.1:4101")  # It is somewhere else, too.
    assert table.known() == ()
    table.answered(other.peer_id, said.address)
    assert [known.announcement for known in table.known()] == [said] == list(table.announcements())
    assert table.reachable == []
    moved = table.hear(other, sent_at=_NOW + 1, address="127.0.0.1:4109")  # It is to be reached again.
    assert (table.known(), table.reachable) == ((), [moved])
    table.answered(other.peer_id, moved.address)
    early = Identity.create()
    table.answered(early.peer_id, "127.0.0.1:4100")  # Before its announcement comes.
    table.hear(early)
    assert table.ids == {other.peer_id, early.peer_id}


def test_a_node_that_does_not_answer_is_forgotten_until_it_announces_something_newer() -> None:
    table, other = _Table(), Identity.create()
    said = table.hear(other)
    table.unreachable(other.peer_id, "127.0.0.1:1")
    assert table.heard_of()
    table.unreachable(other.peer_id, said.address)
    assert table.heard_of() == ()
    assert table.offer(announce(other, sent_at=_NOW)) is None
    table.hear(other, sent_at=_NOW + 1)


def test_the_record_of_a_peer_of_use_is_kept_though_it_is_out_of_reach() -> None:
    """A driver takes silence for a sign that a worker is gone."""
    table, other = _Table(), Identity.create()
    said = table.reach(other)
    table.used(other.peer_id)
    table.unreachable(other.peer_id, said.address)
    assert (table.known(), table.announcements(), table.reachable) == ((), (), [])
    table.now += 30.0
    newer = table.hear(other)
    assert [known.announcement for known in table.heard_of()] == [newer]
    table.now += 31.0
    assert table.reachable == [newer]  # After a lifetime it is tried again.


def test_a_caller_that_cannot_be_reached_is_seen_while_it_calls() -> None:
    table, other = _Table(keeps_callers=True), Identity.create()
    table.called(other.peer_id)
    said = table.hear(other, source=f"{DIRECT}198.51.100.1", lifetime_s=3600)
    table.unreachable(other.peer_id, said.address)
    assert (table.announcements(), table.known(), table.reachable) == ((said,), (), [])
    table.now += 59
    table.hear(other, lifetime_s=3600)
    table.now += 2
    assert table.announcements() == ()


def test_refusals_are_counted_by_reason_and_take_no_place() -> None:
    friend = Identity.create()
    private = "10.0.0.1:4100"
    table = _Table(objection=lambda address: address * (address == private), allowed_peers=frozenset({friend.peer_id}))
    for wire in (
        announce(Identity.create(), sent_at=_NOW),
        announce(friend, sent_at=_NOW, address=private),
        b"junk",
        announce(friend, sent_at=_NOW - 100, lifetime_s=60),
        announce(_ME, sent_at=_NOW),  # Not counted.
    ):
        assert table.offer(wire) is None
    assert table.refused == dict.fromkeys(("peer", "address", "malformed", "expired"), 1)
    assert table.heard_of() == ()
    table.hear(friend, address="198.51.100.1:4100")


def test_a_host_full_of_listening_sybils_keeps_nobody_out() -> None:
    table, worker = _Table(8), Identity.create()
    table.reach(worker)
    table.used(worker.peer_id)
    for number in range(30):
        table.now += 0.1
        table.reach(sent_at=_NOW, address=f"127.0.0.1:{5000 + number}")
        assert len(table.known()) <= 8
    for address in ("127.0.0.1:4200", "198.51.100.1:4200"):
        table.now += 0.1
        newcomer = table.reach(sent_at=_NOW, address=address)
        assert {worker.peer_id, newcomer.peer_id} <= table.ids


def test_sybils_that_make_themselves_useful_leave_room_for_other_hosts() -> None:
    table = _Table(8)
    for number in range(12):
        table.used(table.reach(address=f"198.51.100.66:{5000 + number}").peer_id)
    newcomers = set()
    for number in range(6):
        newcomers.add(newcomer := table.reach(address=f"198.51.100.{number}:4100").peer_id)
        table.used(newcomer)
        assert newcomers <= table.ids
    assert len(table.ids) == 8


def test_a_flood_of_hearsay_leaves_room_for_a_node_that_announces_itself() -> None:
    table, newcomer = _Table(), Identity.create()
    table.now += 0.1
    table.hear(newcomer, sent_at=_NOW, source=f"{DIRECT}127.0.0.1")
    for number in range(40):
        table.now += 0.1
        table.hear(sent_at=_NOW, node_id=f"s{number}", source=f"{TOLD}127.0.0.1")
    assert len(table.heard_of()) == 16
    assert table.reachable[0].peer_id == newcomer.peer_id


_NUM_NODES = 24
_MAX_PEERS = 6
_EVENTS = st.sampled_from(["offer", "tell", "answer", "use", "silence", "call"])


def _host(number: int) -> str:
    return f"198.51.100.{min(number % 5, 2)}"  # Three in five nodes are at one host.


@cache
def _node(number: int) -> tuple[Identity, bytes]:
    identity = Identity.create()
    address = f"{_host(number)}:{5000 + number}"
    return identity, announce(identity, address=address, sent_at=_NOW, lifetime_s=3600.0)


@pytest.mark.slow
@settings(deadline=None, max_examples=200)
@given(steps=st.lists(st.tuples(_EVENTS, st.integers(0, _NUM_NODES - 1)), max_size=120))
def test_whatever_is_offered_the_shares_hold(steps: list[tuple[str, int]]) -> None:
    table = _Table(_MAX_PEERS, lifetime_s=1000.0)
    number_of = {_node(number)[0].peer_id: number for number in range(_NUM_NODES)}
    used: set[int] = set()

    def numbers(known: Iterable[KnownPeer]) -> set[int]:
        return {number_of[it.announcement.peer_id] for it in known}

    for what, number in steps:
        table.now += 1.0
        identity, wire = _node(number)
        address = f"{_host(number)}:{5000 + number}"
        before = numbers(table.known())
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
        after, heard = numbers(table.known()), numbers(table.heard_of())
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


_SIZE = 1000
_STORED = _SIZE + 128


def _quotas(clock: Clock | None = None, *, max_records: int = 1000, per_key: int = 8) -> RecordQuotas:
    return RecordQuotas(max_records=max_records, max_bytes_per_key=per_key * _STORED, clock=clock or Clock())


def test_a_flood_pushes_out_itself() -> None:
    clock = Clock()
    quotas = _quotas(clock)
    quotas.admit(b"run", "honest", _SIZE, "127.0.0.1")
    clock.now_s += 10.0
    quotas.admit(b"run", "honest", _SIZE, "127.0.0.1")
    for number in range(100):  # From the same host.
        clock.now_s += 0.01
        dropped = quotas.admit(b"run", f"s{number}", _SIZE, "127.0.0.1")
        assert dropped == ([(b"run", f"s{number - 7}")] if number >= 7 else [])
    assert len(quotas) == 8
    assert quotas.admit(b"run", "newcomer", _SIZE, "127.0.0.1") == [(b"run", "s93")]
    assert quotas.admit(b"run", "elsewhere", _SIZE, "127.0.0.2") == [(b"run", "s94")]


def test_a_host_that_renews_its_flood_leaves_room_for_others() -> None:
    clock = Clock()
    quotas = _quotas(clock)
    for _ in range(3):
        clock.now_s += 10.0
        for number in range(8):
            quotas.admit(b"run", f"s{number}", _SIZE, "127.0.0.66")
    assert quotas.admit(b"run", "s8", _SIZE, "127.0.0.66") is None
    assert quotas.admit(b"run", "newcomer", _SIZE, "127.0.0.1") == [(b"run", "s0")]
    assert len(quotas) == 8


def test_a_run_that_fills_the_node_gives_way_to_others() -> None:
    quotas = _quotas(max_records=10, per_key=100)
    for number in range(30):
        quotas.admit(b"attack", f"s{number}", _SIZE, f"198.51.100.{number}")
    for number in range(5):
        dropped = quotas.admit(b"run", f"h{number}", _SIZE, "127.0.0.1")
        assert dropped is not None
        assert [key for key, _ in dropped] == [b"attack"]
    assert len(quotas) == 10
    assert quotas.admit(b"attack", "s31", _SIZE, "198.51.100.31") != []


@pytest.mark.slow
@settings(deadline=None, max_examples=200)
@given(
    steps=st.lists(
        st.tuples(st.sampled_from("kl"), st.integers(0, 11), st.sampled_from("ABC"), st.integers(1, 3 * _SIZE)),
        max_size=80,
    )
)
def test_whatever_is_filed_the_bounds_hold(steps: list[tuple[str, int, str, int]]) -> None:
    clock = Clock()
    quotas = _quotas(clock, max_records=9, per_key=5)
    held: dict[tuple[bytes, str], tuple[int, str]] = {}
    for key_name, number, host, size in steps:
        clock.now_s += 0.4
        place = (key_name.encode(), f"{number}")
        dropped = quotas.admit(*place, size, host)
        if dropped is None:
            assert len(quotas) == len(held)
            continue
        assert place not in dropped
        for gone in dropped:
            assert gone in held
            del held[gone]
        held[place] = (size + 128, held.get(place, (0, host))[1])
        by_key = Counter[bytes]()
        for (key, _), (size_bytes, _) in held.items():
            by_key[key] += size_bytes
        assert len(held) == len(quotas) <= 9
        assert max(by_key.values()) <= 5 * _STORED


_ROOT = Path(__file__).parents[4]
_STORAGE = """
from hivemind.dht.routing import DHTID
from hivemind.utils.timed_storage import get_dht_time
from trainer.network.discovery import dht_node
from trainer.network.discovery.dht_quotas import RecordQuotas

now = 1000.0
storage = dht_node.BoundedStorage(RecordQuotas(max_bytes_per_key=8 * 1128, max_lifetime_s=600.0, clock=lambda: now))
key, until = DHTID.generate("run"), get_dht_time() + 3600.0
for number in range(5000):
    now += 0.001
    assert storage.store(key, b"x" * 1000, until + number, subkey=f"s{number}")
records = storage.get(key).value
assert set(records.data) == {f"s{number}" for number in range(4992, 5000)}, records.data
assert not storage.store(key, b"x" * 1000, until, subkey="s4999")  # Older than what is there.
assert not storage.store(key, b"x", get_dht_time() - 1.0, subkey="late")
dht_node._SWEEP_INTERVAL_S = 0.0
now += 300.0
assert storage.store(key, b"y" * 1000, until + 9000, subkey="s4999")
assert len(records.expiration_heap) < 2000, len(records.expiration_heap)
now += 301.0
assert storage.store(key, b"z" * 1000, until, subkey="new")
assert {subkey: it.value[:1] for subkey, it in storage.get(key).value.items()} == {"s4999": b"y", "new": b"z"}
now += 601.0
other = DHTID.generate("other")
assert storage.store(other, b"x" * 1000, until, subkey="s")
assert list(storage.data) == [other]
print("held")
"""


@pytest.mark.slow
def test_hiveminds_storage_keeps_within_them() -> None:
    """In a process of its own, as in production: hivemind changes the logging of whoever imports it."""
    done = subprocess.run([sys.executable, "-c", _STORAGE], cwd=_ROOT, capture_output=True, text=True, timeout=120)
    assert done.stdout == "held\n", done.stderr
