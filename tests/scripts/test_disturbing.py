"""How a swarm is disturbed and judged; and each part of bench_swarm.py runs at the least size."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scripts.swarm_bench.disturbing import KINDS, Disturbance, Disturber, schedule
from scripts.trainer_bench.network import can_make_networks
from tests.support.small_store import text_store

TICK_S = 0.01


@dataclass
class Noted:
    """A victim that notes what becomes of it."""

    name: str
    stage: str
    alive: bool = True
    stopped: bool = False
    heard: list[str] = field(default_factory=list)

    def is_at_work(self) -> bool:
        return self.alive

    def send(self, number: signal.Signals) -> None:
        assert self.alive
        self.stopped = number == signal.SIGSTOP
        self.heard.append(number.name)

    def kill(self) -> None:
        self.alive = False
        self.heard.append("kill")

    def revive(self) -> None:
        self.alive = True
        self.heard.append("revive")


def stages(replicas: int = 2) -> list[Noted]:
    return [Noted(f"{stage}.{number}", stage) for stage in ("head", "tail") for number in range(replicas)]


def carry_out(disturber: Disturber, seconds: float, look: list[tuple[Noted, ...]] | None = None) -> None:
    for number in range(int(seconds / TICK_S)):
        disturber.tick(number * TICK_S)
        if look is not None:
            look.append(tuple(it for it in disturber.victims if it.stopped or not it.alive))


@given(st.integers(0, 1000), st.floats(15.0, 200.0))
def test_a_schedule_is_the_seeds_and_has_as_much_of_each_kind(seed: int, duration_s: float) -> None:
    plan = schedule(seed, duration_s)
    assert plan == schedule(seed, duration_s)
    assert [it.at_s for it in plan] == [5.0 * number for number in range(len(plan))]
    assert plan[-1].at_s + 5.0 <= duration_s
    counts = Counter(it.kind for it in plan)
    assert max(counts.values()) - min(counts[kind] for kind in KINDS) <= 1


@given(st.integers(0, 100))
def test_of_a_stage_one_at_most_suffers_and_in_the_end_nobody(seed: int) -> None:
    victims, seen = stages(), list[tuple[Noted, ...]]()
    disturber = Disturber(schedule(seed, 60.0, every_s=1.0), victims)
    carry_out(disturber, 30.0, seen)
    for suffering in seen:
        assert len({it.stage for it in suffering}) == len(suffering)
    disturber.end()
    assert all(it.alive and not it.stopped for it in victims)


def test_what_nobody_could_bear_is_put_off() -> None:
    victims = stages()
    victims[0].alive = victims[2].alive = False
    disturber = Disturber([Disturbance(0.0, "kill", 1.0, 0.99)], victims)
    carry_out(disturber, 1.0)
    assert (disturber.done, disturber.num_put_off) == ([], 1)
    victims[2].alive = True
    carry_out(disturber, 3.0)
    assert [name for _, name in disturber.done] == ["tail.1"]
    assert victims[3].heard == ["kill", "revive"]
    assert disturber.is_over


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
