"""What stages, workers and micro-batches are called."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.errors import TrainerUsageError
from trainer.model.config import stage_names
from trainer.network.discovery.stage_report import FIRST_NUMBER, LAST_NUMBER, StageUid, free_number
from trainer.pipeline.protocol.work import MicroBatchId

STAGES = st.sampled_from(stage_names(7))
COUNTS = st.integers(0, 10**9 - 1)


def test_a_run_s_stages_have_a_head_and_a_tail() -> None:
    assert stage_names(2) == ("head", "tail")
    assert stage_names(4) == ("head", "body-1", "body-2", "tail")
    with pytest.raises(TrainerUsageError, match="2 or more, found 1"):
        stage_names(1)


@given(STAGES, st.integers(1, 999_999))
def test_a_worker_s_name_says_stage_and_number(stage: str, number: int) -> None:
    uid = StageUid(stage, number)
    assert StageUid.parse(str(uid)) == uid
    assert str(uid).startswith(stage.replace("-", "") + ".0.")


@pytest.mark.parametrize(
    "text", ["", "head.0", "head.0.0", "body.0.4", "body0.0.4", "body-1.0.4", "head.1.42", "tail.0.04", "head.0.42\n"]
)
def test_other_names_are_none(text: str) -> None:
    with pytest.raises(TrainerUsageError, match=r"such as body3\.0\.55"):
        StageUid.parse(text)


@pytest.mark.slow
@given(st.integers(0, 2**64), st.sets(st.integers(FIRST_NUMBER, FIRST_NUMBER + 20)))
def test_a_free_number_is_one_nobody_has(seed: int, taken: set[int]) -> None:
    number = free_number(seed, taken)
    assert number not in taken
    assert FIRST_NUMBER <= number <= LAST_NUMBER


def test_where_all_of_002_s_numbers_are_taken_it_goes_on_behind_them() -> None:
    taken = set(range(FIRST_NUMBER, LAST_NUMBER + 1))
    assert free_number(5, taken) == LAST_NUMBER + 1
    assert free_number(5, taken | {LAST_NUMBER + 1}) == LAST_NUMBER + 2


@given(COUNTS, COUNTS, COUNTS)
def test_a_micro_batch_has_one_spelling(epoch: int, shard: int, row: int) -> None:
    found = MicroBatchId(epoch, shard, row)
    assert MicroBatchId.parse(str(found)) == found


@pytest.mark.parametrize("text", ["", "e0.s1", "e00.s1.r1", "e0.s1.r-1", "e0.s1.r1 ", "E0.S1.R1", "e0.s1.r99999999999"])
def test_other_spellings_are_none(text: str) -> None:
    with pytest.raises(TrainerUsageError, match=r"such as e0\.s17\.r4096"):
        MicroBatchId.parse(text)
