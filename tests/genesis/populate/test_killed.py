"""Killed with SIGKILL at any moment, workers and all, and started again: the store ends as if nothing happened."""

import contextlib
import os
import random
import signal
import subprocess
import time

import pytest

from genesis.populate.crashpoint import CRASH_POINTS
from tests.support.documents import documents, write_json_lines
from tests.support.populating import genesis, populate_arguments, snapshot, start, stray_objects


def run_and_kill(arguments, after_s=None, crash_at=""):
    """One run that dies at a crash point, or has its process group killed after some seconds; True if it was killed."""
    process = start(*arguments, GENESIS_CRASH_AT=crash_at)
    try:
        process.communicate(timeout=60 if after_s is None else after_s)
    except subprocess.TimeoutExpired:
        pass
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate(timeout=30)
    return process.returncode == -signal.SIGKILL


@pytest.mark.parametrize("point", CRASH_POINTS)
def test_killed_between_any_two_writes(point, small_input, undisturbed, tmp_path):
    arguments = [*populate_arguments(tmp_path / "store", small_input), "--workers", "1"]
    count = {"lease-taken": 1, "vocabulary-stored": 1, "tokenizer-published": 1, "source-finished": 1}.get(point, 3)
    assert run_and_kill(arguments, crash_at=f"{point}:{count}")
    genesis(*arguments)
    assert snapshot(tmp_path / "store") == undisturbed
    assert stray_objects(tmp_path / "store") == []


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_killed_thirty_times_in_one_populate(small_input, undisturbed, tmp_path):
    schedule = random.Random(20261120)
    arguments = [*populate_arguments(tmp_path / "store", small_input), "--workers", "2"]
    kills = 0
    for attempt in range(60):
        if kills >= 30:
            break
        if attempt % 3 == 2:
            kills += run_and_kill(arguments, after_s=schedule.uniform(0.3, 2.0))
        else:
            kills += run_and_kill(arguments, crash_at=f"{schedule.choice(CRASH_POINTS)}:{schedule.randint(1, 3)}")
    assert kills >= 30
    genesis(*arguments)
    assert snapshot(tmp_path / "store") == undisturbed
    assert stray_objects(tmp_path / "store") == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_finishes_the_commit_in_hand(number, tmp_path):
    """On an input long enough to be still running; the exit code is the shell's for that signal."""
    path = write_json_lines(tmp_path / "long.jsonl", documents(seed=12, count=400) * 150)
    arguments = [*populate_arguments(tmp_path / "store", path, shard_tokens=50_000, merges=20), "--workers", "1"]
    process = start(*arguments)
    deadline = time.monotonic() + 60
    while not (tmp_path / "store" / "shard_1.pt").exists():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(number)
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 128 + number, errors
    assert "the same command goes on from here" in output
    assert "Traceback" not in errors
    shards = len(snapshot(tmp_path / "store")["shards"])
    assert shards >= 1
    assert stray_objects(tmp_path / "store") == []
    genesis(*arguments, "--max-shards", str(shards + 1))
    assert len(snapshot(tmp_path / "store")["shards"]) == shards + 1
