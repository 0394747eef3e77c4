"""Micro-batches that workers pass on among themselves; whatever goes wrong, the account adds up."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from tests.support.event_loop import on_event_loop
from tests.support.toy_drive import FAST, ONE_EACH, STAGES, TWO_EACH, driving, until
from tests.support.toy_stage import (
    POSITIONS,
    ROWS,
    Fault,
    ToyStage,
    count_and_die,
    die,
    distort,
    fail_after,
    lose_answer,
    loss_of,
    refuse,
    say_nothing,
)
from trainer.pipeline.driver import DriverConfig
from trainer.pipeline.protocol.messages import CHAIN
from trainer.pipeline.protocol.tensors import TensorAnswer

CHAINED = DriverConfig(
    routing="chain",
    audit_every=0,
    max_in_flight=FAST.max_in_flight,
    request_timeout_s=0.2,
    unclear_s=2.0,
    ban_s=FAST.ban_s,
    max_ban_s=FAST.max_ban_s,
    refresh_s=FAST.refresh_s,
    drain_s=FAST.drain_s,
)


@pytest.mark.slow
@on_event_loop
async def test_undisturbed_every_stage_counts_everything_once() -> None:
    async with driving(ONE_EACH, 10, CHAINED) as drive:
        await drive.driver.run()
        assert drive.work.fates() == ["done"] * 10
        assert all(len(toy.counted) == 10 for toy in drive.swarm.all)
        for result in drive.results:
            number = int(result.micro_batch.rpartition("r")[2]) // ROWS
            assert result.outcome.loss_sum == pytest.approx(loss_of(number, STAGES))
            assert len(result.hops) == 1
        settled = next(iter(drive.work.settled.values()))
        assert sorted(credit.stage for credit in settled.credits) == sorted(STAGES)
        assert all(credit.applied_number >= 1 for credit in settled.credits)


@pytest.mark.slow
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("reason", ["busy", "expired", "nonfinite"])
def test_a_refusal_anywhere_on_the_way_costs_nothing(stage: str, reason: str) -> None:
    @on_event_loop
    async def test() -> None:
        async with driving(TWO_EACH, 4, CHAINED) as drive:
            drive.swarm.at(stage).faults[CHAIN].append(refuse(reason))
            await drive.driver.run()
            assert drive.work.fates() == ["done"] * 4

    test()


UNCLEAR: list[Fault] = [say_nothing, lose_answer, fail_after, count_and_die, die]


@pytest.mark.slow
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("fault", UNCLEAR, ids=lambda fault: fault.__name__)
def test_what_may_have_been_counted_is_cleared_up_exactly(stage: str, fault: Fault) -> None:
    @on_event_loop
    async def test() -> None:
        async with driving(TWO_EACH, 4, CHAINED) as drive:
            drive.swarm.at(stage).faults[CHAIN].append(fault)
            await drive.driver.run()
            assert drive.work.fates() == ["done"] * 4

    test()


@pytest.mark.slow
@on_event_loop
async def test_a_chain_with_one_worker_a_stage_is_tried_again_by_the_same_workers() -> None:
    async with driving(ONE_EACH, 3, CHAINED) as drive:
        for toy in drive.swarm.all:
            toy.faults[CHAIN].append(lose_answer)
        await drive.driver.run()
        assert drive.work.fates() == ["done"] * 3


@pytest.mark.slow
@on_event_loop
async def test_two_that_each_have_the_place_the_other_one_needs_go_on() -> None:
    """The first loses its body, the second its head: what is left of both routes is one worker a stage."""
    config = replace(CHAINED, max_in_flight=2, max_in_flight_per_worker=1, ban_s=60.0, max_ban_s=60.0)
    async with driving({"head": 2, "body-1": 2, "tail": 2}, 2, config) as drive:
        drive.swarm.at("body-1", 0).faults[CHAIN].append(die)
        drive.swarm.at("head", 1).faults[CHAIN].append(die)
        async with asyncio.timeout(20):
            await drive.driver.run()
        assert drive.work.fates() == ["done"] * 2


@pytest.mark.slow
@on_event_loop
async def test_a_worker_that_hangs_gets_nothing_else_until_it_answers_what_it_has() -> None:
    config = replace(CHAINED, request_timeout_s=0.5, unclear_s=60.0, ban_s=60.0, max_ban_s=60.0)
    async with driving({"head": 1, "body-1": 1, "tail": 2}, 30, config) as drive:
        tail = drive.swarm.at("tail")
        assert tail.worker is not None
        tail.stopped = asyncio.Event()
        running = asyncio.create_task(drive.driver.run())
        async with asyncio.timeout(30):
            await until(lambda: drive.driver.status().done >= 20)
            status = drive.driver.status()
            assert tail.worker.key in status.stages[-1].banned
            assert status.in_flight <= 2 * config.max_in_flight
            tail.stopped.set()
            await running
        assert drive.work.fates() == ["done"] * 30
        assert not drive.driver.status().stages[-1].banned


@pytest.mark.slow
@on_event_loop
async def test_a_worker_behind_the_first_is_killed_and_comes_back() -> None:
    async with driving(ONE_EACH, 4, CHAINED) as drive:
        body = drive.swarm.at("body-1")
        body.faults[CHAIN].append(count_and_die)
        running = asyncio.create_task(drive.driver.run())
        await until(lambda: not body.alive)
        await body.kill()
        await body.start()
        await running
        assert drive.work.fates() == ["done"] * 4


@pytest.mark.slow
@pytest.mark.parametrize("stage", STAGES)
def test_garbage_in_a_chain_is_contained(stage: str) -> None:
    @on_event_loop
    async def test() -> None:
        async with driving(TWO_EACH, 8, CHAINED) as drive:
            liar = drive.swarm.at(stage)
            liar.faults[CHAIN].extend([distort(lambda tensor: tensor.half())] * 3)
            await drive.driver.run()
            assert "open" not in drive.work.fates()
            assert drive.work.fates().count("done") >= 4

    test()


@pytest.mark.slow
@on_event_loop
async def test_a_head_that_claims_what_the_others_deny_is_found_out() -> None:
    async with driving(TWO_EACH, 6, replace(CHAINED, ban_s=20.0, max_ban_s=20.0)) as drive:
        liar = drive.swarm.at("head")

        async def claim(stage: ToyStage, key: str, _work: object) -> object:
            return garbled_claim(stage, key)

        liar.faults[CHAIN].extend([claim] * 50)
        await drive.driver.run()
        assert liar.worker is not None
        status = drive.driver.status()
        assert all(reason == "body-1: contradicted" for reason in status.lost_by)
        assert status.lost == 1  # It is tried with one before it gets more.
        assert status.done + status.lost == 6


def garbled_claim(stage: ToyStage, key: str) -> object:
    answer = stage.answer_to(key, None)
    claimed = {"applied": STAGES, "loss_sum": 1.0, "num_tokens": ROWS * POSITIONS}
    return TensorAnswer(answer.body.model_copy(update=claimed), answer.tensors)
