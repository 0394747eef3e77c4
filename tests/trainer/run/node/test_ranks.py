"""What the ranks of a cluster decide together: at their end, and beside a round."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.node_ranks import beside_a_round, end_of_steps, weights_under_a_cap
from tests.support.rank_group import run_ranks


@pytest.mark.slow
def test_ranks_wait_for_the_last_round_together_or_not_at_all(tmp_path: Path) -> None:
    """One that alone would wait for it would wait for the others until the round's deadline."""
    first, second = run_ranks(end_of_steps, 2, tmp_path)
    assert first["drained"] == second["drained"] == [True, False, False]


@pytest.mark.slow
def test_a_decision_does_not_meet_a_round_in_the_background(tmp_path: Path) -> None:
    for result in run_ranks(beside_a_round, 2, tmp_path):
        assert result == {"least": 7, "gathered": 200}


@pytest.mark.slow
def test_the_cap_on_weights_is_that_of_the_run(tmp_path: Path) -> None:
    for weights in run_ranks(weights_under_a_cap, 2, tmp_path):
        assert weights == [2.0, 2.0]
