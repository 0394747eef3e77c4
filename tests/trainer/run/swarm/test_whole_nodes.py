"""Nodes of whole models among a swarm of stages: rounds stage by stage, one state of each part, deaths, late joining."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.pipeline_swarm import PipelineSwarm
from tests.support.training_swarm import TERMINATED, WAIT_S, TrainingNode

STAGES = ("head", "tail")
OPTIONS: dict[str, Any] = {
    "strategy": "diloco",
    "diloco": {"inner_steps": 8},
    "inner": {"accumulation_steps": 4},
    "rule": {"rule": "mean", "validation": "off"},
    "swarm": {
        "num_stages": 2,
        "whole_nodes": True,
        "activation_codec": "subspace",
        "subspace": {"rank": 16},
        "stage": {"target_tokens": 256},
    },
}
"""Steps of four micro-batches in the pipeline and at whole nodes; links that carry 16 of 128 values."""


def part_states(node: TrainingNode, stage: str) -> dict[int, str]:
    """Digest of a stage's part by outer step, as the node hands it out."""
    return {
        int(event.number("outer_step")): str(event.fields["digest"])
        for event in node.events("part_state")
        if event.fields["stage"] == stage
    }


def check_one_state(nodes: Iterable[TrainingNode], stage: str, at_least: int) -> None:
    """All that hold a state of a stage after an outer step hold the same; after so many steps, two do at least."""
    held: dict[int, set[str]] = {}
    holders: dict[int, int] = {}
    for node in nodes:
        for step, digest in part_states(node, stage).items():
            held.setdefault(step, set()).add(digest)
            holders[step] = holders.get(step, 0) + 1
    assert all(len(digests) == 1 for digests in held.values()), (stage, held)
    assert sum(count >= 2 for count in holders.values()) >= at_least, (stage, holders)


def newest(nodes: Iterable[TrainingNode], stage: str) -> int:
    return max((step for node in nodes for step in part_states(node, stage)), default=0)


@pytest.mark.long
@pytest.mark.timeout(1500)
def test_a_swarm_and_whole_nodes_train_one_model(tmp_path: Path) -> None:
    with PipelineSwarm(tmp_path, **OPTIONS) as swarm:
        swarm.begin_driver()
        swarm.begin_workers(*STAGES, suffix=".1")
        swarm.begin("whole-1")
        of_stage = {stage: [swarm[f"{stage}.1"], swarm["whole-1"]] for stage in STAGES}

        def all_have(step: int) -> bool:
            return all(max(part_states(node, stage), default=0) >= step for stage in STAGES for node in of_stage[stage])

        swarm.wait(lambda: all_have(3), "three outer steps of both stages at all", 4 * WAIT_S)
        for stage in STAGES:
            check_one_state(of_stage[stage], stage, 2)
