"""When workers join, and which stage they take: decisions without processes."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.errors import TrainerUsageError
from trainer.model import preset
from trainer.model.plan import StagePlan
from trainer.network.discovery.stage_report import StageReport, StageUid
from trainer.run.config import from_mapping
from trainer.run.config.swarm import JoinConfig, SwarmConfig
from trainer.run.swarm.joining import JoinWindow, RejoinDelay, is_ahead, neediest_stage, version_of_state

PLAN = StagePlan.of(preset("tiny", 2048), 3)


def report(stage: str, rows_per_s: float, status: str = "serving", number: int = 40) -> StageReport:
    return StageReport.model_validate(
        {"uid": str(StageUid(stage, number)), "incarnation": "0" * 16, "status": status, "rows_per_s": rows_per_s}
    )


def test_a_stage_without_anybody_needs_help_most() -> None:
    assert neediest_stage(PLAN, [report("head", 1.0), report("tail", 1.0)]) == "body-1"
    assert neediest_stage(PLAN, [report("head", 1.0), report("body-1", 1.0, "joining")]) == "tail"
    leaving = [report("head", 9.0, "leaving"), report("body-1", 1.0), report("tail", 1.0)]
    assert neediest_stage(PLAN, leaving) == "head"


def test_newcomers_that_come_together_spread() -> None:
    chosen = Counter(neediest_stage(PLAN, [], number) for number in range(30))
    assert chosen == {"head": 10, "body-1": 10, "tail": 10}


def test_else_the_slowest_stage_of_all_its_workers_together() -> None:
    reports = [report("head", 50.0), report("body-1", 20.0), report("body-1", 20.0), report("tail", 45.0)]
    assert neediest_stage(PLAN, reports) == "body-1"
    assert neediest_stage(PLAN, [*reports, report("body-1", 20.0)]) == "tail"


def test_who_says_nothing_yet_counts_as_the_slowest_that_does() -> None:
    reports = [report("head", 0.0), report("body-1", 30.0), report("tail", 10.0), report("tail", 0.0)]
    assert neediest_stage(PLAN, reports) == "head"


@pytest.mark.slow
@given(st.lists(st.tuples(st.sampled_from(PLAN.names), st.floats(0, 1e6)), max_size=12), st.integers(0, 2**32))
def test_the_choice_is_always_a_stage_of_the_run(found: list[tuple[str, float]], number: int) -> None:
    assert neediest_stage(PLAN, [report(stage, rate) for stage, rate in found], number) in PLAN.names


@pytest.mark.parametrize(
    ("others", "expected"),
    [
        ([10], True),  # A tie, which the newer state wins.
        ([40], False),
        ([41], False),
        ([10, 10], False),  # Most of the stage.
        ([10, 41], True),  # One of two that are new, which came a moment later.
        ([38, 60], False),  # The others have gone on.
        ([10, 10, 41], True),
        ([10, 10, 10, 41], False),
        ([], False),
    ],
)
def test_who_comes_back_with_more_keeps_it_unless_most_of_the_stage_has_less(others: list[int], expected: bool) -> None:
    reports = [report("tail", 1.0, number=40 + index) for index in range(len(others))]
    reports = [it.model_copy(update={"version": version}) for it, version in zip(reports, others, strict=True)]
    assert is_ahead(40, reports) is expected


def test_a_newcomer_waits_for_the_next_round_or_for_one_that_stands_still() -> None:
    window = JoinWindow(JoinConfig(window=0.1, idle_s=20.0))
    assert window.is_open(7, 0.05, 0.0)
    assert not window.is_open(7, 0.5, 1.0)
    assert not window.is_open(7, 0.6, 20.0)
    assert not window.is_open(7, 0.6, 39.0)
    assert window.is_open(7, 0.6, 40.0)
    assert not window.is_open(7, 0.7, 41.0)
    assert window.is_open(8, 0.0, 42.0)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"num_stages": 1}, "num_stages: expected 2 or more, found 1"),
        ({"vocab_rows": 1000}, "multiple of 1024, found 1000"),
        ({"activation_codec": "subspace+fp16"}, r"expected swarm\.subspace\.rank"),
        ({"join": {"window": 0.0}}, "window: expected more than 0"),
    ],
)
def test_options_that_make_no_sense(options: dict[str, object], said: str) -> None:
    with pytest.raises(TrainerUsageError, match=said):
        from_mapping(SwarmConfig, options, "swarm.")


@pytest.mark.parametrize(
    ("num_steps", "versions", "version"),
    [
        (170, [172], 172),
        (170, [], 170),
        (170, [0, 0, 0, 172], 172),
        (170, [2**53] * 9 + [172] + [0] * 9, 172),
        (170, [168, 172], 168),
        (0, [0], 0),
    ],
)
def test_a_states_version_is_not_that_which_most_announce(num_steps: int, versions: list[int], version: int) -> None:
    assert version_of_state(num_steps, versions) == version


def test_a_worker_that_keeps_losing_touch_asks_less_and_less_often() -> None:
    delay = RejoinDelay()
    assert delay.next_s(0.0) == 0.0
    waited = []
    now_s = 0.0
    for _ in range(8):
        delay.joined(now_s)
        waited.append(delay.next_s(now_s + 1.0))
        now_s += 1.0 + waited[-1]
    assert waited == [0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 16.0, 16.0]
    delay.joined(now_s)
    assert delay.next_s(now_s + 30.0) == 0.0
    delay.joined(now_s + 30.0)
    assert delay.next_s(now_s + 31.0) == 0.5
