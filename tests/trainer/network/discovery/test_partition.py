"""Stages are dealt over keys evenly, neighbours together, each key named by its first stage."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.errors import DiscoveryError, TrainerUsageError
from trainer.model.config import stage_names
from trainer.network.discovery import DiscoveryConfig
from trainer.network.discovery.partition import StagePartitions, dht_key, partition_of


@given(num_stages=st.integers(2, 200), data=st.data())
def test_every_partition_has_neighbours_and_as_many_as_any_other_or_one_less(
    num_stages: int, data: st.DataObject
) -> None:
    num_partitions = data.draw(st.integers(1, num_stages))
    dealt = [partition_of(stage, num_stages, num_partitions) for stage in range(num_stages)]
    sizes = Counter(dealt)
    assert dealt == sorted(dealt)
    assert set(sizes) == set(range(num_partitions))
    assert max(sizes.values()) - min(sizes.values()) <= 1
    partitions = StagePartitions(stage_names(num_stages), num_partitions)
    assert len(partitions.labels()) == 1 + num_partitions


def test_the_example_of_002() -> None:
    """32 stages over 4: stages 0 to 7 in the first, 8 to 15 in the second."""
    assert [partition_of(stage, 32, 4) for stage in (0, 7, 8, 15, 16, 31)] == [0, 0, 1, 1, 2, 3]
    partitions = StagePartitions(stage_names(32), 4)
    assert partitions.labels() == ("", "head.0", "body8.0", "body16.0", "body24.0")
    assert partitions.label("tail") == "body24.0"
    assert partitions.labels(["body-9", "body-8"]) == ("", "body8.0")


def test_each_stage_has_its_own_if_nothing_else_is_said() -> None:
    partitions = StagePartitions(stage_names(4))
    assert [partitions.label(stage) for stage in stage_names(4)] == ["head.0", "body1.0", "body2.0", "tail.0"]
    assert partitions.labels(["body-2"]) == ("", "body2.0")


def test_without_stages_there_is_one_key() -> None:
    assert StagePartitions().labels() == ("",)
    assert StagePartitions().label("body-1") == ""
    assert StagePartitions().labels(["body-1"]) == ("",)
    assert dht_key("run") == "run.peers"
    assert dht_key("run", "body8.0") == "run.body8.0"


def test_mistakes_are_told() -> None:
    with pytest.raises(TrainerUsageError, match=r"num_partitions: expected at most the number of stages, 3, found 4"):
        StagePartitions(stage_names(3), 4)
    with pytest.raises(DiscoveryError, match=r"expected one of the run's stages head, body-1, tail, found 'body-2'"):
        StagePartitions(stage_names(3)).label("body-2")
    with pytest.raises(TrainerUsageError, match="num_partitions: expected 0 without partition_by_stage"):
        DiscoveryConfig(num_partitions=2)
