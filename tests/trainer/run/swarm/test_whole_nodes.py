"""Nodes of whole models among a swarm of stages: rounds by stage, one state of each part, deaths, late joining."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support.announcements import announcement
from tests.support.mixed_run import STAGES, check_one_state, newest, part_states, rounds_of_all
from tests.support.pipeline_swarm import PipelineSwarm, steps_of
from tests.support.trainer_command import TrainerCommand, finished
from tests.support.training_swarm import TERMINATED, WAIT_S, TrainingSwarm, merged
from trainer.errors import TrainerUsageError
from trainer.network.rpc import Identity
from trainer.run.config import RunConfig, from_mapping
from trainer.run.node.peer_book import PeerBook
from trainer.run.node.replica import Replica
from trainer.run.swarm.peer_view import seen_as_part
from trainer.run.swarm.shape import WHOLE, shape_of
from trainer.run.swarm.whole_node import PartsReplica

IDENTITY = Identity.create()
SMALL: dict[str, Any] = {"model": {"preset": "tiny"}, "inner": {"micro_batch_size": 2}}
OPTIONS: dict[str, Any] = {
    "strategy": "diloco",
    "diloco": {"inner_steps": 8},
    "inner": {"accumulation_steps": 4},
    "rule": {"rule": "mean", "validation": "off"},
    "collective": {"min_members": 2},
    "swarm": {
        "num_stages": 2,
        "whole_nodes": True,
        "activation_codec": "subspace",
        "subspace": {"rank": 16},
        "stage": {"target_tokens": 256},
    },
}
"""Steps of four micro-batches in the pipeline and at whole nodes; links that carry 16 of 128 values."""


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"inner": {"micro_batch_size": 0}}, "inner.micro_batch_size, since contributions weigh by micro-batches"),
        ({"inner": {"document_mask": True}}, "found inner.document_mask"),
        ({"engine": "torch"}, "found engine torch"),
        ({"swarm": {"start_from": "/model"}}, "found swarm.start_from"),
        ({"bucket": {"url": "/rounds"}, "rule": {"validation": "log"}}, "rounds through a bucket"),
    ],
)
def test_what_does_not_go_with_whole_nodes_is_refused(options: dict[str, Any], said: str) -> None:
    right = {**OPTIONS, "inner": {"micro_batch_size": 2}}
    from_mapping(RunConfig, right)
    with pytest.raises(TrainerUsageError, match=said):
        from_mapping(RunConfig, merged(right, options))


def test_a_whole_node_takes_up_the_state_of_one_stage_as_any_node_is_told_to() -> None:
    config = from_mapping(RunConfig, merged({**OPTIONS, **SMALL}, {"swarm": {"vocab_rows": 1024}, "node_id": "w"}))
    replica = PartsReplica(config, shape_of(config), None, torch.device("cpu"), iter(()), lambda _loss: None)
    own: Replica = replica  # How `trainer.run.node.training.Node` sees it.
    other = replace(replica.parts.trainers["tail"].shared_state(), outer_step=3)
    own.adopt({"tail": other}, keep_work=False)  # type: ignore[arg-type]
    assert [own.outer_step_of(stage) for stage in STAGES] == [0, 3]


@given(stages=st.sets(st.sampled_from(STAGES)), is_alike=st.booleans(), step=st.integers(0, 99))
def test_members_of_a_stage_see_of_a_whole_node_the_stages_part(stages: set[str], is_alike: bool, step: int) -> None:
    shape = shape_of(from_mapping(RunConfig, merged({**OPTIONS, **SMALL}, {"swarm": {"vocab_rows": 1024}})))
    said = announcement(
        IDENTITY,
        terms_digest=shape.terms(WHOLE).digest() if is_alike else "0" * 64,
        state_digest="",
        parts=tuple(
            {"stage": stage, "status": "serving", "outer_step": step, "state_digest": digest, "round_index": step}
            for stage, digest in (("head", "a" * 64), ("tail", "b" * 64))
            if stage in stages
        ),
    )
    for stage, digest in (("head", "a" * 64), ("tail", "b" * 64)):
        seen = seen_as_part(stage, shape)(said)
        book = PeerBook(shape.terms(stage).digest(), seen_as=seen_as_part(stage, shape))
        book.update((said,))
        if stage not in stages or not is_alike:
            assert seen == said
            assert not book.alike()
            continue
        assert (seen.peer(), seen.state_digest, seen.outer_step) == (said.peer(), digest, step)
        assert seen.stage is not None and (seen.stage.round_index, seen.stage.status) == (step, "serving")
        assert book.state_to_adopt() == digest
        assert list(book.peers()) == [IDENTITY.peer_id]
        assert book.announcements == (said,)


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_a_swarm_and_whole_nodes_train_one_model(tmp_path: Path) -> None:
    with PipelineSwarm(tmp_path, **OPTIONS) as swarm:
        driver = swarm.begin_driver()
        swarm.begin_workers(*STAGES, suffix=".1")
        swarm.begin("whole-1", "whole-2")
        wholes = [swarm["whole-1"], swarm["whole-2"]]
        members = {stage: [swarm[f"{stage}.1"], *wholes] for stage in STAGES}

        def wait_for_rounds(count: int, what: str) -> None:
            """All members of both stages make so many rounds more together."""
            begun = {stage: newest(members[stage], stage) for stage in STAGES}

            def together(stage: str) -> int:
                return sum(step > begun[stage] for step in rounds_of_all(members[stage], stage))

            alive = [driver, *{node.name: node for nodes in members.values() for node in nodes}.values()]
            swarm.wait(lambda: all(together(stage) >= count for stage in STAGES), what, 4 * WAIT_S, alive)

        wait_for_rounds(3, "rounds of both stages with all")

        swarm["whole-2"].kill()
        swarm["whole-2"].start()
        wait_for_rounds(2, "rounds with the node that came back")
        assert swarm["whole-2"].events("adopted")

        # The only worker of the tail is gone with all that it had saved: another has the state from whole nodes.
        swarm["tail.1"].kill()
        before = newest(wholes, "tail")
        members["tail"][0] = swarm.begin_worker("tail.2", "tail", ["--set", f"swarm.checkpoint.directory={tmp_path}/n"])
        wait_for_rounds(2, "rounds with the new worker of the tail")
        assert "took up the others' state" in swarm["tail.2"].output()
        assert min(part_states(swarm["tail.2"], "tail")) >= before

        for names in (["driver-1"], ["head.1", "tail.2"], ["whole-1", "whole-2"]):
            assert swarm.stop(*names) == [TERMINATED] * len(names)
        nodes = swarm.nodes.values()
        assert all("Traceback" not in node.output() for node in nodes)
        for stage in STAGES:
            assert check_one_state(nodes, stage) >= 7
        for node in wholes:
            losses = [event.number("loss") for event in node.events("step")]
            assert fmean(losses[-8:]) < losses[0] - 1.0
        told = [step["loss"] for step in steps_of(driver) if step["loss"] is not None]
        assert fmean(told[-8:]) < told[0] - 1.0
        # Beside its own work, a whole node's contribution weighs by its micro-batches.
        rounds = [event for event in swarm["whole-1"].events("round") if len(event.fields["members"]) == 3]
        assert all(weight == int(weight) for event in rounds for weight in event.fields["weights"])


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_a_signed_mixed_run_of_sparse_contributions_changes_for_all_alike(
    tmp_path: Path, trainer: TrainerCommand
) -> None:
    def command(*arguments: str) -> str:
        line = [sys.executable, "-m", "trainer", *arguments]
        return finished(line, trainer.environment(), 0, 120.0).stdout

    file, key = tmp_path / "run.yaml", tmp_path / "run.key"
    shared = (
        *("--stages", "2", "--whole-nodes", "--strategy", "sparseloco", "--inner-steps", "6", "--preset", "tiny"),
        *("--seq-len", "32", "--batch-size", "2", "--set", "inner.accumulation_steps=4", "--lr", "1e-3"),
        *("--set", "swarm.stage.target_tokens=256", "--set", "inner.warmup_steps=2", "--set", "data.plateau=off"),
        *("--set", "swarm.join.first_peers_s=1.5", "--set", "discovery.announce_interval_s=0.5"),
        *("--set", "discovery.poll_interval_s=0.2", "--set", "collective.invite_after_s=2"),
        *("--set", "collective.min_members=2", "--set", "rule.validation=log"),
    )
    own = {
        "state_dir": tmp_path / "home",
        "checkpoint.directory": tmp_path / "checkpoints",
        "swarm.checkpoint.directory": tmp_path / "stages",
        "log.directory": tmp_path / "log",
        "rpc.host": "127.0.0.1",
        "rpc.public_address": "127.0.0.1",
        "api.port": 0,
        "device": "cpu",
        "threads": 1,
    }
    options = [part for name, value in own.items() for part in ("--set", f"{name}={value}")]
    with TrainingSwarm(tmp_path, trainer.store) as swarm:
        # In the place of the swarm's own, which is not signed.
        file.write_text(command("run", "init", "corpus-3", *shared, "--key", str(key)), encoding="utf-8")
        command("run", "set", "inner.lr=1e-4", "--run", str(file), "--key", str(key), "--at-round", "2")
        options += ["--store", str(trainer.store)]
        swarm.begin("driver-1", options=["--pipeline", "swarm", "--json", *options])
        for stage in STAGES:
            swarm.begin(stage, options=options, program=("-m", "trainer", "worker", "--stage", stage))
        swarm.begin("whole-1", options=options)
        whole = swarm["whole-1"]
        nodes = {stage: [swarm[stage], whole] for stage in STAGES}
        swarm.wait(lambda: all(newest(nodes[stage], stage) >= 4 for stage in STAGES), "four rounds", 4 * WAIT_S)
        assert swarm.stop("driver-1") == [TERMINATED]
        assert swarm.stop(*STAGES, "whole-1") == [TERMINATED] * 3
        for stage in STAGES:
            assert check_one_state(nodes[stage], stage) >= 3
        for node in swarm.nodes.values():
            assert "Traceback" not in node.output()
        for node in (*(swarm[stage] for stage in STAGES), whole):
            [change] = node.events("run_change")
            assert (change.number("at_round"), change.number("round_index")) == (2, 2), node.name
        rates = [event.number("lr") for event in whole.events("step")]
        assert max(rates) == pytest.approx(1e-3)
        assert rates[-1] <= 1e-4
        # A fiftieth of fp32's 32 bits a parameter, and the messages of a small model's round.
        sizes = [event.number("sent_bytes") for event in whole.events("round") if len(event.fields["members"]) == 2]
        assert max(sizes) < 4 * 1_250_000 / 8
