"""Micro-batches through stages at real endpoints, one hop at a time; whatever goes wrong, the account adds up."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
import torch

from tests.support.event_loop import on_event_loop
from tests.support.toy_drive import FAST, ONE_EACH, STAGES, TWO_EACH, driving, until
from tests.support.toy_stage import (
    POSITIONS,
    ROWS,
    Fault,
    count_and_die,
    die,
    distort,
    fail_after,
    garble,
    lose_answer,
    loss_of,
    refuse,
    say_nothing,
)
from trainer.pipeline.driver import DriverConfig
from trainer.pipeline.driver.failure_detector import DOUBTS
from trainer.pipeline.protocol.messages import BACKWARD, FORWARD, TAIL


@pytest.mark.slow
@on_event_loop
async def test_undisturbed_every_stage_counts_everything_once() -> None:
    async with driving(ONE_EACH, 10) as drive:
        await drive.driver.run()
        assert drive.work.fates() == ["done"] * 10
        assert all(len(toy.counted) == 10 for toy in drive.swarm.all)
        for result in drive.results:
            number = int(result.micro_batch.rpartition("r")[2]) // ROWS
            assert result.outcome.loss_sum == pytest.approx(loss_of(number, STAGES))
            assert result.outcome.num_tokens == ROWS * POSITIONS
            assert [hop.stage for hop in result.hops] == ["head", "body-1", "tail", "body-1", "head"]
        settled = next(iter(drive.work.settled.values()))
        assert sorted(credit.stage for credit in settled.credits) == sorted(STAGES)
        assert all(credit.applied_number >= 1 for credit in settled.credits)


@pytest.mark.slow
@on_event_loop
async def test_two_workers_share_a_stage() -> None:
    async with driving(TWO_EACH, 20) as drive:
        for toy in drive.swarm.all:
            toy.delay_s = 0.01
        await drive.driver.run()
        assert drive.work.fates() == ["done"] * 20
        assert all(toy.counted for toy in drive.swarm.all)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "reason"),
    [
        *((FORWARD, reason) for reason in ("busy", "stopping", "nonfinite", "stage", "malformed")),
        *((TAIL, reason) for reason in ("busy", "expired", "recipient")),
        *((BACKWARD, reason) for reason in ("busy", "stale", "tainted", "malformed")),
    ],
)
def test_a_refusal_goes_elsewhere_and_costs_nothing(method: str, reason: str) -> None:
    @on_event_loop
    async def test() -> None:
        async with driving(TWO_EACH, 4) as drive:
            for toy in drive.swarm.all:
                if toy.number == 32:
                    toy.faults[method].append(refuse(reason))
            await drive.driver.run()
            assert drive.work.fates() == ["done"] * 4
            assert drive.driver.status().failures.get(reason, 0) >= 1

    test()


@on_event_loop
async def test_a_worker_that_has_dropped_its_input_is_sent_it() -> None:
    async with driving(ONE_EACH, 1) as drive:
        body = drive.swarm.at("body-1")
        body.faults[BACKWARD].append(refuse("no-input"))
        await drive.driver.run()
        assert drive.work.fates() == ["done"]
        assert [method for method, _ in body.asked] == [FORWARD, BACKWARD, BACKWARD]
        assert drive.driver.status().failures == {}


@on_event_loop
async def test_counted_but_the_answer_gone_is_lost() -> None:
    async with driving(TWO_EACH, 1) as drive:
        for body in drive.swarm.workers_by_stage["body-1"]:
            body.faults[BACKWARD].append(refuse("already-applied"))
        await drive.driver.run()
        settled = drive.work.settled["e0.s1.r0"]
        assert (settled.outcome, settled.lost_at, settled.reason) == ("lost", "body-1", "answer-gone")


@pytest.mark.slow
@pytest.mark.parametrize("method", [TAIL, BACKWARD])
@pytest.mark.parametrize("reason", ["already-applied", "stale"])
def test_a_worker_that_refuses_to_count_anything_is_left_out(method: str, reason: str) -> None:
    @on_event_loop
    async def test() -> None:
        config = replace(FAST, ban_s=60.0, max_ban_s=60.0, max_in_flight=4)
        async with driving(TWO_EACH, 60, config) as drive:
            liar = drive.swarm.at("tail" if method == TAIL else "body-1")
            liar.faults[method].extend([refuse(reason)] * 1000)
            for toy in drive.swarm.all:
                toy.delay_s = 0.002
            await drive.driver.run()
            assert liar.worker is not None
            refusals = drive.driver.status().failures[reason]
            assert refusals <= DOUBTS + config.max_in_flight  # Those that were under way when it was found out.
            assert drive.work.fates().count("lost") <= (config.max_in_flight if reason == "already-applied" else 0)

    test()


UNCLEAR: list[Fault] = [say_nothing, lose_answer, fail_after, count_and_die, die]


@pytest.mark.parametrize("method", [TAIL, BACKWARD])
@pytest.mark.parametrize("fault", UNCLEAR, ids=lambda fault: fault.__name__)
def test_what_may_have_been_counted_is_cleared_up_exactly(method: str, fault: Fault) -> None:
    @on_event_loop
    async def test() -> None:
        async with driving(TWO_EACH, 6) as drive:
            stage = "tail" if method == TAIL else "body-1"
            drive.swarm.at(stage).faults[method].append(fault)
            await drive.driver.run()
            assert drive.work.fates() == ["done"] * 6
            assert drive.driver.status().failures

    test()


@on_event_loop
async def test_an_unclear_outcome_is_asked_again_at_the_same_worker() -> None:
    async with driving(TWO_EACH, 1) as drive:
        for toy in drive.swarm.workers_by_stage["body-1"]:
            toy.faults[BACKWARD].append(lose_answer)
        await drive.driver.run()
        asked = [toy for toy in drive.swarm.workers_by_stage["body-1"] if (BACKWARD, "e0.s1.r0") in toy.asked]
        assert len(asked) == 1
        assert asked[0].asked.count((BACKWARD, "e0.s1.r0")) == 2
        assert drive.work.fates() == ["done"]


@pytest.mark.slow
@on_event_loop
async def test_a_forward_pass_whose_worker_dies_is_done_elsewhere() -> None:
    async with driving(TWO_EACH, 6) as drive:
        drive.swarm.at("body-1").faults[FORWARD].append(die)
        await drive.driver.run()
        assert drive.work.fates() == ["done"] * 6


@on_event_loop
async def test_a_worker_dies_between_forward_and_backward() -> None:
    async with driving(TWO_EACH, 4, FAST) as drive:
        tails = drive.swarm.workers_by_stage["tail"]
        for tail in tails:
            tail.delay_s = 0.1
        running = asyncio.create_task(drive.driver.run())
        first = drive.swarm.at("head")
        await until(lambda: any(method == FORWARD for method, _ in first.asked) and any(t.asked for t in tails))
        await first.kill()
        await running
        assert drive.work.fates() == ["done"] * 4
        assert len(drive.swarm.at("head", 1).counted) == 4


@on_event_loop
async def test_another_incarnation_at_the_same_address_counts_anew() -> None:
    async with driving(ONE_EACH, 1) as drive:
        head = drive.swarm.at("head")
        head.faults[BACKWARD].append(count_and_die)
        former = head.incarnation
        running = asyncio.create_task(drive.driver.run())
        await until(lambda: not head.alive)
        await head.kill()
        await head.start()
        await running
        assert head.incarnation != former
        assert drive.work.fates() == ["done"]
        assert {credit.stage: credit.incarnation for credit in drive.work.settled["e0.s1.r0"].credits}["head"] == (
            head.incarnation
        )


@pytest.mark.slow
@on_event_loop
async def test_what_stays_unclear_is_lost_and_says_where() -> None:
    config = DriverConfig(
        max_in_flight=2, request_timeout_s=0.1, unclear_s=0.4, ban_s=0.2, max_ban_s=1.0, refresh_s=0.02
    )
    async with driving(ONE_EACH, 1, config) as drive:
        body = drive.swarm.at("body-1")
        body.faults[BACKWARD].extend([lose_answer] * 50)

        async def hold_back(_request: object) -> None:
            await asyncio.sleep(60)

        body._applied = hold_back
        await drive.swarm.at("body-1").kill()
        await body.start()
        await drive.driver.run()
        settled = drive.work.settled["e0.s1.r0"]
        assert (settled.outcome, settled.lost_at, settled.reason) == ("lost", "body-1", "unclear")
        assert [credit.stage for credit in settled.credits] == ["tail"]
        assert drive.driver.status().lost_by == {"body-1: unclear": 1}


MALFORMED: dict[str, Fault] = {
    "shape": distort(lambda tensor: tensor[:, :1]),
    "dtype": distort(lambda tensor: tensor.double()),
    "nan": distort(lambda tensor: torch.full_like(tensor, float("nan"))),
    "infinite": distort(lambda tensor: torch.full_like(tensor, float("inf"))),
    "garbage quickly": distort(lambda tensor: tensor.half(), count=False),
    "other rows": garble(num_rows=77),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "name"),
    [
        *((FORWARD, name) for name in MALFORMED),
        *((BACKWARD, name) for name in ("shape", "garbage quickly")),
        *((TAIL, name) for name in ("nan", "dtype")),
    ],
)
def test_a_worker_that_answers_nonsense_is_banned_for_long_and_the_rest_goes_on(method: str, name: str) -> None:
    @on_event_loop
    async def test() -> None:
        async with driving(TWO_EACH, 8) as drive:
            stage = "tail" if method == TAIL else "body-1"
            liar = drive.swarm.at(stage)
            liar.faults[method].extend([MALFORMED[name]] * 1000)
            await drive.driver.run()
            fates = drive.work.fates()
            assert "open" not in fates
            # What the liar counted and gave no usable answer to is lost, before it was found out; nothing after that.
            assert fates.count("lost") <= FAST.max_in_flight
            assert fates.count("done") >= 4
            assert liar.worker is not None
            status = {status.stage: status for status in drive.driver.status().stages}[stage]
            assert status.banned[liar.worker.key] > 3000
            assert status.names[liar.worker.key] == liar.worker.uid

    test()


TAIL_LIES = {
    "no loss": garble(loss_sum=None),
    "negative loss": garble(loss_sum=-1.0),
    "other labels": garble(num_tokens=5),
    "counted elsewhere": garble(applied=("head",)),
    "counted nowhere": garble(applied=()),
    "number 0": garble(applied_number=0),
}


@pytest.mark.parametrize("name", TAIL_LIES)
def test_a_tail_that_contradicts_itself_is_found_out(name: str) -> None:
    @on_event_loop
    async def test() -> None:
        async with driving(TWO_EACH, 1) as drive:
            for tail in drive.swarm.workers_by_stage["tail"]:
                tail.faults[TAIL].append(TAIL_LIES[name])
            await drive.driver.run()
            # It was counted where it was asked, and would be repeated as it was first answered.
            assert drive.driver.status().failures == {"malformed-answer": 1}
            assert drive.work.fates() == ["done"]

    test()
