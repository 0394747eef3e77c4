"""Schedules that disturb a swarm; and each part of bench_swarm.py runs at the least size."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scripts.swarm_bench.disturbing import KINDS, schedule
from scripts.trainer_bench.network import can_make_networks
from tests.support.small_store import text_store


@given(st.integers(0, 1000), st.floats(15.0, 200.0))
def test_a_schedule_is_the_seeds_and_has_as_much_of_each_kind(seed: int, duration_s: float) -> None:
    plan = schedule(seed, duration_s)
    assert plan == schedule(seed, duration_s)
    assert [it.at_s for it in plan] == [5.0 * number for number in range(len(plan))]
    assert plan[-1].at_s + 5.0 <= duration_s
    counts = Counter(it.kind for it in plan)
    assert max(counts.values()) - min(counts[kind] for kind in KINDS) <= 1


_ROOT = Path(__file__).resolve().parents[2]
_SMALL = ("--pipeline-preset", "tiny", "--pipeline-seq-len", "32", "--micro-batch", "2", "--micro-batches", "3")


def reported(part: str, *options: str, timeout_s: float) -> dict[str, Any]:
    """What one part says in JSON."""
    command = [sys.executable, str(_ROOT / "scripts" / "bench_swarm.py"), part, "--json", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)[part]
    return found


_CALL = ("--call-mb", "1", "--call-turns", "1", "--call-turn-mb", "8")
_CHURN = ("--churn-seeds", "1", "--churn-s", "30", "--churn-live-s", "0")


@pytest.mark.slow
def test_two_parts_run_and_an_unknown_one_is_named() -> None:
    assert all(row["ours_over_swarm"] > 0 for row in reported("churn", *_CHURN, timeout_s=60)["rows"])
    for row in reported("call", *_CALL, timeout_s=110)["rows"]:
        assert len(row["contestants"]) == 5 and all(each["mb_s"] > 0 for each in row["contestants"].values())
    command = [sys.executable, str(_ROOT / "scripts" / "bench_swarm.py"), "speed"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, "unknown part 'speed'; known are call, pipeline" in done.stderr) == (2, True)


@pytest.mark.long
@pytest.mark.timeout(400)
def test_pipeline() -> None:
    options = (*_SMALL, "--pipeline-s", "1", "--store", str(text_store()))
    rows = reported("pipeline", *options, timeout_s=380)["rows"]
    assert {"one process", "gloo, GPipe", "gloo, 1F1B", "ours, hub", "ours, chain"} <= rows.keys()
    assert all(5 < row["loss"] < 8 for row in rows.values())


@pytest.mark.long
@pytest.mark.timeout(400)
@pytest.mark.skipif(bool(can_make_networks()), reason=can_make_networks() or "there are networks")
def test_links() -> None:
    options = ("--links-mbit", "40", "--links-s", "1", "--links-seq-len", "32", "--links-micro-batch", "2")
    (row,) = reported("links", *options, "--store", str(text_store()), timeout_s=380)["rows"]
    assert row["ratio"] > 2
    assert row["fp32"]["bytes_per_token"] > 4 * 128 * 4  # Four times an activation or gradient of tiny.
