"""What a process of a swarm checks before it serves: its name, its files, and its stage among the run's others."""

from __future__ import annotations

import logging
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.checkpoint_actor import write_model
from tests.support.model_configs import random_model, small_config
from tests.support.pipeline_swarm import STAGES, PipelineSwarm
from tests.support.small_store import text_store
from tests.support.trainer_command import ROOT
from trainer.checkpoint.stages import StagewiseConfig
from trainer.errors import IncompatiblePeerError, TrainerUsageError
from trainer.model.plan import StagePlan
from trainer.network.discovery import Announcement
from trainer.network.discovery.stage_report import StageReport, StageUid
from trainer.run.cli.app import run
from trainer.run.config import RunConfig, from_mapping
from trainer.run.node.network import Network
from trainer.run.node.stopping import StopRequest
from trainer.run.swarm.building import build_stage_site
from trainer.run.swarm.driver_node import run_driver
from trainer.run.swarm.lifecycle import StartupVersionCheck
from trainer.run.swarm.shape import only_process, shape_of, stage_of
from trainer.run.swarm.worker_node import WorkerNode

GRACE_S = 30.0
RUN = """
run_id: first
strategy: async_sparta
model: {preset: tiny}
inner: {seq_len: 32, micro_batch_size: 2}
threads: 1
rpc: {host: 127.0.0.1}
swarm: {num_stages: 2}
"""
_HOLDER = """
import sys
from trainer.run.config import RunConfig
from trainer.run.swarm.shape import only_process

with only_process(RunConfig(node_id="driver-1", state_dir=sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


def config_in(folder: Path, node_id: str = "driver-1") -> RunConfig:
    content = {
        "node_id": node_id,
        "state_dir": str(folder),
        "data": {"store": str(text_store())},
        "model": {"preset": "tiny"},
        "inner": {"micro_batch_size": 2},
        "swarm": {"num_stages": 3},
    }
    return from_mapping(RunConfig, content)


@pytest.mark.slow
def test_the_second_of_a_name_is_refused_until_the_first_is_killed(tmp_path: Path) -> None:
    command = [sys.executable, "-c", _HOLDER, str(tmp_path)]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as first:
        try:
            assert first.stdout is not None
            assert first.stdout.readline() == "held\n"
            with pytest.raises(TrainerUsageError, match="--node-id driver-1: expected a name of its own"):
                run_driver(config_in(tmp_path), StopRequest(), None)
            with only_process(config_in(tmp_path, "driver-2")), only_process(config_in(tmp_path / "elsewhere")):
                pass
        finally:
            first.kill()
            first.wait(20)
    with pytest.raises(ZeroDivisionError), only_process(config_in(tmp_path)):  # Free again, whatever ends a process.
        raise ZeroDivisionError
    with only_process(config_in(tmp_path)):
        pass


@pytest.fixture
def run_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("GENESIS_CACHE_DIR", str(tmp_path / "cache"))
    file = tmp_path / "run.yaml"
    file.write_text(RUN)
    return file


def checkpoints_of_another_cut(folder: Path) -> None:
    model = random_model(small_config())
    plan = StagePlan.of(model.config, 3)
    write_model(folder / "checkpoints", model, plan, {"head": time.time()}, run_id="first", stages=("head",))


def damaged_journal(folder: Path) -> None:
    journal = folder / "state" / "ledger" / "first" / "journal.jsonl"
    journal.parent.mkdir(parents=True)
    journal.write_text("neither\none nor the other\n")


WORKER = ["worker", "--stage", "head", "--node-id", "head.1"]
DRIVER = ["--node-id", "driver-1", "--pipeline", "swarm"]


@pytest.mark.parametrize(
    ("arguments", "prepare", "said"),
    [
        (DRIVER, lambda folder: (folder / "state").touch(), "state_dir: expected a folder that can be written"),
        (
            WORKER,
            lambda folder: (folder / "checkpoints").touch(),
            "expected a folder for checkpoints that can be written to",
        ),
        (WORKER, checkpoints_of_another_cut, "{folder}/checkpoints/first: expected"),
        ([*WORKER, "--set", "swarm.start_from=/nowhere"], None, "/nowhere: expected a Hugging Face folder"),
        ([*WORKER, "--at", "2026-01-01T00:00:00Z"], None, "expected checkpoints of head in"),
        (DRIVER, damaged_journal, "line 1 of {folder}/state/ledger/first/journal.jsonl to fit the digests before it"),
        # Before the store is asked:
        (["worker", "--stage", "foot", "--store", "/nowhere"], None, "--stage: expected auto or one of head, tail, "),
    ],
)
def test_a_process_that_cannot_begin_says_so_with_exit_code_2(arguments, prepare, said, run_file, capsys):
    folder = run_file.parent
    if prepare is not None:
        prepare(folder)
    places = [f"state_dir={folder / 'state'}", f"swarm.checkpoint.directory={folder / 'checkpoints'}"]
    settings = [part for place in places for part in ("--set", place)]
    store = [] if "--store" in arguments else ["--store", str(text_store())]
    assert run([*arguments, *store, "--run", str(run_file), "--no-api", *settings]) == 2
    assert said.format(folder=folder) in capsys.readouterr().err


def worker(stage: str, version: int, saved: int = 0, status: str = "serving", round_index: int = 0) -> StageReport:
    content = {"uid": str(StageUid(stage, 40)), "incarnation": "0" * 16, "status": status, "round_index": round_index}
    return StageReport.model_validate({**content, "version": version, "saved": saved})


@dataclass
class Beginner:
    """A worker of the head that begins, and what it hears; a clock of the test's own."""

    others: list[StageReport] = field(default_factory=list)
    begin_anew: bool = False
    version: int = 0
    now_s: float = 0.0

    def __post_init__(self) -> None:
        config, tells = StagewiseConfig(directory="/data", begin_anew=self.begin_anew), lambda: self.others
        self.check = StartupVersionCheck(
            "head", STAGES, config, GRACE_S, lambda: self.version, tells, clock=lambda: self.now_s
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
def test_a_common_beginning_is_not_logged(others, caplog):
    assert Beginner(others).check.may_serve()
    assert not caplog.records


def test_a_lost_stage_whose_others_have_saved_is_waited_for_and_refused(caplog):
    beginner = Beginner(FAR)
    assert not beginner.check.may_serve()
    assert not beginner.check.may_serve()
    (said,) = caplog.records
    assert "body-1 at version 12, tail at version 1" in said.getMessage()
    beginner.now_s = GRACE_S - 1  # Somebody comes with the stage's state meanwhile, and leaves.
    beginner.others = [*FAR, worker("head", 12, saved=12, status="joining")]
    assert beginner.check.may_serve()
    beginner.others = [*FAR, worker("head", 12, saved=12, status="leaving")]
    beginner.now_s = GRACE_S + 1  # Counted anew.
    assert not beginner.check.may_serve()
    beginner.now_s = 2 * GRACE_S + 1
    with pytest.raises(TrainerUsageError, match=r"expected a checkpoint of it in /data, .* version 12 .*begin_anew"):
        beginner.check.may_serve()


def test_before_anybody_has_saved_a_stage_begins_anew_loudly_and_for_good(caplog):
    beginner = Beginner([worker("body-1", 500), worker("tail", 499)])
    assert beginner.check.may_serve()
    (said,) = caplog.records
    assert said.levelno == logging.WARNING and "head BEGINS ANEW" in said.getMessage()
    beginner.version, beginner.others = 2, [worker("body-1", 503, saved=503), worker("tail", 502, saved=501)]
    assert beginner.check.may_serve()
    beginner.check.compare()
    assert len(caplog.records) == 1
    caplog.clear()
    assert Beginner(FAR, begin_anew=True).check.may_serve(), "the option is set"
    assert "BEGINS ANEW" in caplog.text


def test_others_that_come_later_are_looked_at_until_the_stage_has_stepped_for_a_while() -> None:
    beginner = Beginner()
    assert beginner.check.may_serve()
    beginner.now_s, beginner.others = 3600.0, list(FAR)  # Without them there was no step.
    assert not beginner.check.may_serve()

    beginner = Beginner([worker("body-1", 0), worker("tail", 0)])
    assert beginner.check.may_serve()
    beginner.version = 1
    assert beginner.check.may_serve()
    beginner.now_s, beginner.version = GRACE_S + 1, 5000
    beginner.others = [worker("body-1", 5040, saved=5040), worker("tail", 5030, saved=5030)]
    assert beginner.check.may_serve()

    beginner = Beginner(FAR, version=1)
    beginner.check.has_first_weights = False
    assert beginner.check.may_serve(), "it has the stage's state"


def test_a_worker_that_took_up_the_state_of_others_says_nothing_of_announcements_that_are_steps_apart(caplog):
    beginner = Beginner([worker("body-1", 141), worker("tail", 146)], version=145)
    beginner.check.took_up_state()
    assert beginner.check.may_serve()
    beginner.check.compare()
    assert not caplog.records


@pytest.mark.parametrize(("head", "tail", "is_told"), [(12, 1, True), (12, 11, False), (5000, 4970, False)])
def test_versions_far_apart_are_logged_once(head, tail, is_told, caplog):
    beginner = Beginner([worker("body-1", head), worker("tail", tail)], version=head)
    beginner.check.has_first_weights = False
    for _ in range(2):
        beginner.check.compare()
    assert len(caplog.records) == is_told
    assert (f"(head at version {head}, body-1 at version {head}, tail at version {tail})" in caplog.text) == is_told


@pytest.fixture
def worker_node(tmp_path: Path) -> Iterator[WorkerNode]:
    with PipelineSwarm(tmp_path, strategy="diloco") as swarm:
        config = replace(swarm.config, node_id="head")
        shape = shape_of(config)
        yield WorkerNode(config, shape, build_stage_site(config, shape, "head"), StopRequest())


def tell(monkeypatch: pytest.MonkeyPatch, name: str, value: Any) -> None:
    """What the network of any node says from now on."""
    monkeypatch.setattr(Network, name, property(lambda _: value))


def announced(stage: StageReport, number: int, terms_digest: str = "") -> Announcement:
    who = {"peer_id": f"{number:064x}", "node_id": f"n{number}", "run_id": "pipeline", "address": "h:1"}
    return Announcement(**who, terms_digest=terms_digest, stage=stage)


def test_a_worker_that_does_not_fit_does_not_join(worker_node, monkeypatch):
    shape, peers = shape_of(worker_node._config), list[Announcement]()
    tell(monkeypatch, "announcements", peers)
    peers += [announced(each, n, shape.terms(stage_of(each)).digest()) for n, each in enumerate(FAR)]
    worker_node._startup_check.grace_s = 0.0
    with pytest.raises(TrainerUsageError, match=r"head: expected a checkpoint of it in .*body-1 at version 12"):
        worker_node._joining.join()
    began = FAR[0].model_copy(update={"began_from": "2" * 16})
    peers[:] = [announced(began, 0, shape.terms("body-1").digest())]
    worker_node._built = replace(worker_node._built, began_from="1" * 16)
    with pytest.raises(
        IncompatiblePeerError, match=r"swarm\.start_from: expected the model that body1\.0\.40 began with"
    ):
        worker_node._joining.join()


@pytest.mark.parametrize("versions", [[40], [0, 0, 0, 40], [40, 10**9, 10**9]])
def test_a_state_has_its_nearest_holder_s_version(worker_node, monkeypatch, versions):
    donors = tuple(announced(worker("head", version), number) for number, version in enumerate(versions))
    tell(monkeypatch, "donors", donors)
    monkeypatch.setattr(Network, "publish", lambda *_: None)
    worker_node._states.adopt(
        replace(worker_node._synchroniser.trainer.shared_state(), outer_step=2, num_inner_steps=38)
    )
    assert worker_node.progress().inner_step == 40


@pytest.mark.parametrize(("rounds", "is_current"), [([0], True), ([0, 0, 5], True), ([0, 5, 5], False), ([5], False)])
def test_who_is_current(worker_node, monkeypatch, rounds, is_current):
    said = tuple(announced(worker("head", 0, round_index=index), number) for number, index in enumerate(rounds))
    monkeypatch.setattr(Network, "alike", lambda _: said)
    tell(monkeypatch, "shares_common_state", True)
    assert not worker_node._states.is_current(), "without a checkpoint of its own"
    worker_node._states.is_resumed = True
    assert worker_node._states.is_current() == is_current
