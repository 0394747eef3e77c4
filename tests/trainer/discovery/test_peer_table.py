"""The newest word of each node, until it expires; bounded; refusals counted."""

from __future__ import annotations

from collections.abc import Callable

from trainer.discovery.peer_table import PeerTable
from trainer.rpc.identity import Identity

_NOW = 1_800_000_000.0


class _Clock:
    def __init__(self) -> None:
        self.now = _NOW

    def __call__(self) -> float:
        return self.now


def _table(own: Identity, clock: _Clock, max_peers: int = 10) -> PeerTable:
    return PeerTable("run", own.peer_id, max_peers=max_peers, max_clock_skew_s=120.0, clock=clock)


def test_the_newest_word_counts_whatever_the_order(identity: Identity, announce: Callable[..., bytes]) -> None:
    other = Identity.create()
    old, new = (announce(other, sent_at=_NOW + age, inner_step=step) for age, step in ((0, 1), (1, 2)))
    for first, second in ((old, new), (new, old)):
        table = _table(identity, _Clock())
        table.offer(first)
        table.offer(second)
        assert [known.inner_step for known in table.announcements()] == [2]
        assert not table.refused


def test_it_is_news_once(identity: Identity, announce: Callable[..., bytes]) -> None:
    other = Identity.create()
    wire = announce(other, sent_at=_NOW)
    table = _table(identity, _Clock())
    assert table.offer(wire, subkey=other.peer_id) is not None
    assert table.offer(wire, subkey=other.peer_id) is None
    assert table.offer(wire) is None
    assert table.offer(wire, subkey=identity.peer_id) is None
    assert table.refused == {"subkey": 1}


def test_a_forgotten_one_expires(identity: Identity, announce: Callable[..., bytes]) -> None:
    clock = _Clock()
    table = _table(identity, clock)
    table.offer(announce(Identity.create(), sent_at=_NOW, lifetime_s=10))
    clock.now = _NOW + 9.9
    assert len(table.announcements()) == 1
    clock.now = _NOW + 10
    assert table.announcements() == ()


def test_a_full_table_keeps_whom_it_knows(identity: Identity, announce: Callable[..., bytes]) -> None:
    clock = _Clock()
    table = _table(identity, clock, max_peers=2)
    known = [Identity.create() for _ in range(2)]
    for other in known:
        table.offer(announce(other, sent_at=_NOW, lifetime_s=10))
    newcomer = announce(Identity.create(), sent_at=_NOW)
    assert table.offer(newcomer) is None
    assert table.refused == {"full": 1}
    assert {a.peer_id for a in table.announcements()} == {other.peer_id for other in known}
    assert table.offer(announce(known[0], sent_at=_NOW + 1, lifetime_s=10)) is not None
    clock.now = _NOW + 10.5  # One of the two has expired.
    assert table.offer(newcomer) is not None


def test_oneself_is_no_peer(identity: Identity, announce: Callable[..., bytes]) -> None:
    table = _table(identity, _Clock())
    assert table.offer(announce(identity, sent_at=_NOW)) is None
    assert table.announcements() == ()


def test_refusals_are_counted_by_reason(identity: Identity, announce: Callable[..., bytes]) -> None:
    table = _table(identity, _Clock())
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
    assert table.announcements() == ()
