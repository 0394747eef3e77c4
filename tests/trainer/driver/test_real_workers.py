"""Drivers and real workers of a small model: the losses of one process, and a process that is killed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import pytest
import torch

from tests.support.event_loop import on_event_loop
from tests.support.rpc_pair import running_endpoint
from tests.support.small_pipeline import POSITIONS, ROWS, Directory, Windows, announced, driver_of, window
from tests.support.stage_worker import RUN_ID, WorkerSetup, running_worker, stage_worker_process
from tests.support.toy_drive import until
from trainer.driver import MicroBatchResult, StepLoss
from trainer.inner import make_optimizer
from trainer.model import build_model
from trainer.pipeline.names import stage_names

PER_STEP = 4
TARGET = ROWS * POSITIONS * PER_STEP


@asynccontextmanager
async def real_swarm(setup: WorkerSetup, replicas: int = 1) -> AsyncIterator[Directory]:
    """Workers in this process."""
    directory = Directory()
    async with AsyncExitStack() as stack:
        for stage in stage_names(setup.num_stages):
            for number in range(replicas):
                fields = {name: getattr(setup, name) for name in setup.__dataclass_fields__} | {"stage": stage}
                running = await stack.enter_async_context(running_worker(WorkerSetup(**fields)))
                directory.found.append(announced(stage, 32 + number, running.peer))
        yield directory


def reference_losses(setup: WorkerSetup, num_steps: int) -> list[float]:
    """Of the same model and data in one process."""
    model = build_model(setup.plan.config, setup.seed)
    optimizer = make_optimizer(model, setup.inner_config)
    losses = []
    for step in range(num_steps):
        total = torch.zeros(())
        for number in range(step * PER_STEP, (step + 1) * PER_STEP):
            loss_sum, _ = model.loss_sum(*window(number))
            loss_sum.backward()
            total += loss_sum.detach()
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad /= TARGET
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(total) / TARGET)
    return losses


@pytest.mark.parametrize("routing", ["hub", "chain"])
def test_step_for_step_the_losses_of_one_process(routing: str) -> None:
    @on_event_loop
    async def test() -> None:
        inf = float("inf")
        setup = WorkerSetup(
            target_tokens=TARGET,
            inner={"lr": 1e-2},
            stage_config={"clip_factor": inf, "tail_clip_factor": inf},
        )
        steps: list[StepLoss] = []
        async with real_swarm(setup) as directory, running_endpoint(run_id=RUN_ID) as endpoint:
            work = Windows(5 * PER_STEP)
            driver = driver_of(
                endpoint,
                setup,
                directory,
                work,
                config={"routing": routing, "synchronous": True},
                target_tokens=TARGET,
                on_step=steps.append,
            )
            await driver.run()
        assert work.fates() == ["done"] * 5 * PER_STEP
        expected = reference_losses(setup, 5)
        assert [step.loss for step in steps] == pytest.approx(expected, rel=1e-5)
        assert abs(expected[0] - expected[-1]) > 1e-3  # The weights have moved.

    test()


@pytest.mark.parametrize("routing", ["hub", "chain"])
@pytest.mark.parametrize("codec", ["int8", "subspace+fp16"])
def test_what_a_codec_sends_is_handed_on_as_it_is(routing: str, codec: str) -> None:
    @on_event_loop
    async def test() -> None:
        setup = WorkerSetup(codec=codec, model={"subspace_rank": 4} if codec.startswith("subspace") else {})
        results: list[MicroBatchResult] = []
        async with real_swarm(setup) as directory, running_endpoint(run_id=RUN_ID) as endpoint:
            work = Windows(3)
            driver = driver_of(endpoint, setup, directory, work, config={"routing": routing}, on_result=results.append)
            await driver.run()
        assert work.fates() == ["done"] * 3
        assert all(0 < result.outcome.loss_sum / result.outcome.num_tokens < 10 for result in results)

    test()


@pytest.mark.slow
@pytest.mark.parametrize("routing", ["hub", "chain"])
def test_a_process_is_killed_and_another_stopped_for_a_while(routing: str) -> None:
    @on_event_loop
    async def test() -> None:
        setup = WorkerSetup()
        async with real_swarm(setup, replicas=2) as directory, running_endpoint(run_id=RUN_ID) as endpoint:
            body = WorkerSetup(stage="body-1")
            with stage_worker_process(body) as doomed, stage_worker_process(body) as stopped:
                in_process = [worker for worker in directory.found if worker.stage == "body-1"]
                directory.found = [worker for worker in directory.found if worker not in in_process]
                directory.found += [announced("body-1", 40, doomed.peer), announced("body-1", 41, stopped.peer)]
                work = Windows(60)
                driver = driver_of(endpoint, setup, directory, work, config={"routing": routing})
                running = asyncio.create_task(driver.run())
                await until(lambda: driver.status().done >= 10)
                doomed.kill()
                await until(lambda: driver.status().done >= 20)
                stopped.stop()
                await asyncio.sleep(0.5)
                stopped.resume()
                await running
        assert work.fates() == ["done"] * 60

    test()
