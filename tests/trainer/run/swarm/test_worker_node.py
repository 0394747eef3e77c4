"""A worker process made in the test's own: what it believes of what others announce, before it starts to serve."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.pipeline_swarm import PipelineSwarm
from trainer.network.discovery import Announcement
from trainer.network.discovery.stage_report import StageReport, StageUid
from trainer.run.node.network import Network
from trainer.run.node.stopping import StopRequest
from trainer.run.swarm.building import build_stage_site
from trainer.run.swarm.shape import shape_of
from trainer.run.swarm.worker_node import WorkerNode

STAGE = "head"


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[WorkerNode]:
    with PipelineSwarm(tmp_path, strategy="diloco") as swarm:
        config = replace(swarm.config, node_id=STAGE)
        shape = shape_of(config)
        yield WorkerNode(config, shape, build_stage_site(config, shape, STAGE), StopRequest())


def report(version: int = 0, round_index: int = 0) -> StageReport:
    return StageReport(
        uid=str(StageUid(STAGE, 40)), incarnation="0" * 16, status="serving", version=version, round_index=round_index
    )


def tell(monkeypatch: pytest.MonkeyPatch, name: str, value: Any) -> None:
    """What the network of any node says from now on."""
    monkeypatch.setattr(Network, name, property(lambda _: value))


def announced(stage: StageReport, number: int) -> Announcement:
    return Announcement(peer_id=f"{number:064x}", node_id=f"n{number}", run_id="pipeline", address="h:1", stage=stage)


@pytest.mark.parametrize("versions", [[40], [0, 0, 0, 40], [40, 10**9, 10**9]])
def test_a_state_has_the_version_of_the_holder_nearest_to_its_steps(
    worker: WorkerNode, monkeypatch: pytest.MonkeyPatch, versions: list[int]
) -> None:
    donors = tuple(announced(report(version), number) for number, version in enumerate(versions))
    tell(monkeypatch, "donors", donors)
    monkeypatch.setattr(Network, "publish", lambda *_: None)
    worker._adopt(replace(worker._synchroniser.trainer.shared_state(), outer_step=2, num_inner_steps=38))
    assert worker.progress().inner_step == 40


@pytest.mark.parametrize(("rounds", "is_current"), [([0], True), ([0, 0, 5], True), ([0, 5, 5], False), ([5], False)])
def test_a_resumed_worker_is_current_only_in_the_round_most_others_are_in(
    worker: WorkerNode, monkeypatch: pytest.MonkeyPatch, rounds: list[int], is_current: bool
) -> None:
    said = tuple(announced(report(round_index=index), number) for number, index in enumerate(rounds))
    monkeypatch.setattr(Network, "alike", lambda _: said)
    tell(monkeypatch, "shares_common_state", True)
    assert not worker._is_still_current(), "without a checkpoint of its own"
    worker._is_resumed = True
    assert worker._is_still_current() == is_current
