"""Micro-batches through stages at real endpoints, by hub and by chain; whatever goes wrong, the account adds up."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from contextlib import AsyncExitStack
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter
from torch import Tensor

from tests.support.attacks.shapes import NOT_ONLY_JSON, Liar
from tests.support.rpc_node import RUN_ID, fast_config
from tests.support.toy_stage import (
    FAST,
    ONE_EACH,
    POSITIONS,
    ROWS,
    SILENCE,
    STAGES,
    TWO_EACH,
    Fault,
    ToySwarm,
    count_and_die,
    die,
    distort,
    driving,
    fail_after,
    garble,
    lose_answer,
    loss_of,
    refuse,
    say_nothing,
)
from tests.support.waiting import until
from trainer.errors import RefusedError
from trainer.network.rpc import Endpoint, Identity, Reason
from trainer.pipeline.driver import DriverConfig
from trainer.pipeline.driver.failure_detector import DOUBTS
from trainer.pipeline.driver.results import verdict_of
from trainer.pipeline.driver.workers import StageWorker
from trainer.pipeline.protocol.messages import BACKWARD, CHAIN, FORWARD, TAIL
from trainer.pipeline.protocol.work import LossReason

CHAINED = replace(FAST, routing="chain")
BAN_S = 900.0
FIRST = "e0.s1.r0"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "hops"),
    [(FAST, ["head", "body-1", "tail", "body-1", "head"]), (CHAINED, ["head"])],
    ids=["hub", "chain"],
)
async def test_undisturbed_every_stage_counts_everything_once(config: DriverConfig, hops: list[str]) -> None:
    async with driving(ONE_EACH, 10, config) as drive:
        await drive.all_done()
        assert all(len(toy.counted) == 10 for toy in drive.swarm.all)
        for result in drive.results:
            number = int(result.micro_batch.rpartition("r")[2]) // ROWS
            assert result.outcome.loss_sum == pytest.approx(loss_of(number, STAGES))
            assert result.outcome.num_tokens == ROWS * POSITIONS
            assert [hop.stage for hop in result.hops] == hops


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "stages", "method", "reason"),
    [
        *((FAST, STAGES, FORWARD, reason) for reason in ("busy", "nonfinite", "malformed")),
        *((FAST, STAGES, TAIL, reason) for reason in ("stopping", "expired", "recipient")),
        *((FAST, STAGES, BACKWARD, reason) for reason in ("stale", "tainted", "stage")),
        *((CHAINED, (stage,), CHAIN, reason) for stage in STAGES for reason in ("busy", "nonfinite")),
    ],
)
async def test_a_refusal_goes_elsewhere_and_costs_nothing(config, stages, method, reason):
    async with driving(TWO_EACH, 4, config) as drive:
        for stage in stages:
            drive.swarm.at(stage).faults[method].append(refuse(reason))
        await drive.all_done()
        assert config is CHAINED or drive.driver.status().failures[reason] >= 1


UNCLEAR: list[Fault] = [say_nothing, lose_answer, fail_after, count_and_die, die]


@pytest.mark.parametrize(
    ("config", "stage", "method"),
    [
        (FAST, "tail", TAIL),
        (FAST, "body-1", BACKWARD),
        pytest.param(FAST, "body-1", FORWARD, marks=pytest.mark.slow),
        *(pytest.param(CHAINED, stage, CHAIN, marks=pytest.mark.slow) for stage in STAGES),
    ],
)
@pytest.mark.parametrize("fault", UNCLEAR, ids=lambda fault: fault.__name__)
async def test_what_may_have_been_counted_is_resolved_exactly(config, stage, method, fault):
    async with driving(TWO_EACH, 6, replace(config, **SILENCE)) as drive:
        drive.swarm.at(stage).faults[method].append(fault)
        await drive.all_done()
        assert drive.driver.status().failures


FAULTS: dict[str, Fault] = {
    "refuse": refuse("expired"),
    "busy": refuse("busy"),
    "nonfinite": refuse("nonfinite"),
    "already": refuse("already-applied"),
    "say nothing": say_nothing,
    "lose answer": lose_answer,
    "fail after": fail_after,
    "die": die,
    "count and die": count_and_die,
    "shape": distort(lambda tensor: tensor[:1]),
    "nan": distort(lambda tensor: torch.full_like(tensor, float("nan"))),
    "rows": garble(num_rows=3),
}
HARMLESS = {"refuse", "busy", "nonfinite", "lose answer", "say nothing", "fail after", "die", "count and die"}
"""None of them makes a micro-batch be lost, as long as there is another worker."""


def spread(swarm: ToySwarm, draw: random.Random, faults: list[str]) -> None:
    """Gives each fault to a worker drawn at random."""
    for name in faults:
        toy = draw.choice(swarm.all)
        for method in {"head": (FORWARD, BACKWARD), "tail": (TAIL,)}.get(toy.stage, (FORWARD, BACKWARD)):
            toy.faults[method].append(FAULTS[name] if draw.random() < 0.7 else garble())
        toy.faults[CHAIN].append(FAULTS[name])


async def kill_and_revive(swarm: ToySwarm, draw: random.Random) -> None:
    """Kills workers, and lets come back those that have died, until it is cancelled."""
    while True:
        await asyncio.sleep(draw.uniform(0.01, 0.1))
        for toy in swarm.all:
            if not toy.alive:
                await toy.kill()
                await toy.start()
        if draw.random() < 0.1:
            draw.choice(swarm.all).begin_to_die()


@pytest.mark.slow
@settings(
    max_examples=12,
    deadline=None,
    derandomize=True,
    phases=[Phase.generate],
    suppress_health_check=[HealthCheck.too_slow],
)
@given(
    seed=st.integers(0, 2**32),
    routing=st.sampled_from(["hub", "chain"]),
    faults=st.lists(st.sampled_from(sorted(FAULTS)), min_size=3, max_size=8),
    num=st.sampled_from([6, 10]),
)
def test_the_account_adds_up_whatever_workers_do_and_whenever(seed, routing, faults, num):
    async def test() -> None:
        config = replace(FAST, routing=routing, max_ban_s=0.3, request_timeout_s=0.15, max_attempts=20, unclear_s=9.0)
        async with asyncio.timeout(60), driving(TWO_EACH, num, config, lease_s=3.0) as drive:
            draw = random.Random(seed)
            spread(drive.swarm, draw, faults)
            chaos = asyncio.create_task(kill_and_revive(drive.swarm, draw))
            try:
                await drive.driver.run()
            finally:
                chaos.cancel()
                await asyncio.gather(chaos, return_exceptions=True)
            status = drive.driver.status()
            assert status.done + status.lost + status.handed_back + status.left == num
            assert status.done == drive.work.fates().count("done")
            assert status.lost == drive.work.fates().count("lost") == sum(status.lost_by.values())
            if HARMLESS.issuperset(faults):
                assert status.lost == 0
            for settled in drive.work.settled.values():
                stages = sorted(credit.stage for credit in settled.credits)
                assert (stages == sorted(STAGES)) == (settled.outcome == "done")
                assert (settled.lost_at in STAGES) == (settled.outcome == "lost")

    asyncio.run(test())  # An endpoint that is stopped in the midst of a call is not as tidy as a process killed.


async def test_a_worker_that_has_dropped_its_input_is_sent_it() -> None:
    async with driving(ONE_EACH, 1) as drive:
        body = drive.swarm.at("body-1")
        body.faults[BACKWARD].append(refuse("no-input"))
        await drive.all_done()
        assert [method for method, _ in body.asked] == [FORWARD, BACKWARD, BACKWARD]
        assert drive.driver.status().failures == {}


@pytest.mark.parametrize(
    ("method", "refusal", "reason"), [(BACKWARD, "already-applied", "answer-gone"), (FORWARD, "malformed", "malformed")]
)
async def test_what_is_lost_says_where_and_why(method: str, refusal: str, reason: str) -> None:
    async with driving(TWO_EACH, 1) as drive:
        for body in drive.swarm.workers_by_stage["body-1"]:
            body.faults[method].extend([refuse(refusal)] * 9)
        await drive.driver.run()
        settled = drive.work.settled[FIRST]
        assert (settled.outcome, settled.lost_at, settled.reason) == ("lost", "body-1", reason)


@pytest.mark.slow
@pytest.mark.parametrize("method", [TAIL, BACKWARD])
@pytest.mark.parametrize("reason", ["already-applied", "stale"])
async def test_a_worker_that_refuses_to_count_anything_is_left_out(method: str, reason: str) -> None:
    config = replace(FAST, ban_s=60.0, max_ban_s=60.0)
    async with driving(TWO_EACH, 60, config) as drive:
        liar = drive.swarm.at("tail" if method == TAIL else "body-1")
        liar.faults[method].extend([refuse(reason)] * 1000)
        for toy in drive.swarm.all:
            toy.delay_s = 0.002
        await drive.driver.run()
        refusals = drive.driver.status().failures[reason]
        assert refusals <= DOUBTS + config.max_in_flight  # Those that were under way when it was found out.
        assert drive.work.fates().count("lost") <= (config.max_in_flight if reason == "already-applied" else 0)


@pytest.mark.slow
async def test_what_stays_unclear_is_lost_and_says_where() -> None:
    async with driving(ONE_EACH, 1, replace(FAST, request_timeout_s=0.5, unclear_s=1.0)) as drive:
        body = drive.swarm.at("body-1")
        body.faults[BACKWARD].extend([lose_answer] * 50)
        body._applied = say_nothing
        await body.kill()
        await body.start()
        await drive.driver.run()
        settled = drive.work.settled[FIRST]
        assert (settled.outcome, settled.lost_at, settled.reason) == ("lost", "body-1", "unclear")
        assert [credit.stage for credit in settled.credits] == ["tail"]
        assert drive.driver.status().lost_by == {"body-1: unclear": 1}


TAIL_LIES = {
    "no loss": garble(loss_sum=None),
    "negative loss": garble(loss_sum=-1.0),
    "other labels": garble(num_tokens=5),
    "counted elsewhere": garble(applied=("head",)),
    "counted nowhere": garble(applied=()),
    "number 0": garble(applied_number=0),
}


@pytest.mark.parametrize("name", TAIL_LIES)
async def test_a_tail_that_contradicts_itself_is_found_out(name: str) -> None:
    async with driving(TWO_EACH, 1) as drive:
        for tail in drive.swarm.workers_by_stage["tail"]:
            tail.faults[TAIL].append(TAIL_LIES[name])
        await drive.all_done()
        # It was counted where it was asked, and would be repeated as it was first answered.
        assert drive.driver.status().failures == {"malformed-answer": 1}
        assert min(drive.driver.status().stages[-1].banned.values()) > BAN_S


@pytest.mark.slow
async def test_two_that_each_have_the_place_the_other_one_needs_go_on() -> None:
    """The first loses its body, the second its head: what is left of both routes is one worker a stage."""
    config = replace(CHAINED, max_in_flight=2, max_in_flight_per_worker=1, ban_s=60.0, max_ban_s=60.0)
    async with driving({"head": 2, "body-1": 2, "tail": 2}, 2, config) as drive:
        drive.swarm.at("body-1", 0).faults[CHAIN].append(die)
        drive.swarm.at("head", 1).faults[CHAIN].append(die)
        await drive.all_done()


@pytest.mark.slow
async def test_what_nobody_foresaw_in_an_answer_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    failing = iter([True])

    def unforeseen(_tensor: Tensor) -> bool:
        if next(failing, False):
            raise RuntimeError("expected a storage, found none")
        return True

    monkeypatch.setattr("trainer.pipeline.driver.stage_caller.all_finite", unforeseen)
    async with driving(TWO_EACH, 4) as drive:
        await drive.all_done()
        assert drive.driver.status().failures["malformed-answer"] == 1


@pytest.mark.slow
async def test_liars_of_every_kind_end_no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """The attack ``shapes``: in processes of their own they are tried in `tests/trainer/attacks`."""
    monkeypatch.setattr("trainer.network.rpc.envelope.json", NOT_ONLY_JSON)
    said = Counter[str]()
    async with driving(ONE_EACH, 60) as drive, AsyncExitStack() as stack:
        announced = []
        for number in range(12):
            endpoint = Endpoint(Identity.create(), RUN_ID, fast_config())
            liar = Liar(number, said)
            liar.register(endpoint)
            await endpoint.start()
            stack.push_async_callback(endpoint.stop)
            announced.append(StageWorker("body-1", f"body1.0.{600 + number}", endpoint.peer, liar.incarnation))
        honest = drive.swarm.workers
        drive.swarm.workers = lambda: (*honest(), *announced)  # type: ignore[method-assign]
        await drive.driver.run()
        status = drive.driver.status()
        assert status.done + status.lost == 60
        assert status.done >= 40
        assert said.total() >= 12
        banned = {key for stage in status.stages for key, left_s in stage.banned.items() if left_s > BAN_S}
        assert len(banned & {worker.key for worker in announced}) >= 6


def test_a_word_that_nobody_knows_is_one_of_ours_and_any_that_is_known_can_be_why_a_micro_batch_was_lost() -> None:
    for word in ("0", "-x", "_", "", "hop-", "a" * 48, "no-such-word"):
        verdict = verdict_of(RefusedError(word, "a worker's text"))
        assert (verdict.reason, verdict.effect, verdict.blame) == ("refused", "unclear", "ban")
    for word in ("busy", "no-input", "already-applied", "malformed", "nonfinite", *map(str, Reason)):
        assert TypeAdapter(LossReason).validate_python(verdict_of(RefusedError(word, "a text")).reason) == word


# -- leases that run out, stages without workers, stopping, steps ------------------------------------------------------

TOKENS = ROWS * POSITIONS


@pytest.mark.slow
async def test_an_empty_stage_stalls_everything_and_is_named() -> None:
    async with driving(ONE_EACH | {"body-1": 0}, 3) as drive:
        running = asyncio.create_task(drive.driver.run())
        await until(lambda: drive.driver.status().stages[1].stalled_s > 0.05)
        status = drive.driver.status()
        assert status.stalls["head"] == 0
        assert status.stalls["body-1"] > 0
        assert status.in_flight == 3
        await drive.swarm.join("body-1")
        await running
        assert drive.work.fates() == ["done"] * 3


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


async def test_synchronous_a_worker_that_has_only_taken_the_step_before_is_waited_for() -> None:
    async with driving(TWO_EACH, 0) as drive:
        for stage, pool in drive.driver._pools.items():
            pool.update(worker for worker in drive.swarm.workers() if worker.stage == stage)
        barrier, late = drive.driver._barrier, drive.swarm.at("head", 1)
        others = [toy for toy in drive.swarm.all if toy is not late]
        for toy in others:
            toy.version = 3
        late.version = 2
        await barrier.prepare()
        for toy in others:
            toy.version = 4
        late.version = 3
        passing = asyncio.create_task(barrier.passed())
        await asyncio.sleep(0.3)
        assert not passing.done()
        late.version = 4
        await passing


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
    def settle(_settlement: object) -> None:
        raise OSError("the disk is full")

    async with driving(ONE_EACH, 3) as drive:
        drive.work.settle = settle  # type: ignore[method-assign,assignment]
        with pytest.raises(OSError, match="the disk is full"):
            await drive.driver.run()
