"""Strangers attack a swarm of 3 × 2 workers and 2 drivers: it goes on, lets newcomers in, and no process ends.

The minute of each attack is ``long``; ``scripts/test.sh -m long tests/trainer/attacks`` runs all of them, in some five
minutes each. That defences hold in principle is asserted by the quick tests beside the code that has them.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.support.attacked_swarm import OPTIONS, attacked
from tests.support.pipeline_swarm import PipelineSwarm

ATTACKS = sorted(
    path.stem
    for path in (Path(__file__).resolve().parents[2] / "support" / "attacks").glob("*.py")
    if path.stem not in ("__init__", "__main__")
)
SECONDS = 60.0
MIN_PROGRESS = 0.8
MAX_NEWCOMER_S = 10.0


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("source_host", ["127.0.0.66", "127.0.0.1"])
@pytest.mark.parametrize("name", ATTACKS)
def test_honest_nodes_train_on(tmp_path: Path, name: str, source_host: str) -> None:
    with PipelineSwarm(tmp_path / "swarm", **OPTIONS) as swarm:
        result = attacked(swarm, name, seconds=SECONDS, source_host=source_host)
        sys.stdout.write(f"{name} from {source_host}: progress {result.progress:.2f}; {result}\n")
        assert not result.ended, result
        assert all("Traceback" not in node.output() for node in swarm.nodes.values()), result
    assert result.progress >= MIN_PROGRESS, result
    assert result.newcomer_s <= MAX_NEWCOMER_S and result.newcomer_served, result
