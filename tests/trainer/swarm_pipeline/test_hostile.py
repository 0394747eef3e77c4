"""Workers that lie and drivers that flood or send nonsense: contained, named, banned; the rest train on.

Real workers of a small model, real drivers and a real keeper of the account, in this process and on real sockets; what
lies or floods is made by hand at an endpoint of its own.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass

import pytest
import torch

from tests.support.event_loop import on_event_loop
from tests.support.lying_worker import LIES, Liar, lying_worker
from tests.support.rpc_node import fast_config
from tests.support.rpc_pair import running_endpoint
from tests.support.small_pipeline import SmallPipeline, Windows, announced
from tests.support.stage_worker import RUN_ID, WorkerSetup
from tests.support.toy_drive import until
from trainer.network.rpc import Endpoint
from trainer.pipeline.driver import PipelineDriver, StageWorker

PATIENT = {"stall_timeout_s": 30.0}
"""On a machine that is busy with other things, a worker that says nothing for a second is not gone."""
SETUP = WorkerSetup(rpc=PATIENT)
STAGES = ("head", "body-1", "tail")
OF_TAILS = ("a negative loss", "no loss", "more labels")
OF_FORWARDS = ("NaN activations", "a wider activation", "counted in a forward pass")
OF_CHAINS = ("all counted behind it",)
IN_CHAINS = [
    *(("body-1", name) for name in ("NaN gradients", "not counted", "all counted behind it")),
    *(("tail", name) for name in ("a negative loss", "no tensors", "counted elsewhere")),
]


@dataclass(frozen=True)
class Named:
    """A liar among the workers."""

    name: str
    """Of its lie."""
    liar: Liar
    worker: StageWorker


@asynccontextmanager
async def driving_endpoint() -> AsyncIterator[Endpoint]:
    """A driver's."""
    async with running_endpoint(run_id=RUN_ID, **PATIENT) as endpoint:
        yield endpoint


@contextmanager
def logged(level: int) -> Iterator[list[str]]:
    """What is logged at this level or above."""
    said: list[str] = []
    handler = logging.Handler(level)
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("trainer").addHandler(handler)
    try:
        yield said
    finally:
        logging.getLogger("trainer").removeHandler(handler)


@asynccontextmanager
async def among_liars(lies: Iterable[tuple[str, str]]) -> AsyncIterator[tuple[SmallPipeline, list[Named]]]:
    """An honest worker of each stage, and a liar for each stage and lie; every other one says that it has counted."""
    async with SmallPipeline(SETUP, dict.fromkeys(STAGES, 1)) as pipeline, AsyncExitStack() as stack:
        liars = []
        for number, (stage, name) in enumerate(lies):
            liar, at = await stack.enter_async_context(
                lying_worker(
                    stage,
                    LIES[name],
                    dim=SETUP.plan.config.dim,
                    run_id=RUN_ID,
                    rpc=fast_config(**PATIENT),
                    says_counted=number % 2 == 1,
                )
            )
            liars.append(Named(name, liar, announced(stage, 100 + number, at.peer)))
        pipeline.directory.found += [named.worker for named in liars]
        yield pipeline, liars


def banned(driver: PipelineDriver) -> dict[str, float]:
    """Seconds, by key, of all stages."""
    return {key: left_s for stage in driver.status().stages for key, left_s in stage.banned.items()}


@pytest.mark.slow
@on_event_loop
async def test_liars_are_named_and_banned_and_the_rest_train_on() -> None:
    lies = [
        *(("body-1", name) for name in LIES if name not in OF_TAILS + OF_CHAINS),
        *(("tail", name) for name in LIES if name not in OF_FORWARDS + OF_CHAINS),
    ]
    with logged(logging.ERROR) as said:
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
    assert sorted(line.split()[0] for line in said) == sorted(it.worker.uid for it in liars)


@pytest.mark.slow
@on_event_loop
async def test_liars_in_a_chain_are_named_by_those_before_them_and_nobody_is_banned_for_long_by_hearsay() -> None:
    with logged(logging.WARNING) as said:
        async with among_liars(IN_CHAINS) as (pipeline, liars), driving_endpoint() as endpoint:
            work = Windows(5000)
            config = {"routing": "chain", "max_in_flight_per_worker": 1, "request_timeout_s": 30.0, "ban_s": 0.1}
            driver = pipeline.driver(endpoint, work, config=config)
            running = asyncio.create_task(driver.run())
            await until(lambda: all(any(it.worker.uid in line for line in said) for it in liars))
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
        credited = {
            key
            for key, said in work.settled.items()
            for credit in said.credits
            if credit.incarnation == member.incarnation
        }
        assert member.counted(list(credited)) == credited
        assert _is_sound(member.running.worker.replica.module)


def _is_sound(module: torch.nn.Module) -> bool:
    gradients = [parameter.grad for parameter in module.parameters() if parameter.grad is not None]
    return all(bool(torch.isfinite(gradient).all()) for gradient in gradients)
