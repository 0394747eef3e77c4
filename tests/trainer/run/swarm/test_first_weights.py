"""Workers that begin a run with a model begin with the same one, or say that they do not."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from manifests import FIRST_MERGE_ID, VocabularyFile
from tests.support.pipeline_swarm import STAGES, PipelineSwarm
from tests.support.text_store import text_store
from trainer.checkpoint.stages import StageCheckpoints, StageState, fingerprint
from trainer.errors import CheckpointError, IncompatiblePeerError
from trainer.model import build_model, export_hf
from trainer.network.discovery.stage_report import StageReport, StageUid
from trainer.run.config import RunConfig, from_mapping
from trainer.run.swarm.building import build_stage_site
from trainer.run.swarm.compatibility import check_first_weights
from trainer.run.swarm.shape import shape_of

MINE, OTHER = "1" * 16, "2" * 16


def _reports(*began_from: str, joining: int = 0) -> Sequence[StageReport]:
    """Of workers, the first of which are joining still."""
    return [
        StageReport(
            uid=str(StageUid("tail", 40 + number)),
            incarnation="0" * 16,
            status="joining" if number < joining else "serving",
            began_from=each,
        )
        for number, each in enumerate(began_from)
    ]


@pytest.mark.parametrize(
    ("mine", "others"),
    [
        (MINE, ()),
        (MINE, ("", "")),
        (MINE, (MINE, "")),
        (MINE, (OTHER, MINE)),  # The other one is told.
        ("", (OTHER, OTHER)),
    ],
)
def test_who_began_as_most_did_or_with_nothing_goes_on(mine: str, others: tuple[str, ...]) -> None:
    check_first_weights(mine, "/models/a", _reports(*others))


@pytest.mark.parametrize("others", [(OTHER,), (OTHER, ""), (OTHER, MINE, OTHER), (OTHER, "3" * 16, MINE)])
def test_who_began_with_another_model_than_most_is_told_which_and_where(others: tuple[str, ...]) -> None:
    with pytest.raises(
        IncompatiblePeerError, match=rf"expected .* tail\.0\.40 .* {OTHER}, found /models/a with {MINE}; give all"
    ):
        check_first_weights(MINE, "/models/a", _reports(*others))


def test_those_that_serve_already_decide_and_before_any_does_whoever_begins() -> None:
    check_first_weights(MINE, "/models/a", _reports(OTHER, OTHER, MINE, joining=2))
    with pytest.raises(IncompatiblePeerError):
        check_first_weights(MINE, "/models/a", _reports(MINE, MINE, OTHER, joining=2))
    with pytest.raises(IncompatiblePeerError):
        check_first_weights(MINE, "/models/a", _reports(OTHER, joining=1))


def _model(folder: Path, seed: int) -> Path:
    """A model of the runs below."""
    tokenizer = folder.parent / "tokenizer.json"
    tokenizer.write_bytes(VocabularyFile.from_pairs([(114 + 10, 111)], {"tiny": 1}).to_json())
    config = shape_of(_config(folder)).model
    export_hf(build_model(config, seed).state_dict(), config, tokenizer, folder)
    return folder


def _config(start_from: Path, checkpoints: Path | None = None) -> RunConfig:
    return from_mapping(
        RunConfig,
        {
            "data": {"store": str(text_store())},
            "device": "cpu",
            "model": {"preset": "tiny"},
            "swarm": {
                "num_stages": 3,
                "start_from": str(start_from),
                "checkpoint": {"directory": str(checkpoints or start_from.parent / "none")},
            },
        },
    )


@pytest.mark.slow
def test_a_worker_that_has_checkpoints_does_not_read_the_model_to_begin_with(tmp_path: Path) -> None:
    model, folder = _model(tmp_path / "model", 5), tmp_path / "checkpoints"
    config = _config(model, folder)
    shape = shape_of(config)
    built = build_stage_site(config, shape, "body-1")
    assert built.began_from == fingerprint(model)
    with StageCheckpoints(config.swarm.checkpoint, config.run_id, shape.plan, "body-1", "a" * 16) as checkpoints:
        checkpoints.open(0.0)
        checkpoints.save(1.0, StageState.of_replica(shape.model, built.replica.state_dict()))
    shutil.rmtree(model)
    assert build_stage_site(config, shape, "body-1").began_from == ""
    with pytest.raises(CheckpointError):
        build_stage_site(config, shape, "tail")


def test_stages_of_one_folder_say_the_same(tmp_path: Path) -> None:
    model = _model(tmp_path / "model", 5)
    config = _config(model)
    built = [build_stage_site(config, shape_of(config), stage) for stage in STAGES]
    assert {each.began_from for each in built} == {fingerprint(model)}
    expected = build_model(shape_of(config).model, 5).state_dict()["embedding.weight"][: FIRST_MERGE_ID + 1]
    assert torch.equal(built[0].module.state_dict()["embedding.weight"][: FIRST_MERGE_ID + 1], expected)


@pytest.mark.long
@pytest.mark.timeout(120)
def test_a_worker_with_another_model_ends_and_says_so_and_the_first_stays(tmp_path: Path) -> None:
    one, another = _model(tmp_path / "one", 5), _model(tmp_path / "another", 6)
    with PipelineSwarm(tmp_path / "swarm") as swarm:
        resident = swarm.begin_worker("tail", "tail", ["--set", f"swarm.start_from={one}"])
        swarm.wait(lambda: "serves version 0" in resident.output(), "the tail to serve")
        stranger = swarm.begin_worker("head", "head", ["--set", f"swarm.start_from={another}"])
        assert stranger.exit_code() == 1
        last = stranger.output().splitlines()[-1]
        assert last.startswith("trainer: swarm.start_from: expected the model that "), last
        assert f"found {another} with {fingerprint(another)}" in last
        assert not resident.has_ended()
