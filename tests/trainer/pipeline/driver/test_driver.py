"""Leases that run out, stages without workers, stopping, steps, and what the driver says of itself."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from tests.support.toy_stage import (
    FAST,
    ONE_EACH,
    POSITIONS,
    ROWS,
    SILENCE,
    STAGES,
    TWO_EACH,
    driving,
    lose_answer,
    refuse,
    say_nothing,
    until,
)
from trainer.errors import TrainerUsageError
from trainer.pipeline.driver import DriverConfig
from trainer.pipeline.protocol.messages import BACKWARD, FORWARD, TAIL
from trainer.pipeline.protocol.work import boottime_s

TOKENS = ROWS * POSITIONS


@pytest.mark.slow
@pytest.mark.parametrize("routing", ["hub", "chain"])
async def test_an_empty_stage_stalls_everything_and_is_named(routing: str, caplog: pytest.LogCaptureFixture) -> None:
    async with driving(ONE_EACH | {"body-1": 0}, 3, replace(FAST, routing=routing)) as drive:
        running = asyncio.create_task(drive.driver.run())
        await until(lambda: drive.driver.status().stages[1].stalled_s > 0.05)
        status = drive.driver.status()
        assert status.stalls["head"] == 0
        assert status.stalls["body-1"] > 0
        assert status.in_flight == 3
        await drive.swarm.join("body-1")
        await running
        assert drive.work.fates() == ["done"] * 3
    said = [record.message for record in caplog.records if "has no worker" in record.message]
    assert said == ["stage body-1 has no worker to send to; everything waits for one"]


@pytest.mark.slow
@pytest.mark.parametrize("routing", ["hub", "chain"])
@pytest.mark.parametrize("stage", STAGES)
async def test_others_go_on_while_some_wait_for_a_worker_that_is_stopped(stage: str, routing: str) -> None:
    """It holds as many as may be under way, gets nothing else, and is asked again for long: nothing of it is lost."""
    config = replace(FAST, routing=routing, max_in_flight=1, unclear_s=60.0, ban_s=60.0, max_ban_s=60.0, **SILENCE)
    async with driving(TWO_EACH, 40, config) as drive:
        stopped = drive.swarm.at(stage)
        for toy in drive.swarm.all:
            toy.delay_s = 0.005

        def banned() -> set[str]:
            return {key for pool in drive.driver.status().stages for key in pool.banned}

        running = asyncio.create_task(drive.driver.run())
        await until(lambda: drive.driver.status().done >= 8)
        stopped.stopped = asyncio.Event()
        await until(lambda: drive.driver.status().done >= 40 - 3 * config.max_in_flight)
        assert stopped.worker.key in banned()
        stopped.stopped.set()
        await running
        assert drive.work.fates() == ["done"] * 40
        if routing == "chain" or stage == "tail":  # A forward pass is repeated elsewhere, and not waited for.
            assert stopped.worker.key not in banned()


@pytest.mark.slow
@pytest.mark.parametrize("is_counted", [False, True])
async def test_when_a_lease_runs_out_what_some_have_counted_is_left_and_the_rest_handed_back(is_counted: bool) -> None:
    async with driving(ONE_EACH | {"body-1": int(is_counted)}, 1, lease_s=2.0) as drive:
        bodies = drive.swarm.workers_by_stage["body-1"]
        for body in bodies:
            body.faults[BACKWARD].extend([lose_answer] * 20)
        await drive.driver.run()
        assert not drive.work.settled
        assert drive.work.handed_back == ([] if is_counted else drive.work.given)
        assert drive.driver.status().left == int(is_counted)
        assert {result.outcome.reason for result in drive.results} <= {"lease", "unclear"}
        asked = [list(body.asked) for body in bodies]
        await asyncio.sleep(0.1)
        assert [body.asked for body in bodies] == asked, "nothing of it is sent any more"


@pytest.mark.slow
async def test_a_renewed_lease_goes_on() -> None:
    async with driving(ONE_EACH, 1, lease_s=2.0) as drive:
        drive.swarm.at("body-1").faults[FORWARD].append(refuse("busy"))
        drive.swarm.announced.discard("tail.0.32")
        running = asyncio.create_task(drive.driver.run())
        await until(lambda: bool(drive.work.terms))
        was_s, drive.work.terms[0].send_before_s = drive.work.terms[0].send_before_s, boottime_s() + 60.0
        await until(lambda: boottime_s() > was_s)
        drive.swarm.announced.add("tail.0.32")
        await running
        assert drive.work.fates() == ["done"]


@pytest.mark.slow
@pytest.mark.parametrize("is_synchronous", [False, True])
async def test_stop_lets_what_is_under_way_end_and_does_not_wait_for_a_step(is_synchronous: bool) -> None:
    config = replace(FAST, synchronous=is_synchronous, request_timeout_s=30.0)
    async with driving(ONE_EACH, 100, config, target_tokens=2 * TOKENS) as drive:
        for toy in drive.swarm.all:
            toy.delay_s = 0.01
        running = asyncio.create_task(drive.driver.run())
        await until(lambda: drive.driver.status().done >= 2)
        drive.driver.stop()
        await running
        assert len(drive.work.given) < (3 if is_synchronous else 100)
        assert set(drive.work.fates()) == {"done"}


@pytest.mark.parametrize(("stage", "method", "fate"), [("head", FORWARD, "handed-back"), ("tail", TAIL, "left")])
async def test_what_does_not_end_in_time_is_handed_back_or_left(stage: str, method: str, fate: str) -> None:
    async with driving(ONE_EACH, 1, replace(FAST, drain_s=0.1, request_timeout_s=30.0)) as drive:
        drive.swarm.at(stage).faults[method].append(lose_answer if fate == "left" else say_nothing)
        running = asyncio.create_task(drive.driver.run())
        await until(lambda: any(asked == method for asked, _ in drive.swarm.at(stage).asked))
        drive.driver.stop()
        await running
        assert [result.outcome.fate for result in drive.results] == [fate]
        assert drive.driver.status().in_flight == 0


@pytest.mark.slow
@pytest.mark.parametrize(("max_in_flight", "routing"), [(1, "hub"), (8, "hub"), (3, "chain")])
async def test_synchronous_nothing_of_a_step_is_sent_before_the_last_is_taken(max_in_flight: int, routing: str) -> None:
    config = replace(FAST, synchronous=True, max_in_flight=max_in_flight, routing=routing)
    async with driving(ONE_EACH, 12, config, target_tokens=4 * TOKENS) as drive:
        for number, toy in enumerate(drive.swarm.all):
            toy.step_every, toy.step_delay_s = 4, 0.02 * (1 + number)
        await drive.driver.run()
        versions = [{hop.version for hop in result.hops} for result in drive.results]
        assert versions == [{number // 4} for number in range(12)]
        for toy in drive.swarm.all:
            assert [answer.body.version for answer in toy.counted.values()] == [number // 4 for number in range(12)]


@pytest.mark.slow
async def test_synchronous_what_is_not_counted_is_made_up_for_within_the_step() -> None:
    config = replace(FAST, synchronous=True, max_in_flight=2, max_attempts=1, request_timeout_s=10.0)
    async with driving(ONE_EACH, 5, config, target_tokens=2 * TOKENS) as drive:
        for toy in drive.swarm.all:
            toy.step_every = 2
        drive.swarm.at("head").faults[FORWARD].append(refuse("malformed"))
        await drive.driver.run()
        done = [result for result in drive.results if result.outcome.fate == "done"]
        assert len(done) == 4
        assert [result.hops[0].version for result in done] == [0, 0, 1, 1]


@pytest.mark.slow
async def test_what_goes_wrong_with_the_account_ends_the_run() -> None:
    async with driving(ONE_EACH, 3) as drive:

        def settle(_settlement: object) -> None:
            raise OSError("the disk is full")

        drive.work.settle = settle  # type: ignore[method-assign,assignment]
        with pytest.raises(OSError, match="the disk is full"):
            await drive.driver.run()


@pytest.mark.parametrize(
    ("field", "value"),
    [("max_in_flight", 0), ("ban_s", 0.0), ("unclear_s", float("nan")), ("routing", "star"), ("max_ban_s", 1.0)],
)
def test_options_out_of_range_are_named(field: str, value: object) -> None:
    with pytest.raises(TrainerUsageError, match=f"driver.{field}"):
        DriverConfig(**{field: value})  # type: ignore[arg-type]
