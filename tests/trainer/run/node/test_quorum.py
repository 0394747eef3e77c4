"""Three nodes 1 : 2 : 4 fast, as processes of their own: rounds closed by a quorum beside rounds that wait for all."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from scripts.trainer_bench.quorum_live import LiveResult, LiveSetting, live

SETTING = LiveSetting(seconds=180.0, step_s=1.0, inner_steps=10, measured_at=(1.0,))
_AT_MOST_S = 1200  # Most of it for starting on a machine that is busy with much else.


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(_AT_MOST_S)
def test_more_tokens_count_in_the_same_time_than_with_a_barrier_and_all_end_alike(tmp_path: Path) -> None:
    """Side by side, so that whatever else the machine does slows both."""

    def run(rule: str) -> LiveResult:
        folder = tmp_path / rule.replace(" ", "-")
        folder.mkdir()
        return live(rule, SETTING, folder)

    with ThreadPoolExecutor(2) as pool:
        barrier, quorum = pool.map(run, ["barrier", "quorum 2"])
    assert barrier.differing == quorum.differing == 0
    assert quorum.num_rounds > barrier.num_rounds >= 2
    assert quorum.tokens_counted_per_s > 1.15 * barrier.tokens_counted_per_s, (barrier, quorum)
    assert quorum.held_out["1"] < barrier.held_out["1"] + 0.1, (barrier, quorum)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(_AT_MOST_S)
def test_fragments_go_on_by_a_quorum_beside_training_and_all_end_alike(tmp_path: Path) -> None:
    setting = LiveSetting(seconds=120.0, step_s=1.0, inner_steps=12, measured_at=())
    result = live("quorum 2, fragments, overlap", setting, tmp_path)
    assert result.differing == 0
    assert result.num_rounds >= 6, result  # Both fragments, three times.
    assert result.tokens_counted_per_s > 0.5 * result.tokens_per_s, result
