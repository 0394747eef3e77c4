"""Killed with SIGKILL at any moment, workers and all, and started again: the store ends as if nothing happened."""

import contextlib
import os
import random
import signal
import subprocess
import time

import pytest

from genesis.populate.crashpoint import CRASH_POINTS
from tests.support.documents import documents, write_json_lines, write_parquet
from tests.support.populating import genesis, populate_arguments, snapshot, start, stray_objects

FIRST_RUN = ["vocabulary-stored:1", "tokenizer-published:1"]
ANY_RUN = ["lease-taken:1"] + [
    f"{point}:{count}"
    for point in ("shard-sealed", "shard-stored", "segment-stored", "checkpoint-stored", "manifest-published")
    for count in (1, 2, 3)
]


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


@pytest.mark.slow
@pytest.mark.parametrize("point", CRASH_POINTS)
def test_killed_between_any_two_writes(point, small_input, undisturbed, tmp_path):
    arguments = [*populate_arguments(tmp_path / "store", small_input), "--workers", "1"]
    count = 3 if point.startswith("shard") else 1
    assert run_and_kill(arguments, crash_at=f"{point}:{count}")
    genesis(*arguments)
    assert snapshot(tmp_path / "store") == undisturbed
    assert stray_objects(tmp_path / "store") == []


@pytest.mark.long
@pytest.mark.timeout(600)
def test_killed_thirty_times_in_one_populate(tmp_path):
    """Some 1,700 shards, so that there is always something left to be killed at."""
    path = write_parquet(tmp_path / "a.parquet", documents(seed=14, count=4000), 30)
    genesis(*populate_arguments(tmp_path / "peace", path, shard_tokens=500), "--workers", "2")
    schedule = random.Random(20261120)
    arguments = [*populate_arguments(tmp_path / "store", path, shard_tokens=500), "--workers", "2"]
    first_run = list(FIRST_RUN)
    kills = 0
    for attempt in range(60):
        if attempt % 5 == 4:
            kills += run_and_kill(arguments, after_s=schedule.uniform(0.3, 1.2))
        else:
            kills += run_and_kill(arguments, crash_at=first_run.pop(0) if first_run else schedule.choice(ANY_RUN))
        if kills >= 30:
            break
    assert kills >= 30
    genesis(*arguments)
    assert snapshot(tmp_path / "store") == snapshot(tmp_path / "peace")
    assert stray_objects(tmp_path / "store") == []


@pytest.mark.slow
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
