from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.checkpoint_actor import INTERVAL_S, stage_parameters, write_stage
from tests.support.model_configs import small_config
from trainer.checkpoint.files import tree_digest
from trainer.checkpoint.stages import StageCheckpoints, StageState, StagewiseConfig, newest_set, time_us, writer
from trainer.checkpoint.stages.contents import StageCheckpoint, document_of
from trainer.checkpoint.stages.naming import format_time_us
from trainer.errors import CheckpointError, TrainerUsageError
from trainer.inner import InnerConfig, make_optimizer
from trainer.model import build_model, build_stage
from trainer.model.plan import StagePlan
from trainer.pipeline.stage import StageConfig, StageReplica

_PLAN = StagePlan.of(small_config(), 3)


def _checkpoints(folder: Path, keep: int = 3, who: str = "w", stage: str = "head") -> StageCheckpoints:
    config = StagewiseConfig(directory=str(folder), interval_s=INTERVAL_S, keep=keep)
    return StageCheckpoints(config, "run", _PLAN, stage, who)


def _state(version: int, stage: str = "head") -> StageState:
    parameters = stage_parameters(build_model(_PLAN.config, 1).state_dict(), _PLAN, stage)
    return StageState(config=_PLAN.config, version=version, parameters=parameters)


def _read(folder: Path, stage: str = "head") -> StageCheckpoint:
    return newest_set(folder, "run", time_us(1e9), plan=_PLAN, stages=(stage,)).files[stage].read()


def _names(folder: Path, stage: str = "head") -> list[str]:
    return sorted(path.name for path in (folder / "run" / stage).iterdir())


@pytest.mark.parametrize(
    ("opened", "steps", "saved"),
    [
        (599.0, [601.0, 900.0, 1199.9, 1200.0, 1201.0, 1799.0, 3700.5, 3701.0], [601.0, 1200.0, 3700.5]),
        (650.0, [1199.0, 1300.0], [1300.0]),
        (1e6, [601.0, 602.0, 1201.0], [601.0, 1201.0]),  # The clock is set back.
    ],
)
def test_it_saves_at_the_first_step_behind_each_multiple_of_the_interval(tmp_path, opened, steps, saved):
    with _checkpoints(tmp_path) as checkpoints:
        checkpoints.open(opened)
        found = []
        for now in steps:
            if checkpoints.maybe_save(now, lambda now=now: _state(int(now))):
                found.append(now)
            checkpoints.flush()
        assert (found, checkpoints.saved) == (saved, len(saved))
        assert (checkpoints.last_saved_us, checkpoints.last_version) == (time_us(saved[-1]), int(saved[-1]))
    assert _names(tmp_path) == [f"{format_time_us(time_us(now))}-w.pt" for now in saved]


def test_within_the_interval_of_its_first_step_or_without_one_it_never_saves(tmp_path: Path) -> None:
    for interval_s, steps in ((INTERVAL_S, (650.0, 1199.0)), (0, (0.0, 1e6, 2e6))):
        config = StagewiseConfig(directory=str(tmp_path / "never"), interval_s=interval_s)
        with StageCheckpoints(config, "run", _PLAN, "head", "w") as checkpoints:
            assert not any(checkpoints.maybe_save(now, lambda: _state(0)) for now in steps)
    assert not list(tmp_path.rglob("*.pt"))


def test_so_many_intervals_of_a_stage_are_kept_whoever_wrote_them(tmp_path: Path) -> None:
    for minute, who in ((10, "a"), (11, "b"), (20, "a"), (40, "b"), (41, "a")):
        write_stage(tmp_path, _PLAN, "head", minute * 60.0, _state(minute), who=who, keep=2)
    write_stage(tmp_path, _PLAN, "tail", 60.0, _state(1, "tail"), keep=2)
    assert [name[9:13] + name[-4] for name in _names(tmp_path)] == ["0020a", "0040b", "0041a"]
    assert len(_names(tmp_path, "tail")) == 1


def test_one_worker_has_no_more_files_than_are_kept_however_often_it_is_started_again(tmp_path: Path) -> None:
    """A folder named like a checkpoint is left alone, and old ones go all the same."""
    (tmp_path / "run" / "head" / "19700101T000000.000000Z-c.pt").mkdir(parents=True)
    for second in range(5):
        write_stage(tmp_path, _PLAN, "head", 600.0 + second, _state(second), who="a", keep=2)
    write_stage(tmp_path, _PLAN, "head", 605.0, _state(5), who="b", keep=2)
    assert [name[13:15] + name[-4] for name in _names(tmp_path)] == ["00c", "03a", "04a", "05b"]


def test_what_is_on_the_disk_is_not_saved_again(tmp_path: Path) -> None:
    with _checkpoints(tmp_path) as checkpoints:
        checkpoints.open(0.0)
        checkpoints.last_mark = "first"
        assert not checkpoints.save_changes(1.0, lambda: _state(0), "first")
        assert checkpoints.maybe_save(601.0, lambda: _state(1), "second")
        assert not checkpoints.save_changes(602.0, lambda: _state(1), "second")
        assert checkpoints.save_changes(603.0, lambda: _state(2), "third")
        assert not checkpoints.save_changes(604.0, lambda: _state(2), "third")
    assert [name[:15] for name in _names(tmp_path)] == ["19700101T001001", "19700101T001003"]


def test_a_disk_that_refuses_is_told_and_ends_nothing(tmp_path, caplog, monkeypatch):
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with _checkpoints(tmp_path) as checkpoints:
        checkpoints.open(0.0)
        with monkeypatch.context() as patch:
            patch.setattr(writer, "write_file", full)
            assert checkpoints.maybe_save(601.0, lambda: _state(1), "first")
            checkpoints.flush()
            with pytest.raises(CheckpointError, match="could not be written: No space left on device"):
                checkpoints.save(602.0, _state(1))
        assert (checkpoints.failed, checkpoints.saved) == (2, 0)
        assert (checkpoints.failure, checkpoints.unsaved_s(660.0)) == ("No space left on device", 660.0)
        assert "No space left on device; free some space" in caplog.text
        assert checkpoints.save_changes(603.0, lambda: _state(1), "first"), "it is not on the disk"
        assert checkpoints.maybe_save(1201.0, lambda: _state(2))
        checkpoints.flush()
        assert (checkpoints.failure, checkpoints.unsaved_s(1204.0)) == ("", 3.0)
    assert [name[:15] for name in _names(tmp_path)] == ["19700101T001003", "19700101T002001"]


def test_what_a_killed_process_left_is_removed_of_one_s_own_only(tmp_path: Path) -> None:
    folder = tmp_path / "run" / "head"
    folder.mkdir(parents=True)
    own, other = ".19700101T000000.000000Z-w.pt.tmp", ".19700101T000000.000000Z-b-w.pt.tmp"
    for name in (own, other):
        (folder / name).touch()
    with _checkpoints(tmp_path) as checkpoints:
        checkpoints.open(0.0)
    assert _names(tmp_path) == [other]


def test_a_folder_that_cannot_be_made_and_names_that_will_not_do(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("a file")
    with _checkpoints(tmp_path) as checkpoints, pytest.raises(CheckpointError, match="can be written to"):
        checkpoints.open(0.0)
    state = StageState(config=_PLAN.config, version=1, parameters={}, strategy={"made of": object()})
    with _checkpoints(tmp_path / "new") as checkpoints, pytest.raises(CheckpointError, match="strategy"):
        checkpoints.save(600.0, state)
    for options, message in (({"stage": "body-2"}, "expected one of head, body-1, tail"), ({"who": "../w"}, "who")):
        with pytest.raises(TrainerUsageError, match=message):
            _checkpoints(tmp_path, **options)
    for options in ({"interval_s": -1.0}, {"interval_s": float("nan")}, {"keep": 0}, {"directory": ""}):
        with pytest.raises(TrainerUsageError):
            StagewiseConfig(**options)  # type: ignore[arg-type]


def test_a_replica_goes_on_where_it_was(tmp_path: Path) -> None:
    def replica() -> StageReplica:
        module = build_stage(_PLAN.config, _PLAN.ranges, 2, seed=5)
        inner = InnerConfig(lr=1e-2, warmup_steps=1)
        optimizer = make_optimizer(module, inner)
        return StageReplica(module, optimizer, inner, StageConfig(), kind="tail", num_stages=3)

    torch.manual_seed(0)
    data = [(torch.randn(2, 8, 16), torch.randint(0, 64, (2, 8))) for _ in range(3)]
    trained, resumed = replica(), replica()
    for number in range(2):
        trained.tail(f"{number}", *data[number])
        trained.step(number)
    trained.tail("2", *data[2])  # Accumulated, and in no step yet.
    who: dict[str, Any] = {"incarnation": "a" * 16, "applied": 2}
    state = StageState.of_replica(_PLAN.config, trained.state_dict(), strategy={"round": 3}, num_tokens=48, **who)
    write_stage(tmp_path, _PLAN, "tail", 600.0, state)

    found = _read(tmp_path, "tail")
    resumed.load_state_dict(found.state.for_replica())

    assert (found.header.version, found.header.num_tokens, dict(found.state.strategy)) == (2, 48, {"round": 3})
    assert (found.state.incarnation, found.state.applied) == ("a" * 16, 2)
    assert tree_digest(resumed.state_dict()) == tree_digest(trained.state_dict())


def test_a_file_from_before_it_said_who_counted_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def as_before(*arguments: Any) -> dict[str, Any]:
        document = document_of(*arguments)
        del document["incarnation"], document["applied"]
        return document

    monkeypatch.setattr(writer, "document_of", as_before)
    write_stage(tmp_path, _PLAN, "head", 600.0, _state(7))
    found = _read(tmp_path).state
    assert (found.version, found.incarnation, found.applied) == (7, "", 0)
