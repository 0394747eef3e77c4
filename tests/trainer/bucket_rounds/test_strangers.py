"""What somebody who may write puts into the round that a run is about to make: it costs its members next to nothing."""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path

import pytest

from genesis.store.base import CachePolicy, Store
from tests.support.bucket_rounds import NUM_VALUES, Interposed, Replica, folder, rounds, run_of, settings_of, together
from trainer.bucket_rounds.documents import (
    MAX_HEADER_BYTES,
    AgreedMember,
    Agreement,
    Claims,
    ContributionHeader,
    StateRecord,
    contribution_body,
    payload_digest,
)
from trainer.bucket_rounds.history import History
from trainer.bucket_rounds.object_names import agreement_key, contribution_key, state_key
from trainer.bucket_rounds.rules import RoundRules, weights_of
from trainer.network.rpc import Identity

CLAIMS = Claims(num_batches=4, age_s=1.0, progress=1.0, vocabulary_rows=0)
OTHER_STATE = "e" * 64


def put(store: Store, key: str, body: bytes | bytearray) -> None:
    store.put(key, body, cache=CachePolicy.NONE)


def contributed(store: Store, identity: Identity, round_index: int, state_digest: str) -> AgreedMember:
    """Puts a stranger's contribution, and returns what an agreement says of it."""
    payload = bytes(4 * NUM_VALUES)
    header = ContributionHeader(
        run_id="test",
        member=identity.peer_id,
        round_index=round_index,
        state_digest=state_digest,
        form="dense-fp32",
        num_values=NUM_VALUES,
        payload_bytes=len(payload),
        payload_sha256=payload_digest(payload),
        claims=CLAIMS,
    ).signed(identity)
    put(
        store,
        contribution_key(round_index, identity.peer_id, header.payload_sha256),
        contribution_body(header, payload),
    )
    return AgreedMember(member=identity.peer_id, payload_sha256=header.payload_sha256, claims=CLAIMS, weight=1.0)


def agreed(
    store: Store,
    identity: Identity,
    follows: Agreement,
    members: list[AgreedMember],
    attempt: int = 0,
    state_digest: str = OTHER_STATE,
) -> Agreement:
    """Puts a stranger's agreement behind another."""
    listed = sorted(members, key=lambda it: it.member)
    weights = weights_of([each.claims for each in listed], RoundRules(run_id="test"))
    agreement = Agreement(
        run_id="test",
        member=identity.peer_id,
        round_index=follows.round_index + 1,
        attempt=attempt,
        follows=follows.digest,
        state_digest=state_digest,
        form="dense-fp32",
        num_values=NUM_VALUES,
        members=tuple(each.model_copy(update={"weight": weight}) for each, weight in zip(listed, weights, strict=True)),
    ).signed(identity)
    put(store, agreement_key(agreement.round_index, attempt), agreement.wire())
    return agreement


def absent(member: str, number: int = 0) -> AgreedMember:
    return AgreedMember(member=member, payload_sha256=f"{number:064x}", claims=CLAIMS, weight=1.0)


def assert_alike(replicas: list[Replica]) -> None:
    assert len({each.digest() for each in replicas}) == 1


def test_a_round_that_was_never_made_and_its_successor_send_nobody_to_fetch_a_state(tmp_path: Path) -> None:
    """A void agreement on what is not there, and another behind it, look like a round that is over and was removed."""
    replicas, store, stranger = run_of(tmp_path), folder(tmp_path), Identity.create()
    rounds(replicas)
    members = [absent(each) for each in (*replicas[0].agreements[0].keys, stranger.peer_id)]
    void = agreed(store, stranger, replicas[0].agreements[0], members, state_digest=replicas[0].digest())
    agreed(store, stranger, void, [absent(stranger.peer_id)])
    assert rounds(replicas, 2) < 10.0
    assert_alike(replicas)
    assert replicas[0].agreements[1].attempt == 1


def test_an_agreement_on_work_from_a_state_of_its_own_is_nobodys_round(tmp_path: Path) -> None:
    """However long before the round its contributions were put: nobody can have begun it then."""
    replicas, store, stranger = run_of(tmp_path, few_members_after_s=2.0), folder(tmp_path), Identity.create()
    early = contributed(store, stranger, 1, OTHER_STATE)
    time.sleep(4.5)  # Longer than a round waits, and than the times of a store may be wrong.
    rounds(replicas)
    own = agreed(store, stranger, replicas[0].agreements[0], [early])
    record = StateRecord(
        run_id="test", member=stranger.peer_id, round_index=1, agreement=own.digest, state_digest="f" * 64
    ).signed(stranger)
    put(store, state_key(1, stranger.peer_id), record.wire())
    history = History(replicas[0].settings.place, replicas[0].settings.rules)
    assert history.newest() == replicas[0].agreements[0]
    rounds(replicas)
    assert_alike(replicas)
    assert stranger.peer_id not in replicas[0].agreements[1].keys


def test_an_agreement_from_another_state_than_most_vouch_for_is_void_however_late(tmp_path: Path) -> None:
    replicas, store, stranger = run_of(tmp_path, few_members_after_s=1.0), folder(tmp_path), Identity.create()
    rounds(replicas)
    time.sleep(3.5)  # All are away for longer than a round waits.
    agreed(store, stranger, replicas[0].agreements[0], [contributed(store, stranger, 1, OTHER_STATE)])
    time.sleep(0.1)
    history = History(replicas[0].settings.place, replicas[0].settings.rules)
    assert history.newest() == replicas[0].agreements[0]
    rounds(replicas)
    assert_alike(replicas)
    assert set(replicas[0].agreements[1].keys) >= {each.settings.own_id for each in replicas}


def test_agreements_of_strangers_on_what_is_not_there_are_not_waited_for(tmp_path: Path) -> None:
    replicas, store = run_of(tmp_path), folder(tmp_path)
    rounds(replicas)
    for attempt in range(8):
        stranger = Identity.create()
        members = [absent(each) for each in (stranger.peer_id, *replicas[0].agreements[0].keys[: attempt % 2])]
        agreed(store, stranger, replicas[0].agreements[0], members, attempt, replicas[0].digest())
    assert rounds(replicas) < 10.0
    assert replicas[0].agreements[1].attempt == 8


def test_names_of_those_who_are_to_come_hold_up_few_rounds_whatever_their_number(tmp_path: Path) -> None:
    """State records that nobody has signed, under other keys in each round, as many as a bucket lists."""
    replicas, store = run_of(tmp_path, gather_timeout_s=3.0), folder(tmp_path)
    rounds(replicas)
    spent_s = []
    for number in range(8):
        for _ in range(3):
            put(store, state_key(number, Identity.create().peer_id), b"none")
        spent_s.append(rounds(replicas))
    assert sum(each >= 3.0 for each in spent_s) <= 4, spent_s


def test_small_objects_under_a_members_name_hide_no_contribution(tmp_path: Path) -> None:
    replicas, store = run_of(tmp_path), folder(tmp_path)
    rounds(replicas)
    victim = replicas[0].settings.own_id
    for number in range(8):
        put(store, contribution_key(1, victim, f"{number:064x}"), b"")
    rounds(replicas)
    assert victim in replicas[1].agreements[1].keys


def test_a_false_record_under_a_members_name_does_not_silence_it(tmp_path: Path) -> None:
    replicas, store = run_of(tmp_path), folder(tmp_path)
    for each in replicas:
        put(store, state_key(0, each.settings.own_id), b"none")
    watching = History(replicas[0].settings.place, replicas[0].settings.rules)
    together({str(number): each.take_part for number, each in enumerate(replicas)})
    assert watching.vouched_state(replicas[0].agreements[0]) is None
    for each in replicas:
        each.keep()
    vouched = watching.vouched_state(replicas[0].agreements[0])
    assert vouched is not None
    assert vouched.state_digest == replicas[0].digest()


def test_chains_behind_the_newest_round_are_read_a_few_times_however_many(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of more agreements than a node remembers, each was read once for each that the newest round is followed by."""
    monkeypatch.setattr("trainer.bucket_rounds.history._MOST_REMEMBERED", 40)
    replicas, store, depth, width = run_of(tmp_path), folder(tmp_path), 4, 24
    rounds(replicas)
    genuine = replicas[0].agreements[0]
    keys = [Identity.create() for _ in range(width)]
    tips = [genuine] * width
    for number in range(1, depth + 1):
        tips = [
            agreed(store, key, tip, [absent(key.peer_id, number)], attempt)
            for attempt, (key, tip) in enumerate(zip(keys, tips, strict=True))
        ]
        for each in replicas:
            put(store, state_key(number, each.settings.own_id), b"none")
    read = Counter[str]()
    watched = Interposed(store, before=lambda name, key: read.update([key] if name in ("get", "head") else []))
    history = History(settings_of(watched).place, replicas[0].settings.rules)
    assert history.newest() == genuine
    assert max(read.values()) <= 4


def test_what_no_contribution_can_be_as_large_as_is_not_read(tmp_path: Path) -> None:
    replicas, store, stranger = run_of(tmp_path, few_members_after_s=1.0), folder(tmp_path), Identity.create()
    rounds(replicas)
    time.sleep(3.5)
    huge = absent(stranger.peer_id)
    key = contribution_key(1, stranger.peer_id, huge.payload_sha256)
    put(store, key, bytes(MAX_HEADER_BYTES + 17 * NUM_VALUES))
    agreed(store, stranger, replicas[0].agreements[0], [huge], state_digest=replicas[0].digest())
    read = Counter[str]()
    watched = settings_of(Interposed(store, before=lambda name, key: read.update([key] if name == "get" else [])))
    assert History(watched.place, replicas[0].settings.rules).newest() == replicas[0].agreements[0]
    assert not read[key]
