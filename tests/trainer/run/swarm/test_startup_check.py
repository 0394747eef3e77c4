"""Whether a worker may begin with first weights among the run's other stages, tried with a clock of the test's own."""

from __future__ import annotations

import logging
import shutil
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.support.pipeline_swarm import STAGES, PipelineSwarm
from trainer.checkpoint.stages import StagewiseConfig
from trainer.errors import TrainerUsageError
from trainer.network.discovery.stage_report import StageReport, StageUid
from trainer.run.swarm.startup_check import StartupVersionCheck

GRACE_S = 30.0


def worker(stage: str, version: int, saved: int = 0, status: str = "serving") -> StageReport:
    return StageReport(
        uid=str(StageUid(stage, 40)),
        incarnation="0" * 16,
        status=status,  # type: ignore[arg-type]
        version=version,
        saved=saved,
    )


@dataclass
class Beginner:
    """A worker of the head that begins, and what it hears."""

    others: list[StageReport] = field(default_factory=list)
    begin_anew: bool = False
    version: int = 0
    now_s: float = 0.0

    def __post_init__(self) -> None:
        self.abreast = StartupVersionCheck(
            "head",
            STAGES,
            StagewiseConfig(directory="/data", begin_anew=self.begin_anew),
            GRACE_S,
            version=lambda: self.version,
            reports=lambda: self.others,
            clock=lambda: self.now_s,
        )


FAR = [worker("body-1", 12, saved=12), worker("tail", 1, saved=1)]


@pytest.mark.parametrize(
    "others",
    [
        [],
        [worker("body-1", 0), worker("tail", 0)],
        [worker("body-1", 3, saved=3), worker("tail", 2, saved=2)],  # The first steps, as announcements tell of them.
        [*FAR, worker("head", 12, saved=12, status="joining")],  # Its stage's state is on its way.
    ],
)
def test_a_common_beginning_is_nothing_to_speak_of(others: list[StageReport], caplog: pytest.LogCaptureFixture) -> None:
    assert Beginner(others).abreast.may_serve()
    assert not caplog.records


def test_a_stage_that_is_lost_where_others_have_saved_is_waited_for_and_then_refused(
    caplog: pytest.LogCaptureFixture,
) -> None:
    beginner = Beginner(FAR)
    assert not beginner.abreast.may_serve()
    assert not beginner.abreast.may_serve()
    (said,) = caplog.records
    assert "body-1 at version 12, tail at version 1" in said.getMessage()
    beginner.now_s = GRACE_S
    with pytest.raises(TrainerUsageError, match=r"expected a checkpoint of it in /data, .* version 12 .*begin_anew"):
        beginner.abreast.may_serve()


def test_somebody_who_comes_with_the_stage_s_state_meanwhile_ends_the_wait() -> None:
    beginner = Beginner(list(FAR))
    assert not beginner.abreast.may_serve()
    beginner.now_s = GRACE_S - 1
    beginner.others.append(worker("head", 12, saved=12, status="joining"))
    assert beginner.abreast.may_serve()
    beginner.others.pop()
    beginner.now_s = GRACE_S + 1  # Counted anew.
    assert not beginner.abreast.may_serve()


def test_one_that_leaves_with_the_state_is_no_help() -> None:
    assert not Beginner([*FAR, worker("head", 12, saved=12, status="leaving")]).abreast.may_serve()


def test_before_anybody_has_saved_a_stage_whose_only_worker_died_begins_anew_loudly_and_for_good(
    caplog: pytest.LogCaptureFixture,
) -> None:
    beginner = Beginner([worker("body-1", 500), worker("tail", 499)])
    assert beginner.abreast.may_serve()
    (said,) = caplog.records
    assert said.levelno == logging.WARNING and "head BEGINS ANEW" in said.getMessage()
    beginner.version, beginner.others = 2, [worker("body-1", 503, saved=503), worker("tail", 502, saved=501)]
    assert beginner.abreast.may_serve()
    beginner.abreast.compare()
    assert len(caplog.records) == 1


def test_who_sets_the_option_begins_anew_loudly(caplog: pytest.LogCaptureFixture) -> None:
    assert Beginner(FAR, begin_anew=True).abreast.may_serve()
    assert "BEGINS ANEW" in caplog.text


def test_others_that_come_later_are_looked_at_until_the_stage_has_stepped_for_a_while() -> None:
    beginner = Beginner()
    assert beginner.abreast.may_serve()
    beginner.now_s, beginner.others = 3600.0, list(FAR)  # Without them there was no step.
    assert not beginner.abreast.may_serve()

    beginner = Beginner([worker("body-1", 0), worker("tail", 0)])
    assert beginner.abreast.may_serve()
    beginner.version = 1
    assert beginner.abreast.may_serve()
    beginner.now_s, beginner.version = GRACE_S + 1, 5000
    beginner.others = [worker("body-1", 5040, saved=5040), worker("tail", 5030, saved=5030)]
    assert beginner.abreast.may_serve()


def test_who_has_the_stage_s_state_is_not_asked() -> None:
    beginner = Beginner(FAR, version=1)
    beginner.abreast.is_anew = False
    assert beginner.abreast.may_serve()


@pytest.mark.parametrize(
    ("versions", "is_told"), [((12, 12, 1), True), ((12, 10, 11), False), ((5000, 4970, 4990), False)]
)
def test_versions_that_are_far_apart_are_told_once_when_all_serve(
    versions: tuple[int, int, int], is_told: bool, caplog: pytest.LogCaptureFixture
) -> None:
    head, body, tail = versions
    beginner = Beginner([worker("body-1", body), worker("tail", tail, status="joining")], version=head)
    beginner.abreast.is_anew = False
    beginner.abreast.compare()
    assert not caplog.records
    beginner.others[1] = worker("tail", tail)
    for _ in range(2):
        beginner.abreast.compare()
    assert len(caplog.records) == is_told
    if is_told:
        assert f"(head at version {head}, body-1 at version {body}, tail at version {tail})" in caplog.text


@pytest.mark.long
@pytest.mark.timeout(180)
def test_a_stage_without_checkpoint_among_those_that_have_some_does_not_begin(tmp_path: Path) -> None:
    with PipelineSwarm(tmp_path, swarm={"join": {"first_peers_s": 0.8}}) as swarm:
        swarm.begin_driver("driver-1")
        swarm.begin_workers(*STAGES)
        swarm.wait_for_steps("driver-1", 8)
        swarm.stop("driver-1")
        swarm.stop(*STAGES)
        folder = tmp_path / "stages" / swarm.config.run_id / "head"
        assert list(folder.glob("*.pt"))
        shutil.rmtree(folder)
        for name in ("driver-1", "body-1", "tail"):
            swarm[name].start()
        swarm.wait(lambda: "serves version" in swarm["tail"].output(), "the tail to serve again")
        head = swarm["head"]
        head.start()
        assert head.exit_code() == 2
        last = head.output().splitlines()[-1]
        assert last.startswith("trainer: head: expected a checkpoint of it in ")
        assert "body-1 at version " in last
        assert not list(folder.glob("*.pt"))
        again = swarm.begin_again("head", "--set", "swarm.checkpoint.begin_anew=true")
        swarm.wait(lambda: "head BEGINS ANEW" in again.output(), "the head to begin anew")
