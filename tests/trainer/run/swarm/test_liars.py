"""Members that lie about their pseudo-gradient: under every robust rule the others learn as if they were not there.

Clean is a run of the honest members alone under the same rule, told that nobody lies. Real processes and sockets, whole
rounds: 8 outer steps, 48 inner ones a member.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.training_actor import ATTACKS, NUM_ROUNDS, Outcome, TrainingCast

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

RULES = ("trimmed_mean", "median", "krum", "centered_clip")
TOLERANCE = 1.05


@pytest.fixture(scope="module")
def cast(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TrainingCast]:
    with TrainingCast(tmp_path_factory.mktemp("cast")) as started:
        yield started


def check_named(outcome: Outcome, attack: str) -> None:
    """The report says of NaN who sent it, every round, and of what validation can see, in some round."""
    num_liars = len(outcome.liars)
    if attack == "nan":
        assert [len(named) for named in outcome.said_of_liars("dropped")] == [num_liars] * NUM_ROUNDS
        assert all(report["completeness"] < 1 for report in outcome.reports)
    else:
        assert all(report["completeness"] == 1 for report in outcome.reports)
    if attack in ("flip", "random", "zero", "heavy_flip"):
        assert max(len(named) for named in outcome.said_of_liars("validation")) == num_liars
    if attack in ("weight", "heavy_flip"):
        for report in outcome.reports:
            assert max(report["weights"]) == pytest.approx(3 * min(report["weights"]))


@pytest.mark.long
def test_by_default_who_lies_is_left_out_of_every_round(cast: TrainingCast) -> None:
    alone = cast.run(4, {})
    for attack in ("flip", "heavy_flip"):
        outcome = cast.run(4, {}, attack, 1)
        assert outcome.loss < TOLERANCE * alone.loss, attack
        assert [len(named) for named in outcome.said_of_liars("dropped")] == [1] * NUM_ROUNDS
        assert {report["rule"] for report in outcome.reports} == {"trimmed_mean"}
        why = [reason for report in outcome.reports for _, reason in report["dropped"]]
        assert all(reason.startswith("direction") for reason in why), why


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("rule", "attacks", "num_members", "num_liars"),
    [
        ("trimmed_mean", ("flip", "heavy_flip"), 5, 1),
        *(pytest.param(rule, ATTACKS, *who, marks=pytest.mark.long) for rule in RULES for who in ((5, 1), (7, 2))),
    ],
)
def test_rules_against_lies(cast, rule, attacks, num_members, num_liars):
    alone = cast.run(num_members - num_liars, {"rule": rule, "num_byzantine": 0, "validation": "log"})
    robust: dict[str, Any] = {"rule": rule, "num_byzantine": num_liars, "validation": "log"}
    for attack in attacks:
        outcome = cast.run(num_members, robust, attack, num_liars)
        assert outcome.loss < TOLERANCE * alone.loss, f"{rule} against {attack}"
        check_named(outcome, attack)
