from __future__ import annotations

import logging
import pickle
import zipfile
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support.checkpoint_actor import Hostile, stage_parameters, write_model, write_stage
from tests.support.model_configs import random_model, small_config
from trainer.checkpoint.stages import (
    RunShape,
    StageCheckpoints,
    StageFile,
    StageHeader,
    StageState,
    StagewiseConfig,
    assemble,
    newest_set,
    roll_back,
    time_us,
)
from trainer.checkpoint.stages.naming import StageName, file_name
from trainer.checkpoint.stages.sets import choose
from trainer.errors import CheckpointError, CheckpointMismatchError, CorruptCheckpointError
from trainer.model import grow_vocabulary
from trainer.model.plan import StagePlan

_CONFIG = small_config()
_PLAN = StagePlan.of(_CONFIG, 3)
_SHAPES = (
    RunShape(run_id="run", config=_CONFIG, layers=(2, 1, 1)),
    RunShape(run_id="run", config=small_config(vocab_size=128), layers=(2, 1, 1)),
    RunShape(run_id="run", config=_CONFIG, layers=(2, 2)),
)
_LATER = time_us(1e9)


def _file(shape: RunShape, stage: str, saved_us: int, who: str) -> StageFile:
    named = StageName(Path("run", stage, file_name(saved_us, who)), stage, saved_us, who)
    header = StageHeader(shape=shape, stage=stage, saved_us=saved_us, version=saved_us // 2, num_tokens=0)
    return StageFile(named, header)


@st.composite
def _files(draw: st.DrawFn) -> list[StageFile]:
    files = []
    for number in range(draw(st.integers(0, 12))):
        shape = draw(st.sampled_from(_SHAPES))
        stage = draw(st.sampled_from(shape.plan.names))
        files.append(_file(shape, stage, draw(st.integers(0, 9)), f"w{number}"))
    return files


def _times(found: Any) -> tuple[int, int]:
    times = [file.header.saved_us for file in found]
    return min(times), max(times)


@pytest.mark.slow
@given(_files(), st.integers(0, 9), st.sampled_from([(), ("tail",), ("head", "body-1")]), st.randoms())
def test_the_set_is_the_newest_of_all_that_could_be_made(files, at_us, stages, shuffler):
    found = choose(files, at_us, stages=stages)

    possible = []
    for shape in _SHAPES:
        names = stages or shape.plan.names
        older = [file for file in files if file.header.shape == shape and file.header.saved_us <= at_us]
        possible += product(*([file for file in older if file.header.stage == name] for name in names))
    if not possible:
        assert found is None
        return
    assert found is not None
    chosen = tuple(found.values())
    assert chosen in possible
    assert _times(chosen) == max(map(_times, possible))
    shape = chosen[0].header.shape
    for stage, file in found.items():  # Of every stage the newest of its shape, not only of one.
        headers = [other.header for other in files if (other.header.shape, other.header.stage) == (shape, stage)]
        assert file.header.saved_us == max(each.saved_us for each in headers if each.saved_us <= at_us)
    older = [file for file in files if file.header.saved_us <= at_us]
    shuffler.shuffle(older)  # It depends neither on the order of files nor on newer ones.
    assert choose(older, at_us, stages=stages) == found


def test_of_two_replicas_at_one_moment_the_further_one_counts() -> None:
    files = [_file(_SHAPES[2], stage, 4, who) for stage in ("head", "tail") for who in ("a", "b")]
    found = choose(files, 4)
    assert found is not None and [file.named.who for file in found.values()] == ["b", "b"]


@pytest.fixture
def written(tmp_path: Path) -> Path:
    """Two models of one run, 10 minutes apart; of the body a third, 5 minutes later, which nobody else has."""
    for seed, minute in ((1, 10), (2, 20)):
        times = {"head": minute * 60.0, "body-1": minute * 60.0 + 7, "tail": minute * 60.0 + 3}
        write_model(tmp_path, random_model(_CONFIG, seed), _PLAN, times, version=seed)
    write_model(tmp_path, random_model(_CONFIG, 3), _PLAN, {"body-1": 1500.0}, version=3, stages=("body-1",))
    return tmp_path


def _versions(folder: Path, at: float, **options: Any) -> list[int]:
    return [file.header.version for file in newest_set(folder, "run", time_us(at), **options).files.values()]


@pytest.mark.slow
def test_each_stage_s_newest_up_to_the_moment(written: Path) -> None:
    expected = {1500: [2, 3, 2], 1499.999999: [2, 2, 2], 1203: [2, 1, 2], 1202.5: [2, 1, 1], 607: [1, 1, 1]}
    assert {at: _versions(written, at) for at in expected} == expected
    found = newest_set(written, "run", time_us(1203))
    assert (found.first_us, found.last_us) == (time_us(607), time_us(1203))
    assert list(found.files) == ["head", "body-1", "tail"]
    whole = assemble(newest_set(written, "run", time_us(1300)))
    state = random_model(_CONFIG, 2).state_dict()
    assert whole.config == _CONFIG
    assert whole.state.keys() == state.keys()
    assert all(torch.equal(whole.state[name], state[name]) for name in state)


def test_a_stage_without_a_file_is_named(written: Path) -> None:
    refused: list[tuple[str, str, int, dict[str, Any]]] = [
        (r"19700101T001005.000000Z, found none of body-1 \(the oldest is of 1970", "run", time_us(605), {}),
        ("found none before 19700101T001000", "run", time_us(10), {}),
        ("found no whole one; check the folder and run_id", "another", _LATER, {}),
        ("architecture and cut, found 7 of others", "run", _LATER, {"plan": StagePlan.of(_CONFIG, 2)}),
        ("found none of body-2", "run", _LATER, {"stages": ("head", "body-1", "body-2"), "plan": _PLAN}),
    ]
    for message, run_id, at_us, options in refused:
        with pytest.raises(CheckpointError, match=message):
            newest_set(written, run_id, at_us, **options)
    for path in (written / "run" / "tail").iterdir():
        path.unlink()
    with pytest.raises(CheckpointError, match="found none of tail; name a later time"):
        newest_set(written, "run", _LATER)
    assert _versions(written, 1e9, stages=("body-1", "head")) == [2, 3]


@pytest.mark.parametrize("share", [0.0, 0.3, 0.999])
def test_a_file_cut_short_is_passed_over(written: Path, share: float, caplog: pytest.LogCaptureFixture) -> None:
    newest = max((written / "run" / "tail").iterdir())
    newest.write_bytes(newest.read_bytes()[: int(newest.stat().st_size * share)])
    assert _versions(written, 1300) == [2, 2, 1]
    wrong = f"one cut short, of {newest.stat().st_size:,} bytes" if share else "an empty file"
    assert f"{newest}: damaged: not a whole checkpoint, but {wrong}; going on" in caplog.text


def test_a_flipped_bit_of_a_weight_is_seen(written: Path, caplog: pytest.LogCaptureFixture) -> None:
    newest = max((written / "run" / "tail").iterdir())
    body = bytearray(newest.read_bytes())
    weight = random_model(_CONFIG, 2).state_dict()["readout.output.weight"].numpy().tobytes()
    body[body.index(weight) + 100] ^= 1
    newest.write_bytes(body)
    assert _versions(written, 1300) == [2, 2, 1]
    assert "under the digest" in caplog.text and "going on to the one before it" in caplog.text


def test_what_is_no_file_of_a_checkpoint_s_is_told_in_words(written: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = written / "run" / "tail"
    names = [folder / file_name(time_us(5000 + number), "worker") for number in range(5)]
    names[0].mkdir()
    names[1].symlink_to("/dev/zero")
    names[2].symlink_to("/nowhere")
    names[3].write_bytes(b"garbage" * 1000)
    with zipfile.ZipFile(names[4], "w") as archive:
        archive.writestr("some", "thing")
    (folder / "tail-of-yesterday.pt").mkdir()
    assert _versions(written, 1e9) == [2, 3, 2]
    assert [record.levelno for record in caplog.records] == [logging.WARNING] * 6
    expected = ["a folder", "a device or pipe", "a link that leads nowhere", "a file of another kind"]
    for path, wrong in zip(names, [*expected, "an archive whose contents cannot be read"], strict=True):
        assert f"{path}: damaged: not a whole checkpoint, but {wrong}; going on without it" in caplog.text
    assert "tail-of-yesterday.pt: expected a checkpoint's name, TIME-WORKER.pt, found another" in caplog.text


def test_files_of_another_kind_stage_run_or_time_are_passed_over(written, caplog):
    run = written / "run"
    body = (run / "head" / file_name(time_us(1200), "worker")).read_bytes()
    (run / "head" / file_name(time_us(5000), "worker")).write_bytes(body)
    (run / "tail" / file_name(time_us(1200), "worker")).write_bytes(body)
    (written / "copy" / "head").mkdir(parents=True)
    (written / "copy" / "head" / file_name(time_us(1200), "worker")).write_bytes(body)
    torch.save({"some": "thing"}, run / "head" / file_name(time_us(5001), "worker"))

    assert _versions(written, 1e9) == [2, 3, 2]
    assert caplog.text.count("expected the stage, time and run of its name") == 2
    assert "a file of another kind" in caplog.text
    with pytest.raises(CheckpointError, match="found no whole one"):
        newest_set(written, "copy", _LATER)


def test_nothing_in_a_file_is_run(written: Path) -> None:
    trap = written / "trap"
    (written / "run" / "head" / file_name(time_us(5000), "evil")).write_bytes(pickle.dumps(Hostile(trap)))
    torch.save({"kind": Hostile(trap)}, written / "run" / "head" / file_name(time_us(5001), "evil"))
    assert _versions(written, 1e9) == [2, 3, 2]
    assert not trap.exists()


def test_while_a_vocabulary_grows_the_set_is_the_old_model_until_all_stages_have_grown(tmp_path: Path) -> None:
    old, grown = random_model(_CONFIG, 1), random_model(_CONFIG, 2)
    write_model(tmp_path, old, _PLAN, dict.fromkeys(_PLAN.names, 600.0))
    grow_vocabulary(grown, 128, 0)
    plan = StagePlan.of(grown.config, 3)
    write_model(tmp_path, grown, plan, {"head": 1200.0, "body-1": 1200.0}, version=2, stages=("head", "body-1"))
    assert _versions(tmp_path, 1e9) == [1, 1, 1]
    write_model(tmp_path, grown, plan, {"tail": 1300.0}, version=2, stages=("tail",))
    assert _versions(tmp_path, 1e9) == [2, 2, 2]
    assert assemble(newest_set(tmp_path, "run", _LATER)).config == grown.config
    assert _versions(tmp_path, 1e9, plan=_PLAN) == [1, 1, 1]


def test_parameters_that_are_not_the_stage_s_are_told(tmp_path: Path) -> None:
    model = random_model(_CONFIG)
    write_model(tmp_path, model, _PLAN, dict.fromkeys(_PLAN.names, 600.0))
    parameters = stage_parameters(model.state_dict(), StagePlan.of(_CONFIG, 3, (1, 2, 1)), "head")
    write_stage(tmp_path, _PLAN, "head", 1200.0, StageState(config=_CONFIG, version=2, parameters=parameters))
    with pytest.raises(CheckpointMismatchError, match="expected the parameters of head of run, found missing"):
        assemble(newest_set(tmp_path, "run", _LATER))


def test_a_file_that_is_gone_when_it_is_read_is_told(written: Path) -> None:
    found = newest_set(written, "run", _LATER)
    found.files["tail"].named.path.unlink()
    with pytest.raises(CorruptCheckpointError, match="damaged: not a whole checkpoint, but no file any more"):
        assemble(found)


_TWO = StagePlan.of(_CONFIG, 2)


@pytest.fixture
def two_stages(tmp_path: Path) -> Path:
    model = random_model(_CONFIG)
    for number in (1, 2, 3):
        times = {"head": number * 600.0, "tail": number * 600.0 + 50}
        write_model(tmp_path, model, _TWO, times, version=number, who=f"w{number}")
    return tmp_path


def _all(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.rglob("*.pt")}


def test_what_is_newer_is_set_aside_and_nothing_is_lost(two_stages: Path) -> None:
    before = _all(two_stages)
    rehearsed = roll_back(two_stages, "run", time_us(1210), time_us(5000), dry_run=True)
    assert (_versions(two_stages, 1e9), rehearsed.folder.exists()) == ([3, 3], False)
    done = roll_back(two_stages, "run", time_us(1210), time_us(5000))
    assert done.moved == rehearsed.moved
    assert [file.header.version for file in done.found.files.values()] == [2, 1]
    assert sorted(path.parent.name + path.name[9:13] for path in done.moved) == ["head0030", "tail0020", "tail0030"]
    assert _versions(two_stages, 1e9) == [2, 1]
    assert _all(two_stages) == before
    assert done.folder == two_stages / "run" / "set-aside" / "19700101T012320.000000Z"
    assert sorted(path.name for path in done.folder.iterdir()) == ["head", "tail"]
    for path in done.moved:  # They can be moved back.
        (done.folder / path.parent.name / path.name).rename(path)
    assert _versions(two_stages, 1e9) == [3, 3]
    assert roll_back(two_stages, "run", time_us(1850), time_us(5000)).moved == ()
    assert len(roll_back(two_stages, "run", time_us(1850) - 1, time_us(6000)).moved) == 1


def test_what_another_has_moved_meanwhile_does_not_matter(two_stages: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rename, rivals = Path.rename, []

    def rename_too_late(path: Path, target: Path) -> Path:
        if not rivals:
            rivals.append(rename(path, two_stages / "rival.pt"))
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", rename_too_late)
    done = roll_back(two_stages, "run", time_us(1210), time_us(5000))
    assert len(done.moved) == 2
    assert _versions(two_stages, 1e9) == [2, 1]
    assert roll_back(two_stages, "run", time_us(1210), time_us(6000)).moved == (), "done again it has nothing to do"


def test_a_file_in_the_way_is_not_replaced(two_stages: Path) -> None:
    aside = roll_back(two_stages, "run", time_us(1210), time_us(5000), dry_run=True)
    blocked = aside.folder / "tail" / aside.moved[0].name
    blocked.parent.mkdir(parents=True)
    blocked.write_text("mine")
    with pytest.raises(CheckpointError, match="found none of tail"):
        roll_back(two_stages, "run", time_us(610), time_us(5000))
    assert _versions(two_stages, 1e9) == [3, 3], "without a set nothing is moved"
    with pytest.raises(CheckpointError, match="mend that and do it again"):
        roll_back(two_stages, "run", time_us(1210), time_us(5000))
    assert blocked.read_text() == "mine"


def _writer(folder: Path, stage: str) -> StageCheckpoints:
    checkpoints = StageCheckpoints(StagewiseConfig(directory=str(folder)), "run", _TWO, stage, "w")
    checkpoints.open(0.0)
    return checkpoints


def test_while_one_writes_it_is_refused_and_moves_nothing_and_rehearsed_all_the_same(two_stages: Path) -> None:
    with _writer(two_stages, "head"), _writer(two_stages, "head"):
        with pytest.raises(CheckpointError, match=r"found one or more of head running.*stop the run's workers"):
            roll_back(two_stages, "run", time_us(700), time_us(5000))
        assert _versions(two_stages, 1e9) == [3, 3]
        assert len(roll_back(two_stages, "run", time_us(700), time_us(5000), dry_run=True).moved) == 4
    assert len(roll_back(two_stages, "run", time_us(700), time_us(5000)).moved) == 4


@pytest.mark.parametrize(("other", "in_use"), [("head", False), ("tail", True)])
def test_a_stage_is_rolled_back_beside_workers_of_others_and_by_its_own_if_told(two_stages, other, in_use):
    with _writer(two_stages, other):
        roll_back(two_stages, "run", time_us(700), time_us(5000), stages=("tail",), in_use=in_use)
        assert _versions(two_stages, 1e9) == [3, 1]
