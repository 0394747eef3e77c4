"""Ranks that train one model: what each holds and sees, and what they decide together."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.model_configs import SMALL
from tests.support.rank_scenarios import run_ranks
from tests.support.sharing_ranks import (
    POISONED,
    decided_steps,
    one_rank,
    shards_between_passes,
    whole_norms,
)
from trainer.inner.parallel import replicate_model
from trainer.model import build_model

CPU = torch.device("cpu")


@pytest.fixture
def alone() -> Iterator[None]:
    with one_rank():
        yield


@pytest.mark.usefixtures("alone")
def test_gradients_are_cut_into_shards_at_each_pass() -> None:
    """Else each rank of FSDP would hold the gradient of the whole model in fp32 between two passes."""
    has_shard, norms = shards_between_passes()
    assert has_shard and all(has_shard)
    assert norms == pytest.approx(whole_norms(), rel=1e-4)


@pytest.mark.usefixtures("alone")
def test_tables_that_never_change_are_not_broadcast_at_each_step() -> None:
    wrapped = replicate_model(build_model(SMALL, 0), CPU, 8)
    assert list(wrapped.buffers()) and not wrapped.will_sync_module_buffers()


@pytest.fixture(scope="module")
def decided(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder: Path = tmp_path_factory.mktemp("decided")
    return run_ranks(decided_steps, 2, folder)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_ranks_decide_on_the_device_as_on_the_host_bit_for_bit(decided: list[dict[str, Any]], kind: str) -> None:
    for of_rank in decided:
        on_host, on_device = of_rank[kind]
        assert str(on_host["steps"]) == str(on_device["steps"])  # NaN is no NaN's equal.
        assert all(torch.equal(*pair) for pair in zip(on_host["weights"], on_device["weights"], strict=True))
    one, other = (of_rank[kind][1] for of_rank in decided)
    assert str(one["steps"]) == str(other["steps"])
    weights = one["weights"]
    skipped = [bool(step[3]) for step in one["steps"]]
    assert skipped == [index == POISONED for index in range(6)]
    assert torch.equal(weights[POISONED], weights[POISONED + 1]), "a dropped step changes nothing"
    assert not torch.equal(weights[POISONED + 1], weights[POISONED + 2])


@pytest.mark.slow
def test_shards_take_the_steps_of_replicas(decided: list[dict[str, Any]]) -> None:
    ddp, fsdp = (decided[0][kind][1]["steps"] for kind in ("ddp", "fsdp"))
    for step, other in zip(ddp, fsdp, strict=True):
        assert step[2:] == other[2:]
        if not step[3]:
            assert step[:2] == pytest.approx(other[:2], rel=1e-4)
