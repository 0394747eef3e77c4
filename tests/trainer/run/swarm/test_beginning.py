"""Workers and drivers that cannot begin with what they were given say so once, with exit code 2."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.model_configs import small_config
from tests.support.stage_files import random_model, write_model
from tests.support.text_store import text_store
from trainer.model.plan import StagePlan
from trainer.run.cli.app import run

_ROOT = Path(__file__).resolve().parents[4]

RUN = """
run_id: first
strategy: async_sparta
model: {preset: tiny}
inner: {seq_len: 32, micro_batch_size: 2}
threads: 1
rpc: {host: 127.0.0.1}
swarm: {num_stages: 2}
"""


@pytest.fixture
def run_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("GENESIS_CACHE_DIR", str(tmp_path / "cache"))
    file = tmp_path / "run.yaml"
    file.write_text(RUN)
    return file


def begun(run_file: Path, *arguments: str) -> int:
    """The exit code of a process of this run that writes into the run file's folder."""
    folder = run_file.parent
    places = [f"state_dir={folder / 'state'}", f"swarm.checkpoint.directory={folder / 'checkpoints'}"]
    settings = [part for place in places for part in ("--set", place)]
    return run([*arguments, "--run", str(run_file), "--store", str(text_store()), "--no-api", *settings])


def began_as_worker(run_file: Path, *arguments: str) -> int:
    return begun(run_file, "worker", "--stage", "head", "--node-id", "head.1", *arguments)


def test_a_checkpoint_folder_that_is_a_file(run_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run_file.parent / "checkpoints").write_text("")
    assert began_as_worker(run_file) == 2
    assert "expected a folder for checkpoints that can be written to" in capsys.readouterr().err


def test_checkpoints_of_another_cut(run_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = random_model(small_config())
    plan = StagePlan.of(model.config, 3)
    write_model(run_file.parent / "checkpoints", model, plan, {"head": time.time()}, run_id="first", stages=("head",))
    assert began_as_worker(run_file) == 2
    assert f"{run_file.parent / 'checkpoints' / 'first'}: expected" in capsys.readouterr().err


def test_a_model_to_start_from_that_is_not_there(run_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert began_as_worker(run_file, "--set", "swarm.start_from=/nowhere") == 2
    assert "/nowhere: expected a Hugging Face folder" in capsys.readouterr().err


def test_no_checkpoint_of_the_time_to_go_back_to(run_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert began_as_worker(run_file, "--at", "2026-01-01T00:00:00Z") == 2
    assert "expected checkpoints of head in" in capsys.readouterr().err


def test_an_account_that_is_damaged(run_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    journal = run_file.parent / "state" / "ledger" / "first" / "journal.jsonl"
    journal.parent.mkdir(parents=True)
    journal.write_text("neither\none nor the other\n")
    assert begun(run_file, "--node-id", "driver-1", "--pipeline", "swarm") == 2
    assert f"expected line 1 of {journal} to fit the digests before it" in capsys.readouterr().err


@pytest.mark.long
def test_swarm_up_ends_at_once_and_says_why(run_file: Path, tmp_path: Path) -> None:
    folder = tmp_path / "all"
    (folder / "checkpoints").mkdir(parents=True)
    (folder / "checkpoints" / "swarm").write_text("")
    command = [sys.executable, "-m", "trainer", "swarm", "up", "--run", str(run_file), "--folder", str(folder)]
    command += ["--store", str(text_store()), "--max-steps", "1"]
    done = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    *events, reason = done.stderr.splitlines()
    assert reason.startswith(("trainer: head.1: ", "trainer: tail.1: "))
    assert "expected a folder for checkpoints that can be written to" in reason
    assert not any("started again" in event for event in events)
    assert "ending all processes" in events[-1]
    for log in folder.glob("*.log"):
        assert log.read_text().count("--- ") == 1


def test_a_stage_that_the_run_does_not_have_is_said_before_the_store_is_asked(
    run_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["worker", "--stage", "foot", "--run", str(run_file), "--store", str(run_file.parent / "nowhere")]
    assert run(arguments) == 2
    assert "--stage: expected auto or one of head, tail, found 'foot'" in capsys.readouterr().err
