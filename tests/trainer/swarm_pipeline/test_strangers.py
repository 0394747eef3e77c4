"""Workers and drivers of another run file are turned away with what differs, and the swarm does not notice."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.pipeline_account import check_account
from tests.support.pipeline_swarm import PipelineSwarm
from tests.support.token_store import TokenStore

pytestmark = [pytest.mark.long, pytest.mark.timeout(300)]

CHANGES = {
    "seed": ("seed=12", "seed 11"),
    "length": ("inner.seq_len=64", "inner.seq_len 32"),
    "codec": ("swarm.activation_codec=fp16", "swarm.activation_codec fp32"),
    "preset": ("model.preset=15m", "dim 128"),
}
"""What they change, and the resident's value, of which they are told."""


def test_who_has_another_run_file_is_told_what_differs(tmp_path: Path) -> None:
    with PipelineSwarm(tmp_path / "swarm", TokenStore.of(tmp_path / "store", 3).folder) as swarm:
        residents = [swarm.begin_driver("driver-1"), *swarm.begin_workers("head", "body-1")]
        strangers = swarm.begin_workers("tail", suffix="-first", options=["--set", "seed=12"])  # Its stage is empty.
        assert strangers[0].exit_code() == 1
        residents += swarm.begin_workers("tail")
        swarm.wait_for_steps("driver-1", 2, alive=residents)
        for stage, name in (("head", "length"), ("body-1", "codec"), ("tail", "preset")):
            strangers += swarm.begin_workers(stage, suffix=f"-{name}", options=["--set", CHANGES[name][0]])
        assert [stranger.exit_code() for stranger in strangers] == [1] * 4
        for name in ("seed", "codec"):
            strangers.append(swarm.begin_driver(f"driver-{name}", "--set", CHANGES[name][0]))
        for stranger in strangers:
            assert stranger.exit_code() == 1, stranger.tail()
            name = stranger.name.rpartition("-")[2]
            last = stranger.output().splitlines()[-1]
            assert last.startswith("trainer: "), last
            assert CHANGES["seed" if name == "first" else name][1] in last
        seen = swarm.account()
        assert seen is not None
        swarm.wait(
            lambda: swarm.account().micro_batches.done > seen.micro_batches.done,
            "the driver to go on",
            alive=residents,
        )
        assert swarm.stop(*(node.name for node in residents)) == [143] * 4
        for stranger in strangers:
            assert not stranger.events("step")
        account, _ = check_account(swarm)
    assert not account.micro_batches.lost
