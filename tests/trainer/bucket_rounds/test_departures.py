"""Members that leave in good order: nobody waits for them, on nobody's word but their own."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from genesis.store.base import CachePolicy
from tests.support.bucket_rounds import Replica, folder, settings_of, together
from trainer.bucket_rounds.departures import Departures, put_departure
from trainer.bucket_rounds.documents import Agreement, Departure
from trainer.bucket_rounds.history import History
from trainer.bucket_rounds.object_names import agreement_key, departure_key
from trainer.bucket_rounds.place import Place, RoundListing
from trainer.errors import RoundFailedError
from trainer.network.rpc import Identity

PATIENT_S = 30.0
"""For how long members wait for each other, in rounds that have to be over long before."""


def members(path: Path, count: int, gather_timeout_s: float = PATIENT_S) -> list[Replica]:
    """Members that have made a round together, which all of them came to at once."""
    made = [Replica(settings_of(folder(path), gather_timeout_s=1.0)) for _ in range(count)]
    one_round(made)
    for each in made:
        rules = replace(each.settings.rules, gather_timeout_s=gather_timeout_s, few_members_after_s=2 * PATIENT_S)
        each.settings = replace(each.settings, rules=rules, round_timeout_s=10.0)
        each.collective._settings = each.settings
    return made


def one_round(replicas: list[Replica]) -> None:
    together({str(number): each.take_part_and_keep for number, each in enumerate(replicas)})
    assert len({each.digest() for each in replicas}) == 1


def newest_of(replica: Replica) -> Agreement:
    newest = History(replica.settings.place, replica.settings.rules).newest()
    assert newest is not None
    return newest


@pytest.mark.parametrize("num_leaving", [1, 2])
def test_a_round_does_not_wait_for_who_has_left(tmp_path: Path, num_leaving: int) -> None:
    replicas = members(tmp_path, 3)
    leaving, left = replicas[:num_leaving], replicas[num_leaving:]
    for each in leaving:
        each.collective.leave()
    for _ in range(2):
        one_round(left)
    assert [each.member for each in left[0].agreements[1].departures] == sorted(
        each.settings.own_id for each in leaving
    )
    assert left[0].agreements[2].departures == ()  # Nobody of the round before that has left.
    assert newest_of(left[0]).digest == left[0].agreements[2].digest


def test_who_leaves_during_a_round_is_in_it_and_not_waited_for_in_the_next(tmp_path: Path) -> None:
    replicas = members(tmp_path, 3)
    leaver, left = replicas[0], replicas[1:]
    leaver.settings = replace(leaver.settings, round_timeout_s=0.5)
    leaver.collective._settings = leaver.settings
    with pytest.raises(RoundFailedError):
        leaver.take_part()
    leaver.collective.leave()
    for _ in range(2):
        one_round(left)
    assert [len(each.members) for each in left[0].agreements[1:]] == [3, 2]


def test_who_is_back_in_time_is_in_the_round(tmp_path: Path) -> None:
    replicas = members(tmp_path, 3, gather_timeout_s=5.0)
    put_departure(replicas[0].settings, 1)
    back = replicas[0].reborn(folder(tmp_path))
    back.collective.move_to(1)
    key = departure_key(1, back.settings.own_id)
    deadline_s = time.monotonic() + 30.0
    while folder(tmp_path).head(key) is not None:
        assert time.monotonic() < deadline_s
        time.sleep(0.05)
    one_round([back, *replicas[1:]])
    assert len(back.agreements[0].members) == 3
    assert back.agreements[0].departures == ()


def test_after_a_break_of_all_nobody_goes_by_what_was_said_before_it(tmp_path: Path) -> None:
    replicas = members(tmp_path, 2, gather_timeout_s=2.0)
    for each in replicas:
        put_departure(each.settings, 1)
    first, second = (each.reborn(folder(tmp_path)) for each in replicas)
    late = threading.Timer(0.7, lambda: None)
    late.start()
    together({"first": first.take_part, "second": lambda: (late.join(), second.take_part())})
    assert len(first.agreements[0].members) == 2


@pytest.mark.parametrize("kind", ["garbage", "another's", "another round's", "another run's", "too large"])
def test_nobody_is_taken_for_gone_but_by_its_own_word(tmp_path: Path, kind: str) -> None:
    replicas = members(tmp_path, 2)
    victim = replicas[0].settings
    word = Departure(run_id="test", member=victim.own_id, round_index=1)
    forged = word.signed(Identity.create()).model_copy(update={"member": victim.own_id})
    wire = {
        "garbage": b"{}",
        "too large": b"x" * (1 << 20),
        "another's": forged.wire(),
        "another round's": word.model_copy(update={"round_index": 2}).signed(victim.identity).wire(),
        "another run's": word.model_copy(update={"run_id": "other"}).signed(victim.identity).wire(),
    }[kind]
    folder(tmp_path).put(departure_key(1, victim.own_id), wire, cache=CachePolicy.NONE)
    departures = Departures(replicas[1].settings, 1)
    departures.note(replicas[1].settings.place.round(1))
    assert departures.among([victim.own_id]) == []
    one_round(replicas)
    assert len(replicas[1].agreements[-1].members) == 2


@pytest.mark.parametrize("kind", ["forged", "of a member", "repeated", "another round's", "none"])
def test_an_agreement_that_goes_by_false_departures_is_void(tmp_path: Path, kind: str) -> None:
    replicas = members(tmp_path, 3)
    liar, victim, other = replicas
    words = [Departure(run_id="test", member=each.settings.own_id, round_index=1) for each in (victim, other)]
    words.sort(key=lambda each: each.member)
    identities = {each.settings.own_id: each.settings.identity for each in (victim, other)}
    true_words = [each.signed(identities[each.member]) for each in words]
    own_word = words[0].signed(liar.settings.identity)
    departures = {
        "none": (),
        "forged": tuple(own_word.model_copy(update={"member": each.member}) for each in words),
        "of a member": tuple(sorted([own_word, *true_words], key=lambda each: each.member)),
        "repeated": (true_words[0], *true_words),
        "another round's": tuple(
            each.model_copy(update={"round_index": 0}).signed(identities[each.member]) for each in words
        ),
    }[kind]
    failing = replace(liar.settings, round_timeout_s=0.5)
    liar.collective._settings = failing
    with pytest.raises(RoundFailedError):  # Its contribution is there then.
        liar.take_part()
    agreed = liar.agreements[0]
    entry = next(each for each in agreed.members if each.member == liar.settings.own_id)
    (put,) = (each for each in Place(folder(tmp_path)).round(1).contributions if each.member == liar.settings.own_id)
    lie = agreed.model_copy(
        update={
            "round_index": 1,
            "attempt": 0,
            "follows": agreed.digest,
            "state_digest": liar.digest(),
            "members": (entry.model_copy(update={"payload_sha256": put.payload_sha256}),),
            "departures": departures,
        }
    ).signed(liar.settings.identity)
    folder(tmp_path).put(agreement_key(1, 0), lie.wire(), cache=CachePolicy.NONE)
    one_round([victim, other])
    assert len(victim.agreements[-1].members) == 3
    assert victim.agreements[-1].attempt == 1


def test_departures_of_nobody_that_is_waited_for_are_not_read(tmp_path: Path) -> None:
    settings = settings_of(folder(tmp_path))
    departures = Departures(settings, 1)
    departures.note(RoundListing(departures=tuple(f"{number:064x}" for number in range(1000))))
    assert departures.among(["f" * 64]) == []
    assert settings.place.cost.num_reads == 0


def test_what_was_said_of_old_rounds_is_removed_with_them(tmp_path: Path) -> None:
    replicas = members(tmp_path, 2)
    put_departure(replicas[0].settings, 0)
    put_departure(replicas[0].settings, 9)
    for _ in range(8):
        one_round(replicas)
    listed = Place(folder(tmp_path)).rounds()
    assert listed[0].departures == ()
    assert listed[9].departures == (replicas[0].settings.own_id,)
