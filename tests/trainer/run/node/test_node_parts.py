"""What a node does once and not twice: reading a folder, gathering a checkpoint; and what its ranks wait for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from trainer.checkpoint.node import Checkpointer, wallet_id
from trainer.collective import CollectiveConfig
from trainer.inner import Batch, InnerConfig
from trainer.model import Transformer, preset
from trainer.outer.engine.collective import LocalCollective
from trainer.run.config import RunConfig
from trainer.run.node.cluster import Ranks
from trainer.run.node.node_ranks import longest_silence_s
from trainer.run.node.replica import Replica
from trainer.run.node.resolving import wanted_parallel
from trainer.run.node.stopping import StopRequest
from trainer.run.node.training import FIRST_STATE_S, Node


class Busy(Checkpointer):
    """A checkpointer whose disk is slow."""

    @property
    def busy(self) -> bool:
        return True


def test_a_save_that_would_be_left_out_gathers_nothing(tmp_path: Path) -> None:
    """Contents of several ranks are the whole state, taken to the host of rank 0."""
    told: list[str] = []

    def contents(loader: Mapping[str, Any], loss: float) -> Any:
        raise AssertionError("gathered")

    observer = SimpleNamespace(checkpoint=lambda outcome, **_: told.append(outcome))
    parts: dict[str, Any] = dict.fromkeys(("batches", "store", "network", "display", "evaluator"))
    parts["watch"] = SimpleNamespace(
        observer=observer,
        spend=lambda *_: None,
        tracker=SimpleNamespace(state_dict=lambda: {}),
        work=SimpleNamespace(withdrew=lambda *_: None),
    )
    parts["dataset"] = SimpleNamespace(state_dict=lambda: {})
    replica = SimpleNamespace(inner=SimpleNamespace(step_index=5), gradients=None, contents=contents)
    with Busy(tmp_path, wallet_id("", "a")) as checkpointer:
        node = Node(
            config=RunConfig(node_id="a"),
            ranks=Ranks(),
            replica=cast(Any, replica),
            checkpointer=checkpointer,
            stop=StopRequest(),
            **parts,
        )
        node.save()
        assert (told, checkpointer.skipped) == (["skipped"], 1)


def test_ranks_wait_for_rank_0_as_long_as_it_may_wait_for_the_first_state() -> None:
    config = RunConfig(node_id="a", collective=CollectiveConfig(round_timeout_s=1800.0))
    assert longest_silence_s(config) > FIRST_STATE_S + 5 * 1800.0


@pytest.mark.slow
def test_another_vocabulary_does_not_bring_the_first_weights_again() -> None:
    calls: list[int] = []

    def first(model: Transformer) -> None:
        calls.append(model.config.vocab_size)

    def made(rows: int) -> Replica:
        batches: Iterator[Batch] = iter(())
        config = RunConfig(node_id="a", inner=InnerConfig(micro_batch_size=1, seq_len=8))
        return Replica(
            config,
            preset("tiny", rows),
            LocalCollective(),
            torch.device("cpu"),
            batches,
            rows,
            lambda _: None,
            set_first_weights=first,
        )

    small, large = made(1024), made(2048)
    assert calls == [1024, 2048] and large.diloco is not None
    small.adopt(large.diloco.shared_state())
    assert small.vocab_rows == 2048
    assert calls == [1024, 2048]


@pytest.mark.parametrize(
    ("parallel", "optimizer", "expected"),
    [("auto", "muon", "ddp"), ("auto", "adamw", "auto"), ("fsdp", "muon", "fsdp"), ("hsdp", "adamw", "hsdp")],
)
def test_muon_which_needs_whole_matrices_has_them_unless_shards_were_asked_for(
    parallel: Any, optimizer: Any, expected: str
) -> None:
    config = RunConfig(node_id="a", parallel=parallel, inner=InnerConfig(optimizer=optimizer))
    assert wanted_parallel(config) == expected
