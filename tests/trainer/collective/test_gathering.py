"""Sparse contributions side by side: all aggregate alike, and what a reducer or a member spoils is found out."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support.round_actor import agreement_of
from trainer.aggregation import RuleConfig
from trainer.aggregation.sparse import aggregate_sparse
from trainer.collective.gathering import GatheringArithmetic
from trainer.collective.planning import cut_values
from trainer.compression.sparse import CHUNK_VALUES, SPARSE
from trainer.errors import CodecError

NUM_VALUES = 5 * CHUNK_VALUES + 1000
MEMBERS = 3
RULE = RuleConfig(rule="mean")
AGREEMENT = agreement_of(MEMBERS, NUM_VALUES).model_copy(
    update={"part_values": cut_values(NUM_VALUES, MEMBERS, 1 << 18, CHUNK_VALUES)}
)


def vector_of(number: int) -> torch.Tensor:
    common = torch.randn(NUM_VALUES, generator=torch.Generator().manual_seed(99)) ** 3
    return common + 0.3 * torch.randn(NUM_VALUES, generator=torch.Generator().manual_seed(number))


def member(number: int) -> GatheringArithmetic:
    vector = vector_of(number)
    return GatheringArithmetic(
        AGREEMENT,
        SPARSE,
        RULE,
        vector,
        torch.zeros(1).expand(NUM_VALUES),
        vector.clone(),
        sparse=SPARSE,
        own_id=AGREEMENT.peer_ids[number],
    )


def gathered(members: list[GatheringArithmetic], part: int) -> bytes:
    payloads = {each.own_id: each.encode_own(part) for each in members}
    return bytes(members[0].reduce(part, payloads).payload)


def test_parts_are_cut_at_chunks() -> None:
    assert AGREEMENT.part_values % CHUNK_VALUES == 0
    assert AGREEMENT.num_parts == 6


def test_all_compute_what_whole_vectors_come_to() -> None:
    members = [member(number) for number in range(MEMBERS)]
    for part in range(AGREEMENT.num_parts):
        payload = gathered(members, part)
        for each in members:
            each.decode_result(part, payload, torch.zeros(0))
    whole = [SPARSE.decode_sparse(SPARSE.encode(vector_of(number)), NUM_VALUES) for number in range(MEMBERS)]
    expected = aggregate_sparse(whole, [1.0] * MEMBERS, RULE)
    for number, each in enumerate(members):
        outcome = each.outcome()
        assert outcome is not None
        assert torch.equal(outcome.vector, expected.vector)
        left = vector_of(number)
        whole[number].subtract_from(left)
        assert torch.equal(each.carried_over(outcome, None), left)


def test_a_member_of_which_a_part_is_missing_is_left_out_and_keeps_everything() -> None:
    members = [member(number) for number in range(MEMBERS)]
    for part in range(AGREEMENT.num_parts):
        payload = gathered(members[:2] if part == 3 else members, part)
        for each in members:
            each.decode_result(part, payload, torch.zeros(0))
    outcomes = [each.outcome() for each in members]
    whole = [SPARSE.decode_sparse(SPARSE.encode(vector_of(number)), NUM_VALUES) for number in range(2)]
    expected = aggregate_sparse([*whole, None], [1.0] * MEMBERS, RULE)
    assert all(outcome is not None and torch.equal(outcome.vector, expected.vector) for outcome in outcomes)
    assert torch.equal(members[2].carried_over(outcomes[2], None), vector_of(2))


def test_a_round_in_which_nobody_arrived_whole_leaves_all_work_waiting() -> None:
    one = member(0)
    for part in range(AGREEMENT.num_parts):
        one.decode_result(part, bytes(MEMBERS), torch.zeros(0))
    outcome = one.outcome()
    assert outcome is None
    assert torch.equal(one.carried_over(outcome, None), vector_of(0))


def test_what_does_not_decode_is_dropped_by_the_reducer_and_named() -> None:
    members = [member(number) for number in range(MEMBERS)]
    payloads = {each.own_id: each.encode_own(0) for each in members}
    payloads[members[1].own_id] = b"\xff" * len(payloads[members[1].own_id])
    reduced = members[0].reduce(0, payloads)
    assert list(reduced.dropped) == [members[1].own_id]
    assert reduced.num_included == 2
    assert bytes(reduced.payload[:MEMBERS]) == b"\x01\x00\x01"


def test_a_reducer_that_changes_what_a_member_sent_is_found_out_by_it() -> None:
    members = [member(number) for number in range(MEMBERS)]
    payload = bytearray(gathered(members, 0))
    payload[-1] ^= 3  # A value of the last member takes another mean.
    for each in members[:2]:
        each.decode_result(0, bytes(payload), torch.zeros(0))
    with pytest.raises(CodecError, match="changed what this node sent"):
        members[2].decode_result(0, bytes(payload), torch.zeros(0))


@given(st.binary(max_size=300))
def test_any_bytes_are_contributions_or_an_error(payload: bytes) -> None:
    try:
        member(0).decode_result(0, payload, torch.zeros(0))
    except CodecError:
        return
    assert len(payload) == MEMBERS + sum(payload[:MEMBERS]) * SPARSE.encoded_bytes(CHUNK_VALUES)


def test_a_part_that_is_reduced_again_is_sent_again_without_counting_twice() -> None:
    one = member(0)
    first = one.encode_own(1)
    left = one.residual.clone()
    assert one.encode_own(1) == first
    assert torch.equal(one.residual, left)
