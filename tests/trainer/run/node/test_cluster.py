"""Ranks under torchrun, over gloo: DiLoCo and DDP, stopped, killed, and gone on with."""

from __future__ import annotations

import signal
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support.small_store import text_store
from tests.support.trainer_command import ROOT, WAIT_S, TrainerCommand, differences
from trainer.checkpoint.node import checkpoint_path, kept_paths, wallet_id

TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "trainer")
RANKS = ("--engine", "torch", "--node-id", "pod", "--inner-steps", "5", "--set", "checkpoint.every_steps=2")
STRATEGIES = ["diloco", "ddp"]

pytestmark = pytest.mark.long


@pytest.fixture
def cluster(tmp_path: Path) -> TrainerCommand:
    return TrainerCommand(text_store(), tmp_path, starter=TORCHRUN)


def saved(cluster: TrainerCommand) -> list[dict[str, Any]]:
    return [cluster.saved("pod", f"rank-{rank}") for rank in (0, 1)]


def shared(contents: Mapping[str, Any], strategy: str) -> dict[str, Any]:
    """What must be the same at all ranks: under DDP at every step, under DiLoCo behind an outer step."""
    if strategy == "ddp":
        return {"layers": contents["layers"], "optimizer": contents["optimizer"]}
    (fragment,) = contents["diloco"]["fragments"]
    vectors = {name: fragment[name] for name in ("anchor", "momentum", "reference")}
    return vectors | {"round_index": contents["diloco"]["round_index"]}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("strategy", [*STRATEGIES, "sparseloco"])
def test_ranks_are_identical_and_go_on_as_if_undisturbed(cluster: TrainerCommand, strategy: str) -> None:
    options = (*RANKS, "--strategy", strategy)
    done = cluster(*options, "--max-steps", "10")
    first, second = saved(cluster)
    assert not differences(shared(first, strategy), shared(second, strategy))
    assert not differences(first["layers"], second["layers"])
    assert first["loader"]["stream"] != second["loader"]["stream"]
    assert done.stderr.count("outer step 2: 2 members, 100 % complete") == (strategy != "ddp")

    cluster(*options, "--max-steps", "17")
    whole = replace(cluster, folder=cluster.folder / "whole")
    whole(*options, "--max-steps", "17")
    for one, other in zip(saved(cluster), saved(whole), strict=True):
        assert not differences(one, other)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_job_that_is_told_to_stop_saves_and_goes_on(cluster: TrainerCommand, strategy: str) -> None:
    options = (*RANKS, "--strategy", strategy, "--max-steps", "2000")
    with cluster.running(*options) as job:
        job.wait_for("step", 7)
        job.process.send_signal(signal.SIGTERM)  # Which torchrun hands on.
        job.process.wait(WAIT_S)
    errors = "".join(job.errors)
    assert f'File "{ROOT}' not in errors  # It tells of its end with a traceback of its own.
    reached = [contents["training_rounds"] for contents in saved(cluster)]
    # A rank that waited in a round for one that had left saves nothing: its last checkpoint may be older.
    assert max(reached) >= 7 and (min(reached) >= 7 or "the other ranks stopped first" in errors), errors
    if strategy == "ddp":
        assert reached[0] == reached[1]
    more = str(max(reached) + 6)
    cluster(*RANKS, "--strategy", strategy, "--max-steps", more)
    first, second = saved(cluster)
    assert first["training_rounds"] == second["training_rounds"] == int(more)
    assert not differences(shared(first, strategy), shared(second, strategy))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_ranks_that_were_killed_at_different_places_meet_again(cluster: TrainerCommand, strategy: str) -> None:
    """As after a kill between the saves of two ranks: the newest checkpoint of one is gone."""
    options = (*RANKS, "--strategy", strategy)
    cluster(*options, "--max-steps", "10")
    newest = checkpoint_path(cluster.checkpoints, wallet_id("", "pod"), "rank-1")
    newest.unlink()
    latest = kept_paths(newest)[0]
    assert "000010" in latest.name
    latest.unlink()
    done = cluster(*options, "--max-steps", "16")
    assert "another rank had not come as far" in done.stderr
    first, second = saved(cluster)
    assert first["training_rounds"] == second["training_rounds"] == 16
    assert not differences(shared(first, strategy), shared(second, strategy))
    for path in cluster.checkpoints.glob("*rank-1*.pt"):
        path.unlink()
    assert "found some ranks without" in cluster.failing(*options, "--max-steps", "18").stderr


def test_a_rank_that_dies_ends_the_job_and_costs_no_more_than_the_last_steps(cluster: TrainerCommand) -> None:
    with cluster.running(*RANKS, "--strategy", "ddp") as job:
        job.wait_for("step", 5)
        ranks = [child for child in psutil.Process(job.process.pid).children() if "trainer" in child.cmdline()]
        ranks[1].kill()
        job.process.wait(WAIT_S)
    assert job.process.returncode != 0
    cluster(*RANKS, "--strategy", "ddp", "--max-steps", "12")
    first, second = saved(cluster)
    assert not differences(shared(first, "ddp"), shared(second, "ddp"))
