"""What free keys put into a bucket behind, beside and instead of a run's own objects: newcomers take none of it."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch

from genesis.store.base import CachePolicy
from tests.support.bucket_rounds import Interposed, Replica, folder, rounds, run_of, settings_of
from trainer.bucket_rounds.documents import (
    Agreement,
    ContributionHeader,
    StateRecord,
    contribution_body,
    payload_digest,
)
from trainer.bucket_rounds.history import History, kept_evidence
from trainer.bucket_rounds.keeping import Keeping
from trainer.bucket_rounds.object_names import (
    agreement_key,
    contribution_key,
    reduced_key,
    result_key,
    slice_key,
    state_key,
)
from trainer.bucket_rounds.place import Place
from trainer.bucket_rounds.rules import weights_of
from trainer.bucket_rounds.settings import BucketSettings, StoreClock
from trainer.bucket_rounds.snapshots import put_snapshot
from trainer.network.rpc import Identity
from trainer.network.transfer.snapshot import describe_chunks


def history_of(replica: Replica) -> History:
    return History(Place(replica.settings.place._store), replica.settings.rules)


def put_own_round(
    path: Path, keys: list[Identity], follows: Agreement, attempt: int = 0, *, records: bool = True
) -> Agreement:
    """Puts a round of strangers' keys behind an agreement: contributions, an agreement, and what they say of it."""
    store, round_index = folder(path), follows.round_index + 1
    settings = [settings_of(store, identity=each) for each in keys]
    payload = bytes(4 * follows.num_values)
    for each in settings:
        put_contribution(each, round_index, payload, follows.state_digest)
    claims = follows.members[0].claims
    weights = weights_of([claims] * len(keys), settings[0].rules)
    entries = [
        follows.members[0].model_copy(
            update={"member": each.own_id, "payload_sha256": payload_digest(payload), "weight": weight}
        )
        for each, weight in zip(sorted(settings, key=lambda it: it.own_id), weights, strict=True)
    ]
    changes = {"round_index": round_index, "attempt": attempt, "follows": follows.digest, "members": tuple(entries)}
    own = follows.model_copy(update=changes).signed(keys[0])
    store.put(agreement_key(round_index, attempt), own.wire(), cache=CachePolicy.NONE)
    for each in settings if records else []:
        record = StateRecord(
            run_id="test", member=each.own_id, round_index=round_index, agreement=own.digest, state_digest="e" * 64
        ).signed(each.identity)
        store.put(state_key(round_index, each.own_id), record.wire(), cache=CachePolicy.NONE)
    return own


def test_many_void_agreements_hide_no_round_from_whoever_comes_later(tmp_path: Path) -> None:
    (replica,) = run_of(tmp_path, 1)
    for attempt in range(70):
        replica.settings.place.put_once(agreement_key(0, attempt), b"none")
    rounds([replica], 1)
    assert replica.agreements[0].attempt == 70
    assert history_of(replica).newest() == replica.agreements[0]


def put_contribution(settings: BucketSettings, round_index: int, payload: bytes, state_digest: str) -> None:
    header = ContributionHeader(
        run_id="test",
        member=settings.own_id,
        round_index=round_index,
        state_digest=state_digest,
        form="dense-fp32",
        num_values=len(payload) // 4,
        payload_bytes=len(payload),
        payload_sha256=payload_digest(payload),
        claims={"num_batches": 4, "age_s": 1.0, "progress": 1.0, "vocabulary_rows": 0},  # type: ignore[arg-type]
    ).signed(settings.identity)
    key = contribution_key(round_index, settings.own_id, header.payload_sha256)
    settings.place.put_once(key, contribution_body(header, payload))


@pytest.mark.parametrize("records", [True, False])
def test_rounds_that_strangers_put_behind_the_newest_are_not_taken_for_the_runs(tmp_path: Path, records: bool) -> None:
    replicas = run_of(tmp_path)
    rounds(replicas, 3)
    genuine = history_of(replicas[0]).newest()
    assert genuine is not None
    assert genuine.round_index == 2
    strangers = [Identity.create() for _ in range(9)]
    last = put_own_round(tmp_path, strangers, genuine, records=records)
    for _ in range(3):
        last = put_own_round(tmp_path, strangers, last)
    assert history_of(replicas[0]).newest() == genuine
    rounds(replicas, 1)  # The run goes on beside it, by another attempt.
    found = history_of(replicas[0])
    newest = found.newest()
    assert newest is not None
    assert newest.keys == genuine.keys
    assert newest.round_index == 3
    assert found.accepted(3) == newest


def test_a_chain_beside_old_rounds_is_not_taken_for_the_runs(tmp_path: Path) -> None:
    replicas = run_of(tmp_path, snapshot_rounds=1, keep_rounds=1)
    rounds(replicas, 4)
    history = history_of(replicas[0])
    newest, old = history.newest(), history.accepted(0)
    assert newest is not None
    assert old is not None
    assert Place(folder(tmp_path)).round(1).states == ()  # Nothing of it is kept any more.
    strangers = [Identity.create() for _ in range(9)]
    last = old
    for _ in range(6):
        last = put_own_round(tmp_path, strangers, last, attempt=1 if last.round_index < 3 else 0)
    history = history_of(replicas[0])
    assert history.newest() == newest
    assert [history.accepted(number).keys for number in range(4)] == [newest.keys] * 4  # type: ignore[union-attr]


def test_a_round_that_went_on_without_most_of_those_before_counts_and_stays_provable(tmp_path: Path) -> None:
    replicas = run_of(tmp_path, 5, few_members_after_s=2.0, snapshot_rounds=1, keep_rounds=1)
    rounds(replicas, 1)
    left = replicas[:2]
    rounds(left, 4)
    newest = history_of(left[0]).newest()
    assert newest is not None
    assert newest.round_index == 4
    place = Place(folder(tmp_path))
    assert place.round(2).contributions == ()
    assert len(place.round(1).contributions) == 2  # They tell that it had waited.
    assert left[0].settings.own_id in newest.keys


def test_many_false_snapshots_hide_no_real_one(tmp_path: Path) -> None:
    replicas = run_of(tmp_path, snapshot_rounds=3)
    rounds(replicas, 13)
    real = replicas[0].keeping.snapshots(12)
    assert real
    listed = Counter[str]()
    store = Interposed(folder(tmp_path), before=lambda name, key: listed.update([f"{name} {key}"]))
    for round_index in range(13):
        for number in range(12):
            forged, pages = describe_chunks({"round_index": number}, {"anchor": torch.zeros(4)})
            put_snapshot(Place(folder(tmp_path)), round_index, forged, pages, {"anchor": torch.zeros(4)})
    newcomer = Replica(settings_of(store, config=replicas[0].settings.config))
    assert newcomer.keeping.snapshots(12) == real
    assert not any(name.startswith("list snapshots/") for name in listed)


def test_free_keys_have_few_payloads_read_and_close_no_round(tmp_path: Path) -> None:
    replicas = run_of(tmp_path, max_members=4)
    rounds(replicas, 1)
    for number in range(40):
        stranger = settings_of(folder(tmp_path))
        for again in range(3):
            payload = torch.full((3000,), 1.0 + number + again).numpy().tobytes()
            put_contribution(stranger, 1, payload, replicas[0].digest())
    read = Counter[str]()
    watched = Interposed(folder(tmp_path), before=lambda name, key: read.update([key] if name == "get" else []))
    replicas[0] = replicas[0].reborn(watched)
    rounds(replicas, 1)
    own = {each.settings.own_id for each in replicas}
    strangers = [key for key in read if "contribution-" in key and not any(each in key for each in own)]
    assert len(strangers) <= 4
    agreement = replicas[1].agreements[-1]
    assert agreement.member in own
    assert own <= set(agreement.keys)
    assert len(agreement.keys) <= 4


def test_an_agreement_that_comes_too_early_costs_no_read_of_what_it_lists(tmp_path: Path) -> None:
    replicas = run_of(tmp_path)
    rounds(replicas, 1)
    genuine = history_of(replicas[0]).newest()
    assert genuine is not None
    strangers = [Identity.create() for _ in range(3)]
    put_own_round(tmp_path, strangers, genuine.model_copy(update={"state_digest": replicas[0].digest()}), records=False)
    rounds(replicas, 1)
    assert {each.agreements[-1].attempt for each in replicas} == {1}
    assert {each.settings.own_id for each in replicas} <= set(replicas[0].agreements[-1].keys)


def test_slices_of_a_round_that_never_was_are_no_evidence(tmp_path: Path) -> None:
    assert kept_evidence(history_of(Replica(settings_of(folder(tmp_path)))), {}, {7}) == set()


def test_slices_and_words_on_them_are_removed_with_their_round(tmp_path: Path) -> None:
    replicas = run_of(tmp_path, snapshot_rounds=1, keep_rounds=1, num_slices=2)  # Of dense vectors here.
    place = replicas[0].settings.place
    keys = [
        key
        for number in (0, 9)
        for key in (
            slice_key(number, "a" * 64, 0, "b" * 64),
            result_key(number, 1, "c" * 64),
            reduced_key(number, 1, "a" * 64),
        )
    ]
    for key in keys:
        place.put_once(key, b"x")
    rounds(replicas, 3)
    Keeping(replicas[0].settings, StoreClock()).clean(2)
    assert [place.size_bytes(key) for key in keys] == [None] * 3 + [1] * 3
