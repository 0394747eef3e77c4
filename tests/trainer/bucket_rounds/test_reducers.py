"""Rounds in a bucket whose slices have reducers: what a member fetches, and reducers that are gone or lie."""

from __future__ import annotations

import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from tests.support.bucket_rounds import FAST, Replica, folder, settings_of, together
from trainer.aggregation import RuleConfig
from trainer.bucket_rounds.documents import AgreedMember, Agreement, Claims, payload_digest
from trainer.bucket_rounds.forms import PART_VALUES, DenseForm
from trainer.bucket_rounds.object_names import reduced_key, result_key, slice_key
from trainer.bucket_rounds.place import Place
from trainer.bucket_rounds.reducers import (
    SlicedForm,
    SliceReduction,
    SliceWord,
    _Slice,
    checked_by,
    reducers_of,
    require_sliceable,
)
from trainer.compression.vectors import codec_named
from trainer.errors import RoundFailedError, TrainerUsageError
from trainer.network.rpc import Identity

NUM_SLICES = 6
NUM_VALUES = 5 * PART_VALUES + 1000  # Six parts, the last a short one.


def form_of(num_values: int, codec: str = "int8") -> SlicedForm:
    return SlicedForm(DenseForm(codec_named(codec), num_values, num_threads=1), NUM_SLICES)


def members(path: Path, count: int, rule: RuleConfig | None = None, wait_s: float = 0.5) -> list[Replica]:
    config = replace(FAST, quorum=count, propose_after_s=wait_s)  # However busy this machine is, all are in it.
    options = {"form_of": form_of, "rule": rule, "config": config, "gather_timeout_s": 60.0}
    return [Replica(settings_of(folder(path), **options), NUM_VALUES) for _ in range(count)]  # type: ignore[arg-type]


def one_round(replicas: list[Replica]) -> None:
    together({str(number): each.take_part_and_keep for number, each in enumerate(replicas)})


def assert_alike(replicas: list[Replica]) -> None:
    assert len({each.digest() for each in replicas}) == 1


@pytest.mark.parametrize("num_values", [1, PART_VALUES, NUM_VALUES, 9 * PART_VALUES])
def test_slices_are_whole_parts_and_cover_the_vector(num_values: int) -> None:
    form = form_of(num_values)
    places = [form.place(number) for number in range(form.num_slices)]
    assert [places[0].start, places[-1].stop] == [0, num_values]
    assert all(before.stop == after.start for before, after in pairwise(places))
    payload = form.encode(torch.linspace(-1, 1, num_values))
    assert b"".join(form.pieces(payload)) == bytes(payload)
    assert len(form.digests_of(payload)) == form.max_payload_bytes
    values = [form.of_slice(number).num_values for number in range(form.num_slices)]
    assert sum(values) == num_values and all(values)


@pytest.mark.parametrize("rule", ["krum", "multi_krum", "centered_clip"])
def test_rules_over_whole_vectors_are_refused(rule: str) -> None:
    with pytest.raises(TrainerUsageError, match="by coordinates"):
        require_sliceable(RuleConfig(rule=rule))  # type: ignore[arg-type]


@pytest.mark.slow
def test_members_end_alike_with_what_everybody_would_have_reduced(tmp_path: Path) -> None:
    replicas = members(tmp_path, 4, RuleConfig())
    brought = {each.settings.own_id: each.work() for each in replicas}
    for _ in range(2):
        one_round(replicas)
        assert_alike(replicas)
    first = replicas[0].results[0]
    dense = DenseForm(codec_named("int8"), NUM_VALUES, num_threads=1)
    weights = dict(zip(first.report.members, first.report.weights, strict=True))
    payloads = {member: dense.encode(vector) for member, vector in brought.items()}
    whole = dense.aggregate(payloads, weights, RuleConfig(), torch.zeros(NUM_VALUES)).vector
    assert float((first.vector - whole).abs().max()) < 0.02  # The result is encoded once more.
    assert first.report.dropped == ()


@pytest.mark.slow
def test_a_reducer_that_says_what_is_false_is_named_and_all_end_with_the_truth(tmp_path, monkeypatch) -> None:
    replicas = members(tmp_path, 5)
    liar = replicas[2].settings.own_id
    honest = SliceReduction._say

    def lie(self: SliceReduction, each: _Slice, own: tuple[str, bytes]) -> None:
        if self._identity.peer_id == liar:
            false = bytes(len(own[1]))
            own = (payload_digest(false), false)
        honest(self, each, own)

    monkeypatch.setattr(SliceReduction, "_say", lie)
    one_round(replicas)
    assert_alike(replicas)
    expected = sum(Replica(each.settings, NUM_VALUES).work() for each in replicas) / 5  # type: ignore[operator]
    assert float((replicas[0].results[0].vector - expected).abs().max()) < 0.05
    named = [liar in dict(each.results[0].report.dropped) for each in replicas if each.settings.own_id != liar]
    assert any(named)
    one_round(replicas)
    assert_alike(replicas)


@pytest.mark.slow
def test_reducers_that_are_gone_after_the_agreement_are_stood_in_for(tmp_path, monkeypatch) -> None:
    replicas = members(tmp_path, 4)
    gone = replicas[1].settings.own_id
    honest = SliceReduction.run

    def run(self: SliceReduction) -> object:
        if self._identity.peer_id == gone:
            raise KeyboardInterrupt  # As a process that ends here: it says nothing.
        return honest(self)

    monkeypatch.setattr(SliceReduction, "run", run)
    calls = {str(number): each.take_part_and_keep for number, each in enumerate(replicas)}

    def dies() -> None:
        with pytest.raises(KeyboardInterrupt):
            replicas[1].take_part()

    calls["1"] = dies
    together(calls)
    assert_alike([each for each in replicas if each.settings.own_id != gone])


@pytest.mark.slow
def test_what_a_member_fetches_does_not_grow_with_the_members(tmp_path: Path) -> None:
    received = {}
    for count in (4, 12):
        replicas = members(tmp_path / str(count), count, wait_s=30.0)  # Nobody steps in for one who is slow.
        one_round(replicas)
        assert_alike(replicas)
        bytes_each = [each.results[0].report.received_bytes / NUM_VALUES for each in replicas]
        received[count] = sum(bytes_each) / count
    # Two slices of six for each of n members to reduce, shared among n; one more of n to check; and the result.
    assert received[12] < 12 / 2 and received[12] - received[4] < 0.5 * (12 - 4)


@pytest.mark.slow
def test_two_reducers_with_one_lie_are_named_by_whoever_checks_their_slice(tmp_path, monkeypatch) -> None:
    replicas = members(tmp_path, 6)
    honest = SliceReduction._say

    def lie(self: SliceReduction, each: _Slice, own: tuple[str, bytes]) -> None:
        if each.number == 0 and self._identity.peer_id in reducers_of(self._agreement, 0)[:2]:
            own = (payload_digest(bytes(len(own[1]))), bytes(len(own[1])))
        honest(self, each, own)

    monkeypatch.setattr(SliceReduction, "_say", lie)
    together({str(number): each.take_part for number, each in enumerate(replicas)})
    agreement = replicas[0].agreements[0]
    liars = reducers_of(agreement, 0)[:2]
    for each in replicas:
        own_id, result = each.settings.own_id, each.results[0]
        if own_id in liars:
            continue
        if checked_by(agreement, each.settings.identity, NUM_SLICES) == 0:
            assert set(liars) <= dict(result.report.dropped).keys()
            assert bool(result.vector[:1000].any())
        elif bool(result.vector[:1000].any()):  # It heard of one who checked before it had believed the two.
            assert set(liars) <= dict(result.report.dropped).keys()
    num_checks = [checked_by(agreement, Identity.create(), NUM_SLICES) for _ in range(600)]
    assert all(50 < num_checks.count(number) < 150 for number in range(NUM_SLICES))


class OneSlice:
    """A round of one slice with five members, as it lies in a folder; ``reduction`` is of one who is not to reduce."""

    def __init__(self, path: Path, wait_s: float) -> None:
        self.place = Place(folder(path))
        self.identities = {each.peer_id: each for each in (Identity.create() for _ in range(5))}
        self.form = SlicedForm(DenseForm(codec_named("fp32"), 8, num_threads=1), 1)
        payload = self.form.encode(torch.ones(8))
        claims = Claims(num_batches=1, age_s=0.0, progress=1.0, vocabulary_rows=0)
        listed = [
            AgreedMember(member=key, payload_sha256="0" * 64, claims=claims, weight=1.0)
            for key in sorted(self.identities)
        ]
        for key in self.identities:
            self.place.put_once(slice_key(0, key, 0, payload_digest(payload)), payload)
        self.agreement = Agreement(
            run_id="test", member=listed[0].member, round_index=0, attempt=0, follows="", state_digest="",
            form=self.form.name, num_values=8, members=tuple(listed),
        ).signed(self.identities[listed[0].member])  # fmt: skip
        *self.reducers, own, self.fourth, self.fifth = reducers_of(self.agreement, 0)
        deadline_s = time.monotonic() + 20

        def check_time() -> None:
            if time.monotonic() > deadline_s:
                raise RoundFailedError("no result in time")

        self.reduction = SliceReduction(
            self.place, self.identities[own], self.form, self.agreement,
            dict.fromkeys(self.identities, self.form.digests_of(payload)),
            RuleConfig(rule="mean", validation="off"), torch.zeros(8), false_reducers=set(),
            agreed_at=time.time() + 10, wait_s=wait_s, poll_interval_s=0.01, check_time=check_time,
        )  # fmt: skip

    def say(self, member: str, digest: str) -> None:
        word = SliceWord(
            run_id="test", member=member, round_index=0, agreement=self.agreement.digest, number=0, result_sha256=digest
        ).signed(self.identities[member])
        self.place.put_once(reduced_key(0, 0, member), word.wire())


def test_two_who_are_not_to_reduce_a_slice_have_no_say_in_it(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(SliceReduction, "_spot_check", lambda _self: None)  # Its spot check is of another slice.
    one = OneSlice(tmp_path, wait_s=0.1)
    lie = bytes(one.form.encode(torch.full((8,), 7.0)))
    one.place.put_once(result_key(0, 0, payload_digest(lie)), lie)
    one.say(one.fourth, payload_digest(lie))
    one.say(one.fifth, payload_digest(lie))
    result = one.reduction.run()
    assert torch.equal(result.vector, torch.ones(8))
    assert {one.fourth, one.fifth} <= dict(result.dropped).keys()


def test_whoever_proposes_an_agreement_chooses_no_reducers_by_signing_it_again(tmp_path: Path) -> None:
    one = OneSlice(tmp_path, wait_s=1.0)
    again = one.agreement.model_copy(update={"has_snapshot": True, "attempt": 3, "signature": "1" * 128})
    assert again.digest != one.agreement.digest
    assert reducers_of(again, 0) == reducers_of(one.agreement, 0)
    others = tuple(each.model_copy(update={"payload_sha256": "1" * 64}) for each in one.agreement.members)
    orders = {tuple(reducers_of(one.agreement.model_copy(update={"members": others}), number)) for number in range(8)}
    assert len(orders) > 1


@pytest.mark.parametrize("is_squatted", [True, False])
def test_a_result_that_nobody_can_read_holds_no_round_up(tmp_path: Path, is_squatted: bool) -> None:
    """Bytes of another digest under the true one's name, which anybody can put there first; or what does not decode."""
    one = OneSlice(tmp_path, wait_s=1e6)
    false = bytes(12)
    said = payload_digest(one.form.encode(torch.ones(8)) if is_squatted else false)
    one.place.put_once(result_key(0, 0, said), false)
    for member in one.reducers:
        one.say(member, said)
    result = one.reduction.run()
    assert torch.equal(result.vector, torch.ones(8))
    assert dict(result.dropped).keys() == (set() if is_squatted else set(one.reducers))
