"""Rolling stages back to an earlier moment, while no worker of this machine writes their checkpoints."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.model_configs import random_model, small_config
from tests.support.stage_files import write_model
from trainer.checkpoint.stages import StageCheckpoints, StagewiseConfig, newest_set, roll_back, time_us
from trainer.errors import CheckpointError
from trainer.model.plan import StagePlan

_CONFIG = small_config()
_PLAN = StagePlan.of(_CONFIG, 2)
_LATER = time_us(1e9)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    model = random_model(_CONFIG)
    for number in (1, 2, 3):
        times = {"head": number * 600.0, "tail": number * 600.0 + 50}
        write_model(tmp_path, model, _PLAN, times, version=number, who=f"w{number}")
    return tmp_path


def _all(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.rglob("*.pt")}


def _versions(folder: Path, **options: tuple[str, ...]) -> list[int]:
    return [file.header.version for file in newest_set(folder, "run", _LATER, **options).files.values()]


def test_what_is_newer_is_set_aside_and_nothing_is_lost(folder: Path) -> None:
    before = _all(folder)
    done = roll_back(folder, "run", time_us(1210), time_us(5000))
    assert [file.header.version for file in done.found.files.values()] == [2, 1]
    assert sorted(path.parent.name + path.name[9:13] for path in done.moved) == ["head0030", "tail0020", "tail0030"]
    assert _versions(folder) == [2, 1]
    assert _all(folder) == before
    assert done.folder == folder / "run" / "set-aside" / "19700101T012320.000000Z"
    assert sorted(path.name for path in done.folder.iterdir()) == ["head", "tail"]
    for path in done.moved:  # They can be moved back.
        (done.folder / path.parent.name / path.name).rename(path)
    assert _versions(folder) == [3, 3]


def test_a_rehearsal_moves_nothing_and_the_moment_itself_stays(folder: Path) -> None:
    done = roll_back(folder, "run", time_us(1210), time_us(5000), dry_run=True)
    assert len(done.moved) == 3
    assert _versions(folder) == [3, 3]
    assert not done.folder.exists()
    assert roll_back(folder, "run", time_us(1850), time_us(5000)).moved == ()
    assert len(roll_back(folder, "run", time_us(1850) - 1, time_us(6000)).moved) == 1


def test_what_another_has_moved_meanwhile_does_not_matter(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rename, rivals = Path.rename, []

    def rename_too_late(path: Path, target: Path) -> Path:
        if not rivals:
            rivals.append(rename(path, folder / "rival.pt"))
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", rename_too_late)
    done = roll_back(folder, "run", time_us(1210), time_us(5000))
    assert len(done.moved) == 2
    assert _versions(folder) == [2, 1]
    assert roll_back(folder, "run", time_us(1210), time_us(6000)).moved == (), "done again it has nothing to do"


def test_a_file_in_the_way_is_not_replaced(folder: Path) -> None:
    aside = roll_back(folder, "run", time_us(1210), time_us(5000), dry_run=True)
    blocked = aside.folder / "tail" / aside.moved[0].name
    blocked.parent.mkdir(parents=True)
    blocked.write_text("mine")
    with pytest.raises(CheckpointError, match="found none of tail"):
        roll_back(folder, "run", time_us(610), time_us(5000))
    assert _versions(folder) == [3, 3], "without a set nothing is moved"
    with pytest.raises(CheckpointError, match="mend that and do it again"):
        roll_back(folder, "run", time_us(1210), time_us(5000))
    assert blocked.read_text() == "mine"


def _writer(folder: Path, stage: str) -> StageCheckpoints:
    checkpoints = StageCheckpoints(StagewiseConfig(directory=str(folder)), "run", _PLAN, stage, "w")
    checkpoints.open(0.0)
    return checkpoints


def test_while_one_writes_it_is_refused_and_moves_nothing_and_rehearsed_all_the_same(folder: Path) -> None:
    with _writer(folder, "head"), _writer(folder, "head"):
        with pytest.raises(CheckpointError, match=r"found one or more of head running.*stop the run's workers"):
            roll_back(folder, "run", time_us(700), time_us(5000))
        assert _versions(folder) == [3, 3]
        assert len(roll_back(folder, "run", time_us(700), time_us(5000), dry_run=True).moved) == 4
    assert len(roll_back(folder, "run", time_us(700), time_us(5000)).moved) == 4


@pytest.mark.parametrize(("other", "in_use"), [("head", False), ("tail", True)])
def test_a_stage_is_rolled_back_beside_workers_of_others_and_by_its_own_if_told(
    folder: Path, other: str, in_use: bool
) -> None:
    with _writer(folder, other):
        roll_back(folder, "run", time_us(700), time_us(5000), stages=("tail",), in_use=in_use)
        assert _versions(folder) == [3, 1]
