"""Nodes that do not fit a run are turned away with the reason, and the run does not notice."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.text_store import text_store
from tests.support.training_swarm import TrainingSwarm

pytestmark = [pytest.mark.long, pytest.mark.timeout(300)]

RESIDENTS = ("north", "south")

_NEXT_PROTOCOL = """
import sys
from trainer.network.rpc import envelope

envelope.PROTOCOL_VERSION += 1
envelope.HEARTBEAT = envelope._PREFIX.pack(envelope.MAGIC, envelope.PROTOCOL_VERSION, 0, 0)
from trainer.run.cli.app import run

sys.exit(run(sys.argv[1:]))
"""


def test_who_does_not_fit_is_told_why_and_harms_no_round(tmp_path: Path) -> None:
    with TrainingSwarm(tmp_path) as swarm:
        swarm.begin(*RESIDENTS)
        swarm.wait_for_step(1)
        swarm.begin("larger", options=["--preset", "15m"])
        swarm.begin("foreign", options=["--store", str(text_store("other"))])
        swarm.begin("slower", options=["--inner-steps", "30"])
        swarm.begin("careful", options=["--rule", "median"])
        swarm.begin("newer", program=["-c", _NEXT_PROTOCOL])
        told = {
            "larger": ("dim 128", "192"),
            "foreign": ("vocabulary",),
            "slower": ("diloco.inner_steps 20", "30"),
            "careful": ("rule.rule trimmed_mean", "median"),
            "newer": ("protocol version",),
        }
        for name, words in told.items():
            assert swarm[name].exit_code() == 1, swarm[name].tail()
            last = swarm[name].output().splitlines()[-1]
            assert last.startswith("trainer: ")
            assert all(word in last for word in words), last
        seen = max(swarm[name].outer_step for name in RESIDENTS)
        swarm.wait_for_step(seen + 2, *RESIDENTS)
        assert swarm.stop(*RESIDENTS) == [143, 143]

        states = [swarm[name].states() for name in RESIDENTS]
        common = states[0].keys() & states[1].keys()
        assert len(common) >= seen + 2
        assert all(states[0][step] == states[1][step] for step in common)
        for name in RESIDENTS:
            assert not swarm[name].events("round_failed")
            rounds = swarm[name].events("round")[:seen]
            assert all(event.fields["completeness"] == 1 and not event.fields["dropped"] for event in rounds)
            assert all(len(event.fields["members"]) == len(RESIDENTS) for event in rounds)
