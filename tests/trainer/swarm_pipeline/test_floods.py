"""A driver that asks for more than anybody can do is refused, and waits for itself alone."""

from __future__ import annotations

import asyncio
import secrets
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.support.event_loop import on_event_loop
from tests.support.ledger_run import CONFIG, all_of, ledger_run
from tests.support.model_configs import random_tokens
from tests.support.rpc_pair import running_endpoint
from tests.support.small_pipeline import SmallPipeline, Windows
from tests.support.stage_driver import running_driver
from tests.support.stage_worker import RUN_ID, WorkerSetup, held
from tests.support.toy_drive import until
from trainer.errors import PeerUnavailableError, RefusedError
from trainer.pipeline.ledger import LEDGER_LEASE
from trainer.pipeline.ledger.messages import LeaseAnswer, LeaseAsk
from trainer.pipeline.protocol.wire import wire_ids

NUM_FLOODING = 48
NUM_BEFORE = 4
QUEUED = 12
HONEST = 1
PATIENT = {"stall_timeout_s": 30.0}
SETUP = WorkerSetup(worker={"max_queue_per_driver": QUEUED, "max_compute_lead_s": 0.001}, rpc=PATIENT)


@pytest.mark.slow
@on_event_loop
async def test_a_flooding_driver_waits_for_itself_and_the_others_do_not() -> None:
    async with (
        SmallPipeline(SETUP, dict.fromkeys(("head", "body-1", "tail"), 1)) as pipeline,
        running_driver() as flooding,
        running_endpoint(run_id=RUN_ID, **PATIENT) as endpoint,
    ):
        tail, work = pipeline.at("tail")[0].running, Windows(HONEST)
        given = {
            "activation": torch.randn(8, 32, SETUP.plan.config.dim),
            "labels": wire_ids(random_tokens(64, 8, 32)[1]),
        }
        for number in range(NUM_BEFORE):
            await flooding.tail(tail, f"e9.s8.r{number}", given)
        asked = [flooding.tail(tail, f"e9.s9.r{number}", given) for number in range(NUM_FLOODING)]
        async with held(tail) as release:
            flood = [asyncio.create_task(each) for each in asked]
            await until(lambda: tail.worker.runtime.figures.queued == QUEUED and any(task.done() for task in flood))
            driver = pipeline.driver(endpoint, work, config={"request_timeout_s": 30.0})
            running = asyncio.create_task(driver.run())
            await until(lambda: tail.worker.runtime.figures.queued == QUEUED + HONEST)
            release()
            await running
        answers = await asyncio.gather(*flood, return_exceptions=True)
        assert work.fates() == ["done"] * HONEST
        assert driver.status().failures == {}
        numbers = [credit.applied_number for said in work.settled.values() for credit in said.credits[:1]]
        assert sorted(numbers) == list(range(NUM_BEFORE + 1, NUM_BEFORE + HONEST + 1)), "counted behind the flood"
        refused = [answer for answer in answers if isinstance(answer, BaseException)]
        assert refused
        assert all(isinstance(it, PeerUnavailableError) or _reason(it) == "busy" for it in refused)


def _reason(error: BaseException) -> str:
    return error.reason if isinstance(error, RefusedError) else repr(error)


@pytest.mark.slow
@on_event_loop
async def test_a_driver_that_leases_all_it_can_leaves_the_rest_to_others(tmp_path: Path) -> None:
    config = replace(CONFIG, max_open=4, lease_s=1.0)
    run = ledger_run(tmp_path)
    async with run.keeper(config) as (keeper, at), running_endpoint() as greedy, run.driver(at.peer, config) as client:

        async def lease() -> int:
            ask = LeaseAsk(token=secrets.token_hex(16), data_digest=run.spec.digest(), num_units=1)
            reply = await greedy.call(at.peer, LEDGER_LEASE, ask, LeaseAnswer, timeout_s=30.0)
            return sum(len(list(run.spec.layout.micro_batches(each))) for each in reply.body.runs)

        answers = await asyncio.gather(*(lease() for _ in range(100)), return_exceptions=True)
        refused = [answer for answer in answers if isinstance(answer, RefusedError)]
        got = sum(answer for answer in answers if isinstance(answer, int))
        assert {"enough"} <= {error.reason for error in refused} <= {"enough", "busy"}
        assert config.max_open <= got < config.max_open + 2 * config.lease_units
        assert len(await all_of(client)) == 15  # When the greedy one's leases had run out.
        account = await keeper.account()
        assert (account.micro_batches.done, account.micro_batches.lost, account.micro_batches.open) == (15, 0, 0)
