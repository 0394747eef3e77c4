"""The simulation of quorums compares the same nodes, repeatably, and counts nothing that was not done."""

from __future__ import annotations

import math

import pytest

from scripts.trainer_bench.quorum_simulation import Scenario, simulate

SHORT = Scenario(hours=6.0)


def test_a_quorum_keeps_nodes_busier_than_a_barrier_and_its_work_is_staler() -> None:
    barrier, quorum = simulate("barrier", SHORT), simulate("quorum", SHORT, 0.5)
    assert quorum.utilisation > 1.2 * barrier.utilisation
    assert quorum.counted_share > 1.2 * barrier.counted_share
    assert barrier.mean_lag == 0.0 < quorum.mean_lag
    assert simulate("quorum", SHORT, 0.5) == quorum


@pytest.mark.parametrize("rule", ["barrier", "invited", "quorum", "quorum, invited"])
def test_no_more_counts_than_was_done_and_alike_nodes_need_no_quorum(rule: str) -> None:
    alike = Scenario(hours=6.0, speeds=(1.0,) * 6, alive_s=math.inf, hang_share=0.0)
    found = simulate(rule, alike, 0.5)  # type: ignore[arg-type]
    assert 0.0 < found.fresh_share <= found.counted_share <= 1.05 * found.utilisation <= 1.05
    assert found.utilisation > 0.85
