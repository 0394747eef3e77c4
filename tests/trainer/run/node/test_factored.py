"""Whole nodes whose pseudo-gradients travel as factors: `python -m trainer` with collective.powersgd_rank."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.training_swarm import TrainingSwarm

_WAIT_S = 400.0


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_nodes_and_a_joiner_hold_one_state_after_each_round_and_send_less(tmp_path: Path) -> None:
    options = {"collective": {"powersgd_rank": 8}, "diloco": {"inner_steps": 10}}
    with TrainingSwarm(tmp_path, **options) as swarm:
        swarm.begin("a", "b")
        swarm.wait_for_step(2, timeout_s=_WAIT_S)
        swarm.begin("late")
        nodes = [swarm[name] for name in ("a", "b", "late")]

        def in_common() -> list[int]:  # A state may be skipped where the next round ends before it is written.
            return sorted(set.intersection(*(set(node.states()) for node in nodes)))

        swarm.wait(lambda: len(in_common()) >= 4, "four states that all three hand out", timeout_s=_WAIT_S)
        assert swarm.stop() == [143, 143, 143]
        states, together = [node.states() for node in nodes], in_common()
        for step in together[1:]:
            assert len({known[step] for known in states}) == 1, step
        saved = nodes[0].checkpoint()["diloco"]["fragments"][0]
        assert saved["basis"].numel() < saved["anchor"].numel() / 8 and saved["residual"].any()
        # Others' fetching is counted too; a round of two sends a whole vector where nothing is factored.
        sent_bytes = min(event.number("sent_bytes") for event in nodes[0].events("round"))
        assert 0 < sent_bytes < 4 * saved["anchor"].numel() / 8
