"""Three real workers compute what the whole model computes in one process."""

from __future__ import annotations

from contextlib import AsyncExitStack

import pytest
import torch

from tests.support.event_loop import on_event_loop
from tests.support.model_configs import random_tokens, small_config
from tests.support.stage_driver import running_driver
from tests.support.stage_worker import RunningWorker, WorkerSetup, running_worker
from trainer.model import build_model
from trainer.model.loss import IGNORED_LABEL

STAGES = ("head", "body-1", "tail")


async def _workers(stack: AsyncExitStack, **setup: object) -> list[RunningWorker]:
    setups = [WorkerSetup(stage=stage, **setup) for stage in STAGES]  # type: ignore[arg-type]
    return [await stack.enter_async_context(running_worker(each)) for each in setups]


def _sums(workers: list[RunningWorker]) -> dict[str, torch.Tensor]:
    """What the workers have accumulated, by parameter."""
    found: dict[str, torch.Tensor] = {}
    for running in workers:
        found |= running.worker.replica.state_dict()["sums"]
    return found


@pytest.mark.slow
@pytest.mark.parametrize("routing", ["hub", "chain"])
@pytest.mark.parametrize("backward", ["cached", "recompute"])
@on_event_loop
async def test_losses_and_gradients_are_the_whole_models(routing: str, backward: str) -> None:
    ids, labels = random_tokens(64, 3, 9)
    labels = labels.clone()
    labels[0, :4] = IGNORED_LABEL
    model = build_model(small_config(), 0)
    total, _ = model.loss_sum(ids, labels)
    total.backward()
    async with AsyncExitStack() as stack:
        workers = await _workers(stack, stage_config={"backward": backward})
        driver = await stack.enter_async_context(running_driver())
        if routing == "hub":
            replies = await driver.hub(workers, "e0.s0.r0", ids, labels)
            assert [reply.body.applied for reply in replies] == [("tail",), ("body-1",), ("head",)]
            body = replies[0].body
        else:
            reply = await driver.chain(workers, "e0.s0.r0", ids, labels)
            assert reply.body.applied == STAGES
            body = reply.body
        assert body.num_tokens == int((labels != IGNORED_LABEL).sum())
        assert body.loss_sum == pytest.approx(float(total.detach()), rel=1e-6)
        sums = _sums(workers)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(sums[name], parameter.grad, rtol=1e-5, atol=1e-6)
