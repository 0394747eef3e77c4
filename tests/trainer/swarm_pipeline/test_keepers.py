"""A whole swarm whose keeper's machine is lost: another driver keeps the account, and training goes on."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.support.pipeline_swarm import STAGES, PipelineSwarm, steps_of
from tests.support.training_swarm import merged
from trainer.monitor import SwarmAccount

DRIVERS = ("driver-1", "driver-2", "driver-3")
TAKEOVER_S = 5.0


def options_for(journal: str, folder: Path) -> dict[str, Any]:
    ledger = {
        "folder": {"journal": str(folder / "shared")},
        "replicated": {"journal": "replicated", "keepers": list(DRIVERS)},
    }[journal]
    return {"swarm": {"ledger": merged(ledger, {"takeover_s": TAKEOVER_S, "lease_s": 30.0})}}


def known_account(swarm: PipelineSwarm, names: list[str], keeper_before: str = "") -> SwarmAccount | None:
    """What the drivers that are left say, once all of them name one keeper, another than before."""
    found = [swarm.account(name) for name in names]
    keepers = {"" if each is None else each.keeper for each in found}
    return found[0] if len(keepers) == 1 and keepers <= set(names) and keeper_before not in keepers else None


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("journal", ["folder", "replicated"])
def test_a_swarm_goes_on_without_the_machine_of_its_keeper(journal: str, tmp_path: Path) -> None:
    with PipelineSwarm(tmp_path, **options_for(journal, tmp_path)) as swarm:
        for name in DRIVERS:
            swarm.begin_driver(name)
        swarm.begin_workers(*STAGES)
        for name in DRIVERS:
            swarm.wait_for_steps(name, 5)
        swarm.wait(lambda: known_account(swarm, list(DRIVERS)) is not None, "a keeper that all know")
        before = known_account(swarm, list(DRIVERS))
        assert before is not None
        swarm[before.keeper].kill()
        shutil.rmtree(tmp_path / "home" / "ledger" / "pipeline" / "replica" / before.keeper, ignore_errors=True)
        left = [name for name in DRIVERS if name != before.keeper]
        alive = [swarm[name] for name in (*left, *STAGES)]
        swarm.wait(
            lambda: known_account(swarm, left, before.keeper) is not None, "another keeper that all know", alive=alive
        )
        counts = {name: len(steps_of(swarm[name])) for name in left}
        for name, count in counts.items():
            swarm.wait_for_steps(name, count + 20, alive=alive)
        after = swarm.account(left[0])
        assert after is not None
        tally = after.micro_batches
        assert tally.leased == tally.done + tally.lost + tally.open
        assert tally.done > before.micro_batches.done
        assert tally.lost <= 0.01 * tally.leased + 8, "but for what the killed driver had under way itself"
        assert swarm.stop(*left) == [143] * len(left)
        assert all("Traceback" not in node.output() for node in swarm.nodes.values())
