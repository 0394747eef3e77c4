"""Drivers and real workers of a small model: the losses of one process, and a process that is killed."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.support.lying_replica import lie_named
from tests.support.rpc_pair import running_endpoint
from tests.support.small_pipeline import POSITIONS, ROWS, Directory, Windows, announced, driver_of, window
from tests.support.stage_worker import INNER, RUN_ID, WorkerSetup, running_worker
from trainer.inner import InnerConfig, make_optimizer
from trainer.model import build_model
from trainer.model.config import stage_names
from trainer.pipeline.driver import MicroBatchResult, PipelineDriver, StepLoss

PER_STEP = 4
TARGET = ROWS * POSITIONS * PER_STEP

pytestmark = pytest.mark.slow
both_routings = pytest.mark.parametrize("routing", ["hub", "chain"])


@asynccontextmanager
async def driving(
    setup: WorkerSetup,
    num: int,
    *,
    replicas: int = 1,
    on_worker: Callable[[str, int, Any], None] = lambda *_: None,
    **options: Any,
) -> AsyncIterator[tuple[PipelineDriver, Windows, Directory]]:
    directory, work = Directory(), Windows(num)
    async with AsyncExitStack() as stack:
        for stage in stage_names(setup.num_stages):
            for number in range(replicas):
                running = await stack.enter_async_context(running_worker(replace(setup, stage=stage)))
                directory.found.append(announced(stage, 32 + number, running.peer))
                on_worker(stage, number, running.worker)
        endpoint = await stack.enter_async_context(running_endpoint(run_id=RUN_ID))
        yield driver_of(endpoint, setup, directory, work, **options), work, directory


def reference_losses(setup: WorkerSetup, num_steps: int) -> list[float]:
    model = build_model(setup.plan.config, setup.seed)
    optimizer = make_optimizer(model, InnerConfig(**{**INNER, **setup.inner}))
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


@both_routings
async def test_step_for_step_the_losses_of_one_process(routing: str) -> None:
    unclipped = dict.fromkeys(("clip_factor", "tail_clip_factor"), float("inf"))
    setup = WorkerSetup(target_tokens=TARGET, inner={"lr": 1e-2}, stage_config=unclipped)
    steps: list[StepLoss] = []
    config = {"routing": routing, "synchronous": True}
    options = {"config": config, "target_tokens": TARGET, "on_step": steps.append}
    async with driving(setup, 5 * PER_STEP, **options) as (driver, work, _):
        await driver.run()
    assert work.fates() == ["done"] * 5 * PER_STEP
    expected = reference_losses(setup, 5)
    assert [step.loss for step in steps] == pytest.approx(expected, rel=1e-5)
    assert [(step.step, step.micro_batches) for step in steps] == [(number, PER_STEP) for number in range(5)]
    assert abs(expected[0] - expected[-1]) > 1e-3  # The weights have moved.


@both_routings
@pytest.mark.parametrize("codec", ["int8", "subspace+fp16"])
async def test_what_a_codec_sends_is_passed_on_as_it_is_and_honest_workers_are_alike(routing: str, codec: str) -> None:
    setup = WorkerSetup(codec=codec, model={"subspace_rank": 4} if codec.startswith("subspace") else {})
    results: list[MicroBatchResult] = []
    options = {"config": {"routing": routing, "audit_every": 1, "max_in_flight": 1}, "on_result": results.append}
    async with driving(setup, 12, replicas=2, **options) as (driver, work, _):
        await driver.run()
    audit = driver.status().audit
    assert audit.compared
    assert (audit.disputed, audit.unopposed, work.fates()) == (0, (), ["done"] * 12)
    assert all(0 < result.outcome.loss_sum / result.outcome.num_tokens < 10 for result in results)


@both_routings
@pytest.mark.parametrize("lie", ["-3 x gradient", "-3 x gradient, honest when asked", "1,000 x activation"])
async def test_one_of_two_that_lies_is_found_early_and_the_honest_one_is_not_accused(lie: str, routing: str) -> None:
    lying_stage, lying = lie_named(lie)

    def begin_to_lie(stage: str, number: int, worker: Any) -> None:
        if (stage, number) == (lying_stage, 0):
            lying.begin(worker)

    options = {"config": {"routing": routing, "max_in_flight": 2}, "audit_seed": 1, "on_worker": begin_to_lie}
    async with driving(WorkerSetup(codec="int8"), 40, replicas=2, **options) as (driver, work, directory):
        await driver.run()
    liar = next(worker.uid for worker in directory.found if worker.stage == lying_stage)
    assert driver.status().audit.liars == {liar: 1}
    assert work.fates() == ["done"] * 40
