"""bench_swarm.py: each part runs at the least size and reports what it is for, whatever the figures."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from scripts.trainer_bench.network import can_make_networks
from tests.support.text_store import text_store

_ROOT = Path(__file__).resolve().parents[2]
_SMALL = ("--pipeline-preset", "tiny", "--pipeline-seq-len", "32", "--micro-batch", "2", "--micro-batches", "3")


def reported(part: str, *options: str, timeout_s: float) -> dict[str, Any]:
    """What one part says in JSON."""
    command = [sys.executable, str(_ROOT / "scripts" / "bench_swarm.py"), part, "--json", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)[part]
    return found


@pytest.mark.slow
def test_churn() -> None:
    rows = reported("churn", "--churn-seeds", "1", "--churn-s", "30", "--churn-live-s", "0", timeout_s=60)["rows"]
    assert all(row["ours_over_swarm"] > 0 for row in rows)


@pytest.mark.slow
def test_an_unknown_part_is_named() -> None:
    command = [sys.executable, str(_ROOT / "scripts" / "bench_swarm.py"), "speed"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert "unknown part 'speed'; known are call, pipeline" in done.stderr


@pytest.mark.slow
def test_call() -> None:
    rows = reported("call", "--call-mb", "1", "--call-turns", "1", "--call-turn-mb", "8", timeout_s=110)["rows"]
    assert [row["in_flight"] for row in rows] == [1, 4]
    for row in rows:
        assert list(row["contestants"]) == [
            "ours, TLS",
            "ours, plain",
            "gRPC alone, TLS",
            "gRPC alone, plain",
            "hivemind",
        ]
        assert all(each["mb_s"] > 0 for each in row["contestants"].values())


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
