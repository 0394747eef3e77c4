"""Nodes of whole models with `strategy: grad`: they step together, a third joins, and one restarts."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.small_store import text_store
from tests.support.trainer_command import TrainerCommand, differences, trainer_here
from tests.support.training_swarm import TERMINATED, WAIT_S, TrainingNode, TrainingSwarm, merged

OPTIONS: dict[str, Any] = {
    "strategy": "grad",
    "grad": {"target_tokens": 512, "ahead_s": 0.5, "average_state_every": 3, "num_slices": 4},
    "rule": {"rule": "mean", "validation": "off"},
    "checkpoint": {"every_steps": 5},
}


def rounds_with(node: TrainingNode, num_members: int) -> dict[int, str]:
    """State after each round of so many members."""
    return {
        int(event.number("round_index")): str(event.fields["state_digest"])
        for event in node.events("round")
        if len(event.fields["members"]) == num_members
    }


@pytest.mark.long
@pytest.mark.timeout(900)
def test_two_step_together_and_a_third_takes_up_their_state_and_counts(tmp_path: Path) -> None:
    with TrainingSwarm(tmp_path, **OPTIONS) as swarm:
        swarm.begin("north", "east")
        old = [swarm["north"], swarm["east"]]
        swarm.wait(lambda: all(len(rounds_with(node, 2)) >= 8 for node in old), "rounds of two")
        swarm.begin("south")
        joiner = swarm["south"]
        nodes = [*old, joiner]
        swarm.wait(lambda: all(len(rounds_with(node, 3)) >= 8 for node in nodes), "rounds of three")
        assert "took up the others' state" in joiner.output()
        assert sum(event.number("num_tokens") > 0 for event in joiner.events("step")) >= 2
        assert swarm.stop() == [TERMINATED] * 3
        for node in nodes:
            assert "Traceback" not in node.output()
        for num_members, among in ((2, old), (3, nodes)):
            found = [rounds_with(node, num_members) for node in among]
            common = set.intersection(*(set(each) for each in found))
            assert len(common) >= 5
            assert all(len({each[index] for each in found}) == 1 for index in common)
        saved = {node.name: node.checkpoint() for node in nodes}
        by_lineage: dict[str, dict[str, Any]] = {}
        for each in saved.values():
            other = by_lineage.setdefault(each["diloco"]["lineage"], each)
            assert torch.equal(other["diloco"]["exp_avg"], each["diloco"]["exp_avg"])
            for layer, values in each["layers"].items():
                assert all(torch.equal(value, other["layers"][layer][name]) for name, value in values.items())


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("powersgd_rank", [0, 4])
def test_two_join_one_that_has_trained_and_one_of_them_is_killed_and_comes_back(
    powersgd_rank: int, tmp_path: Path
) -> None:
    options = merged(OPTIONS, {"collective": {"powersgd_rank": powersgd_rank, "stall_timeout_s": 8.0}})
    with TrainingSwarm(tmp_path, **options) as swarm:
        swarm.begin("north")
        swarm.wait(lambda: len(rounds_with(swarm["north"], 1)) >= 6, "rounds of one")
        swarm.begin("east", "south")
        nodes = [swarm[name] for name in ("north", "east", "south")]
        swarm.wait(lambda: all(len(rounds_with(node, 3)) >= 6 for node in nodes), "rounds of three", 2 * WAIT_S)
        swarm["south"].kill()
        before = max(rounds_with(swarm["north"], 3))
        swarm["south"].start()
        swarm.wait(
            lambda: all(max(rounds_with(node, 3)) >= before + 6 for node in nodes), "rounds of three again", 2 * WAIT_S
        )
        assert swarm.stop() == [TERMINATED] * 3
        found = [rounds_with(node, 3) for node in nodes]
        for index in set.union(*(set(each) for each in found)):
            assert len({each[index] for each in found if index in each}) == 1, index
        assert all("Traceback" not in node.output() for node in nodes)


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_node_stops_within_a_step_and_keeps_what_it_has_added_up(tmp_path: Path) -> None:
    options = merged(OPTIONS, {"grad": {"target_tokens": 1 << 40}})
    kept = []
    with TrainingSwarm(tmp_path, **options) as swarm:
        swarm.begin("north")
        for life in range(2):
            if life:
                swarm["north"].start()
            swarm.wait(lambda life=life: swarm["north"].output().count("answers at") > life, "the node")
            time.sleep(5.0)
            assert swarm.stop() == [TERMINATED]
            kept.append(swarm["north"].checkpoint()["diloco"]["flight"])
    assert 0 < kept[0]["num_tokens"] < kept[1]["num_tokens"]
    assert kept[1]["vector"].any()


@pytest.mark.slow
def test_a_node_alone_stops_and_goes_on_to_the_same_bits(
    tmp_path: Path, capsys: Any, caplog: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = [
        "--node-id",
        "node",
        "--strategy",
        "grad",
        "--set",
        "grad.target_tokens=256",
        "--set",
        "data.plateau=off",
    ]
    store, saved = text_store(), {}
    for name, stops in (("whole", [6]), ("parts", [3, 6])):
        command = TrainerCommand(store, tmp_path / name)
        with trainer_here(command, capsys, caplog, monkeypatch) as trainer:
            for steps in stops:
                trainer(*options, "--max-steps", str(steps))
        saved[name] = command.saved("node")
        assert saved[name]["training_rounds"] == 6
        assert saved[name]["diloco"]["num_tokens"] == 6 * 256
    assert not differences(saved["whole"]["layers"], saved["parts"]["layers"])
    assert not differences(saved["whole"]["diloco"], saved["parts"]["diloco"])


def test_what_does_not_go_together_is_refused(
    tmp_path: Path, capsys: Any, caplog: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with trainer_here(TrainerCommand(tmp_path, tmp_path), capsys, caplog, monkeypatch) as trainer:
        for wrong, said in (
            (["--engine", "torch"], "strategy ddp is its like"),
            (["--set", "inner.optimizer=muon"], "expected inner.optimizer adamw"),
            (["--set", "grad.ahead_s=9"], "a quarter of collective.stall_timeout_s"),
        ):
            assert said in trainer("--node-id", "node", "--strategy", "grad", *wrong, expect=2)
