"""Workers that lie, drivers that flood, processes of other run files: contained, named, banned or turned away.

In this process, on real sockets: real workers of a small model, real drivers and a real keeper of the account; what
lies or floods is made by hand at an endpoint of its own. Liars as processes are in `tests.support.attacks`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from tests.support.lying_worker import LIES, Liar, lying_worker
from tests.support.model_configs import random_tokens
from tests.support.pipeline_swarm import STAGES, PipelineSwarm, check_account, steps_of
from tests.support.rpc_node import fast_config, running_endpoint
from tests.support.small_pipeline import SmallPipeline, Windows, announced
from tests.support.stage_worker import RUN_ID, WorkerSetup, held, running_driver
from tests.support.token_store import TokenStore
from tests.support.training_swarm import TERMINATED
from tests.support.waiting import until
from trainer.errors import PeerUnavailableError
from trainer.pipeline.driver import PipelineDriver, StageWorker
from trainer.pipeline.protocol.wire import wire_ids

PATIENT = {"stall_timeout_s": 30.0}
"""On a machine that is busy with other things, a worker that says nothing for a second is not gone."""
SETUP = WorkerSetup(rpc=PATIENT)
OF_TAILS = ("a negative loss", "no loss", "more labels")
OF_FORWARDS = ("NaN activations", "a wider activation", "counted in a forward pass")
OF_CHAINS = ("all counted behind it",)
IN_CHAINS = [
    *(("body-1", name) for name in ("NaN gradients", "not counted", "all counted behind it")),
    *(("tail", name) for name in ("a negative loss", "no tensors", "counted elsewhere")),
]


class Named(NamedTuple):
    """A liar among the workers."""

    liar: Liar
    worker: StageWorker


driving_endpoint = partial(running_endpoint, run_id=RUN_ID, **PATIENT)


@asynccontextmanager
async def among_liars(lies: Iterable[tuple[str, str]]) -> AsyncIterator[tuple[SmallPipeline, list[Named]]]:
    """An honest worker of each stage, and a liar for each stage and lie; every other one says that it has counted."""
    async with SmallPipeline(SETUP, dict.fromkeys(STAGES, 1)) as pipeline, AsyncExitStack() as stack:
        liars = []
        for number, (stage, name) in enumerate(lies):
            place = {"dim": SETUP.plan.config.dim, "run_id": RUN_ID, "rpc": fast_config(**PATIENT)}
            lying = lying_worker(stage, LIES[name], **place, says_counted=number % 2 == 1)
            liar, at = await stack.enter_async_context(lying)
            liars.append(Named(liar, announced(stage, 100 + number, at.peer)))
        pipeline.directory.found += [named.worker for named in liars]
        yield pipeline, liars


def banned(driver: PipelineDriver) -> dict[str, float]:
    """Seconds, by key, of all stages."""
    return {key: left_s for stage in driver.status().stages for key, left_s in stage.banned.items()}


@pytest.mark.slow
async def test_liars_are_named_and_banned_and_the_rest_train_on(caplog: pytest.LogCaptureFixture) -> None:
    lies = [
        *(("body-1", name) for name in LIES if name not in OF_TAILS + OF_CHAINS),
        *(("tail", name) for name in LIES if name not in OF_FORWARDS + OF_CHAINS),
    ]
    async with among_liars(lies) as (pipeline, liars), driving_endpoint() as endpoint:
        work = Windows(500)
        driver = pipeline.driver(endpoint, work, config={"max_in_flight_per_worker": 1, "request_timeout_s": 30.0})
        running = asyncio.create_task(driver.run())
        await until(lambda: banned(driver).keys() >= {it.worker.key for it in liars})
        begun = list(work.given)
        await until(lambda: all(key in work.settled for key in begun))
        asked = [it.liar.asked.total() for it in liars]
        await until(lambda: len(work.settled) >= len(begun) + 20)
        driver.stop()
        await running
        assert [it.liar.asked.total() for it in liars] == asked, "a liar was asked again"
        assert set(banned(driver)) == {it.worker.key for it in liars}
        assert min(banned(driver).values()) > 3000
        _check_rest(pipeline, work, sum(it.liar.says_counted for it in liars))
    said = [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]
    assert sorted(line.split()[0] for line in said) == sorted(it.worker.uid for it in liars)


@pytest.mark.slow
async def test_liars_in_a_chain_are_named_by_those_before_them_and_nobody_is_banned_for_long_by_hearsay(caplog):
    async with among_liars(IN_CHAINS) as (pipeline, liars), driving_endpoint() as endpoint:
        work = Windows(5000)
        config = {"routing": "chain", "max_in_flight_per_worker": 1, "request_timeout_s": 30.0, "ban_s": 0.1}
        driver = pipeline.driver(endpoint, work, config=config)
        running = asyncio.create_task(driver.run())
        await until(lambda: all(any(it.worker.uid in line for line in caplog.messages) for it in liars))
        begun = driver.status().done
        await until(lambda: driver.status().done >= begun + 20)
        driver.stop()
        await running
        honest = {member.announced.key for member in pipeline.alive}
        assert all(left_s < 10 for key, left_s in banned(driver).items() if key in honest)
        _check_rest(pipeline, work, len(work.given), "contradicted")


def _check_rest(pipeline: SmallPipeline, work: Windows, most_lost: int, *reasons: str) -> None:
    """Those who are honest have counted all that is done with them, and nothing that is not a number."""
    lost = [said for said in work.settled.values() if said.outcome == "lost"]
    assert len(lost) <= most_lost
    assert {said.reason for said in lost} <= {"answer-gone", *reasons}
    assert sum(said.outcome == "done" for said in work.settled.values()) >= 20
    for member in pipeline.alive:
        settled = work.settled.items()
        credited = {key for key, it in settled for credit in it.credits if credit.incarnation == member.incarnation}
        assert member.counted(list(credited)) == credited
        gradients = [each.grad for each in member.running.worker.replica.module.parameters() if each.grad is not None]
        assert all(bool(torch.isfinite(gradient).all()) for gradient in gradients)


NUM_FLOODING, NUM_BEFORE, NUM_HONEST = 48, 4, 1
QUEUED = 12
FLOODED = WorkerSetup(worker={"max_queue_per_driver": QUEUED, "max_compute_lead_s": 0.001}, rpc=PATIENT)


@pytest.mark.slow
async def test_a_flooding_driver_waits_for_itself_and_the_others_do_not() -> None:
    async with (
        SmallPipeline(FLOODED, dict.fromkeys(STAGES, 1)) as pipeline,
        running_driver() as flooding,
        driving_endpoint() as endpoint,
    ):
        tail, work = pipeline.at("tail")[0].running, Windows(NUM_HONEST)
        given = {
            "activation": torch.randn(8, 32, FLOODED.plan.config.dim),
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
            await until(lambda: tail.worker.runtime.figures.queued == QUEUED + NUM_HONEST)
            release()
            await running
        answers = await asyncio.gather(*flood, return_exceptions=True)
        assert work.fates() == ["done"] * NUM_HONEST
        assert driver.status().failures == {}
        numbers = [credit.applied_number for said in work.settled.values() for credit in said.credits[:1]]
        assert sorted(numbers) == list(range(NUM_BEFORE + 1, NUM_BEFORE + NUM_HONEST + 1)), "counted behind the flood"
        refused = [answer for answer in answers if isinstance(answer, BaseException)]
        assert refused
        assert all(isinstance(it, PeerUnavailableError) or getattr(it, "reason", "") == "busy" for it in refused), (
            refused
        )


CHANGES = {
    "seed": ("seed=12", "seed 11"),
    "length": ("inner.seq_len=64", "inner.seq_len 32"),
    "codec": ("swarm.activation_codec=fp16", "swarm.activation_codec fp32"),
    "preset": ("model.preset=15m", "dim 128"),
}
"""What they change, and the resident's value, of which they are told."""


@pytest.mark.long
@pytest.mark.timeout(300)
def test_who_has_another_run_file_is_told_what_differs(tmp_path: Path) -> None:
    with PipelineSwarm(tmp_path / "swarm", TokenStore.of(tmp_path / "store", 3).folder) as swarm:
        residents = [swarm.begin_driver("driver-1"), *swarm.begin_workers("head", "body-1")]
        strangers = swarm.begin_workers("tail", suffix="-first", options=["--set", "seed=12"])  # Its stage is empty.
        assert strangers[0].exit_code() == 1
        residents += swarm.begin_workers("tail")
        swarm.wait_for_steps("driver-1", 2, alive=residents)
        for stage, name in (("head", "length"), ("body-1", "codec"), ("tail", "preset")):
            strangers += swarm.begin_workers(stage, suffix=f"-{name}", options=["--set", CHANGES[name][0]])
            assert strangers[-1].exit_code() == 1  # Before the next one begins: else it is told how they differ.
        strangers += [swarm.begin_driver(f"driver-{name}", "--set", CHANGES[name][0]) for name in ("seed", "codec")]
        for stranger in strangers:
            assert stranger.exit_code() == 1, stranger.tail()
            name = stranger.name.rpartition("-")[2]
            last = stranger.output().splitlines()[-1]
            assert last.startswith("trainer: "), last
            assert CHANGES["seed" if name == "first" else name][1] in last
        swarm.wait_for_steps("driver-1", len(steps_of(residents[0])) + 2, alive=residents)
        assert swarm.stop(*(node.name for node in residents)) == [TERMINATED] * 4
        for stranger in strangers:
            assert not stranger.events("step")
        account = check_account(swarm)
    assert not account.micro_batches.lost
