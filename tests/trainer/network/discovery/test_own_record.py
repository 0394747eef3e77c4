"""What a node says of itself is always fresh and always newer than what it said before."""

from __future__ import annotations

from trainer.network.discovery.announcement import Announcement, verify_announcement
from trainer.network.discovery.own_record import OwnRecord
from trainer.network.rpc.identity import Identity


def test_it_is_signed_again_when_it_changes_or_grows_old(identity: Identity) -> None:
    now = 1_800_000_000.0
    own = OwnRecord(identity, repeat_after_s=10, lifetime_s=60, clock=lambda: now)
    assert own.current() is None
    announcement = Announcement(peer_id=identity.peer_id, node_id="n", run_id="run", address="h:1")
    own.set(announcement)
    first = own.current()
    now += 9
    assert own.current() == first
    now += 1
    second = own.current()
    assert first is not None and second is not None
    assert second[0].sent_at == now > first[0].sent_at
    own.set(announcement.model_copy(update={"inner_step": 3}))
    third = own.current()
    assert third is not None and third[0].sent_at > second[0].sent_at and third[0].inner_step == 3
    assert verify_announcement(third[1], now=now, max_clock_skew_s=1) == third[0]


def test_a_clock_that_is_set_back_does_not_silence_the_node(identity: Identity) -> None:
    now = 1_800_000_000.0
    own = OwnRecord(identity, repeat_after_s=10, lifetime_s=60, clock=lambda: now)
    own.set(Announcement(peer_id=identity.peer_id, node_id="n", run_id="run", address="h:1"))
    now -= 3600
    current = own.current()
    assert current is not None and current[0].sent_at == now
