"""A monitor beside real swarms: what it shows is what is there, it joins nothing, and what it cannot verify it says."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support.pipeline_swarm import STAGES, PipelineSwarm, steps_of
from tests.support.training_swarm import TERMINATED, TrainingSwarm
from tests.support.waiting import wait_until
from trainer.monitor.run_view import NodeSummary, RunView

ROOT = Path(__file__).resolve().parents[4]
OFTEN = {"discovery": {"report_interval_s": 1.0}}


def line(swarm: TrainingSwarm, *arguments: str) -> list[str]:
    address = f"127.0.0.1:{next(iter(swarm._ports.values()))}"
    return [sys.executable, "-m", "trainer", "monitor", "--initial-peers", address, *arguments]


def looked(swarm: TrainingSwarm, *arguments: str) -> RunView:
    """What a monitor that looks once prints as JSON."""
    command = line(swarm, "--run", str(swarm._config), "--once", "--json", *arguments)
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=180, check=False)
    assert done.returncode == 0, done.stderr
    return RunView.model_validate_json(done.stdout)


@contextmanager
def watching(swarm: TrainingSwarm, folder: Path, *arguments: str) -> Iterator[Callable[[str], Any]]:
    """A monitor that goes on; yields what asks its HTTP interface."""
    output = folder / "monitor.out"
    command = line(swarm, "--run", str(swarm._config), "--db", str(folder / "db"), "--port", "0", *arguments)
    with output.open("wb") as file:
        monitor = subprocess.Popen([*command, "--interval-s", "1"], cwd=ROOT, stdout=file, stderr=file)

    def ask(path: str) -> Any:
        found = re.findall(r"the run is shown at (http://127\.0\.0\.1:\d+)", output.read_text())
        assert found
        with urllib.request.urlopen(found[-1] + path, timeout=20) as answer:
            content = answer.read()
        return json.loads(content) if path.startswith("/api") else content.decode()

    try:
        wait_until(lambda: "no alarm" in output.read_text() or "alarms:" in output.read_text(), "a look of the monitor")
        yield ask
        monitor.terminate()
        assert monitor.wait(60) == TERMINATED, output.read_text()
        assert "Traceback" not in output.read_text()
    finally:
        monitor.kill()
        monitor.wait(30)


def the(view: RunView, name: str) -> NodeSummary:
    return next(node for node in view.nodes if node.node_id == name)


def reporting(swarm: TrainingSwarm, count: int, *arguments: str) -> RunView:
    """A look at which so many nodes report; a node reports some seconds after it has begun."""
    deadline_s = time.monotonic() + 120.0
    while True:
        view = looked(swarm, *arguments)
        if view.progress.num_reporting >= count:
            return view
        assert time.monotonic() < deadline_s, view


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_swarm_is_seen_as_it_is(tmp_path: Path) -> None:
    with PipelineSwarm(tmp_path, **OFTEN) as swarm:
        driver = swarm.begin_driver()
        workers = swarm.begin_workers(*STAGES)
        swarm.wait_for_steps("driver-1", 20)
        view = reporting(swarm, 4)

        assert view.progress.kind == "swarm"
        assert (view.progress.num_nodes, view.progress.num_reached) == (4, 4)
        assert [(stage.stage, stage.num_replicas) for stage in view.stages] == [(stage, 1) for stage in STAGES]
        assert view.progress.step is not None and view.progress.step >= 10
        assert view.progress.loss is not None and 0 < view.progress.loss < 20
        assert {(alarm.kind, alarm.subject) for alarm in view.alarms} == {("one-replica", stage) for stage in STAGES}
        assert view.account is not None and view.account.micro_batches.adds_up
        assert view.progress.trained_tokens == view.account.trained_tokens
        for node in workers:
            found = the(view, node.name)
            assert (found.role, found.stage, found.health, found.doubts) == ("worker", node.name, "ok", ())
            # The account confirms what a worker claims, but for what is under way.
            assert found.confirmed_pflops is not None
            assert 0.3 * found.pflops < found.confirmed_pflops <= found.pflops
            assert abs(found.clock_offset_s or 0.0) < 5.0
            assert found.memory_bytes > 1 << 20
        flops = {node.name: the(view, node.name).pflops / the(view, node.name).micro_batches for node in workers}
        assert flops["tail"] > flops["body-1"]  # It has the matrix of the output.
        assert the(view, "driver-1").role == "driver"
        assert any("their own word" in text for text in view.unverified)

        # Nobody has heard of a monitor.
        assert {node["node_id"] for node in driver.api("/api/training/global")["nodes"]} == {driver.name, *STAGES}

        with watching(swarm, tmp_path) as ask:
            assert {stage["stage"] for stage in ask("/api/run")["stages"]} == set(STAGES)
            swarm["body-1"].kill()

            def is_seen() -> bool:
                found = RunView.model_validate(ask("/api/run"))
                alarms = {(alarm.kind, alarm.subject) for alarm in found.alarms}
                return ("empty-stage", "body-1") in alarms

            wait_until(is_seen, "the empty stage to be an alarm")
            assert 'genesis_run_stage_replicas{stage="body-1"} 0.0' in ask("/metrics")
            assert "<!doctype html>" in ask("/")
            wait_until(lambda: len(ask("/api/run/course")["looks"]) > 3, "some looks")

            def is_gone() -> bool:
                return the(RunView.model_validate(ask("/api/run")), "body-1").health == "gone"

            wait_until(is_gone, "the killed worker to be gone, and its contribution kept")
            assert the(RunView.model_validate(ask("/api/run")), "body-1").pflops > 0

        # What was seen is there for the next monitor too.
        again = looked(swarm, "--db", str(tmp_path / "db"))
        assert the(again, "body-1").health == "gone"
        assert swarm.stop("driver-1") == [TERMINATED]
        assert len(steps_of(driver)) >= 20


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_nodes_that_hold_whole_models_are_seen_with_their_rounds(tmp_path: Path) -> None:
    with TrainingSwarm(tmp_path, **OFTEN) as swarm:
        swarm.begin("north", "east")
        swarm.wait_for_step(3)
        view = reporting(swarm, 2)
        assert view.progress.kind == "whole-model"
        assert view.stages == ()
        assert view.account is None
        assert view.progress.step is not None and view.progress.step >= 2
        for name in ("north", "east"):
            found = the(view, name)
            assert (found.role, found.health) == ("node", "ok")
            assert found.pflops > 0 and found.hours > 0 and found.tokens > 0
            assert found.confirmed_pflops is None
        shared = [each for each in view.rounds if each.num_members == 2]
        assert shared
        for each in shared:
            assert each.agree_s > 0 and each.reduce_s > 0 and each.vote_s > 0
            assert each.agree_s + each.reduce_s + each.vote_s <= each.seconds * 1.05
        assert "nobody counts them" in view.unverified[0]
        printed = subprocess.run(
            line(swarm, "--once"), cwd=ROOT, capture_output=True, text=True, timeout=180, check=True
        )
        assert "north" in printed.stdout and "not verified:" in printed.stdout, printed.stdout
        # A single look finds nobody of another run, and says where it has looked.
        other = line(swarm, "--once", "--run-id", "another")
        nobody = subprocess.run(other, cwd=ROOT, capture_output=True, text=True, timeout=180, check=False)
        assert nobody.returncode == 1
        assert "expected a node of run another" in nobody.stderr
        assert "Traceback" not in nobody.stderr
        assert swarm.stop() == [TERMINATED] * 2


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "--initial-peers: expected"),
        (["--initial-peers", "nonsense"], "initial_peers: expected"),
        (["--initial-peers", "127.0.0.1:4100", "--interval-s", "0"], "--interval-s: expected"),
        (["--initial-peers", "127.0.0.1:4100", "--db", "{folder}/text", "--once"], "--db"),
        (["--initial-peers", "127.0.0.1:4100", "--port", "70000"], "api.port"),
    ],
)
def test_options_that_make_no_sense_are_told(
    arguments: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from trainer.run.cli.app import run

    (tmp_path / "text").write_text("no database " * 200)
    code = run(["monitor", *(each.replace("{folder}", str(tmp_path)) for each in arguments)])
    assert code == 2
    assert said in capsys.readouterr().err
