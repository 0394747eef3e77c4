"""Stages are rolled back only while no worker of this machine writes their checkpoints."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.support.model_configs import small_config
from tests.support.stage_files import random_model, write_model
from trainer.checkpoint.stages import StageCheckpoints, StagewiseConfig, newest_set, roll_back, time_us
from trainer.errors import CheckpointError
from trainer.model.plan import StagePlan
from trainer.run.cli.app import run

_ROOT = Path(__file__).resolve().parents[4]
_PLAN = StagePlan.of(small_config(), 2)
_LATER = time_us(1e9)
_WRITER = """
    import sys, time
    from tests.support.model_configs import small_config
    from trainer.model.plan import StagePlan
    from trainer.checkpoint.stages import StageCheckpoints, StagewiseConfig

    config = StagewiseConfig(directory=sys.argv[1])
    with StageCheckpoints(config, "run", StagePlan.of(small_config(), 2), "tail", "other") as checkpoints:
        checkpoints.open(time.time())
        print("open", flush=True)
        time.sleep(120)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    model = random_model(_PLAN.config)
    for number in (1, 2):
        write_model(tmp_path, model, _PLAN, dict.fromkeys(_PLAN.names, number * 600.0), version=number)
    return tmp_path


def _writer(folder: Path, stage: str) -> StageCheckpoints:
    checkpoints = StageCheckpoints(StagewiseConfig(directory=str(folder)), "run", _PLAN, stage, "w")
    checkpoints.open(0.0)
    return checkpoints


def _versions(folder: Path) -> list[int]:
    return [file.header.version for file in newest_set(folder, "run", _LATER).files.values()]


def test_while_one_writes_it_is_refused_and_moves_nothing_and_rehearsed_all_the_same(folder: Path) -> None:
    with _writer(folder, "head"), _writer(folder, "head"):
        with pytest.raises(CheckpointError, match=r"found one or more of head running.*stop the run's workers"):
            roll_back(folder, "run", time_us(700), time_us(5000))
        assert _versions(folder) == [2, 2]
        assert len(roll_back(folder, "run", time_us(700), time_us(5000), dry_run=True).moved) == 2
    assert len(roll_back(folder, "run", time_us(700), time_us(5000)).moved) == 2


def test_a_stage_is_rolled_back_beside_workers_of_others(folder: Path) -> None:
    with _writer(folder, "head"):
        roll_back(folder, "run", time_us(700), time_us(5000), stages=("tail",))
        assert _versions(folder) == [2, 1]


def test_a_worker_that_goes_back_alone_asks_nobody(folder: Path) -> None:
    with _writer(folder, "tail"):
        roll_back(folder, "run", time_us(700), time_us(5000), stages=("tail",), in_use=True)
    assert _versions(folder) == [2, 1]


@pytest.mark.slow
def test_the_command_says_so_while_another_process_writes_and_not_once_it_is_killed(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_file = folder / "run.yaml"
    run_file.write_text(f"run_id: run\nswarm: {{num_stages: 2, checkpoint: {{directory: {folder}}}}}\n")
    command = ["rollback", "--run", str(run_file), "--at", "1970-01-01T00:11:40Z"]
    program = [sys.executable, "-c", textwrap.dedent(_WRITER), str(folder)]
    writer = subprocess.Popen(
        program, cwd=_ROOT, env={**os.environ, "PYTHONPATH": str(_ROOT)}, stdout=subprocess.PIPE, text=True
    )
    try:
        assert writer.stdout is not None and writer.stdout.readline() == "open\n"
        assert run(command) == 1
        assert "expected no worker that writes here, found one or more of tail running" in capsys.readouterr().err
        assert _versions(folder) == [2, 2]
    finally:
        writer.send_signal(signal.SIGKILL)
        writer.communicate(timeout=30)
    assert run(command) == 0
    assert "2 newer files set aside" in capsys.readouterr().out
    assert _versions(folder) == [1, 1]
