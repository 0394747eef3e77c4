"""A worker on a real socket: what it refuses and how it names it, and that nothing is counted but what it says."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.model_configs import random_tokens, small_config
from tests.support.stage_worker import (
    HEAD_INPUT,
    TAIL_INPUT,
    RunningWorker,
    StageDriver,
    WorkerSetup,
    held,
    queued,
    running_driver,
    running_worker,
)
from tests.support.waiting import until
from trainer.errors import RefusedError
from trainer.model import build_model
from trainer.model.loss import IGNORED_LABEL
from trainer.network.transfer.descriptor import TensorSpec
from trainer.pipeline.protocol import messages
from trainer.pipeline.protocol.wire import wire_ids
from trainer.pipeline.protocol.work import boottime_s
from trainer.pipeline.worker.replies import PendingCount

KEY = "e0.s0.r0"
STAGES = ("head", "body-1", "tail")
HEAD, TAIL = WorkerSetup("head"), WorkerSetup("tail")
GRADIENT = {"gradient": torch.randn(2, 8, small_config().dim)}
Tensors = dict[str, Tensor]


async def _reason(asked: Any) -> str:
    with pytest.raises(RefusedError) as caught:
        await asked
    return caught.value.reason


def _changed(tensors: Tensors, **changes: Tensor | None) -> Tensors:
    merged = {name: value for name, value in (tensors | changes).items() if value is not None}
    return dict(sorted(merged.items()))


def _with(tensor: Tensor, value: float) -> Tensor:
    spoilt = tensor.clone()
    spoilt.view(-1)[3] = value
    return spoilt


def _opened(driver: StageDriver, tail: RunningWorker, answer_within_s: float = 30.0) -> Any:
    """A stream that announces 2 MiB, which are 6 MiB once computed with."""
    hidden = TensorSpec(name="activation", dtype="float32", shape=(64, 512, 16))
    fields = {"micro_batch": KEY, "stage": "tail", "num_rows": 64, "num_positions": 512, "apply_within_s": 30.0}
    ask = messages.TailAsk(**fields, answer_within_s=answer_within_s, tensors=(hidden,))
    return driver.endpoint.open_stream(tail.peer, messages.TAIL + "/stream", ask, timeout_s=20.0)


def _backward(worker: RunningWorker, driver: StageDriver, tensors: Tensors, key: str = KEY, **fields: Any) -> Any:
    return driver.backward(worker, key, {**GRADIENT, **tensors}, **fields)


BAD_TAILS: dict[str, Callable[[Tensors], Tensors]] = {
    "labels beyond the vocabulary": lambda t: _changed(t, labels=t["labels"] + 64),
    "int64 labels": lambda t: _changed(t, labels=t["labels"].long()),
    "no labels": lambda t: _changed(t, labels=None),
    "no activation": lambda t: _changed(t, activation=None),
    "half an activation": lambda t: _changed(t, activation=t["activation"].half()),
    "fewer rows": lambda t: _changed(t, activation=t["activation"][:1].contiguous()),
    "ids nobody asked for": lambda t: _changed(t, ids=t["labels"]),
    "a gradient": lambda t: _changed(t, gradient=t["activation"]),
    "scales of another codec": lambda t: _changed(t, **{"activation.scales": torch.ones(4)}),
}


@pytest.mark.slow
async def test_what_is_no_request_of_the_tail_is_malformed_by_name() -> None:
    hidden = torch.randn(2, 8, small_config().dim)
    good = {"activation": hidden, "labels": wire_ids(random_tokens(64, 2, 8)[1])}
    async with running_worker(TAIL) as tail, running_driver() as driver:
        for name, spoil in BAD_TAILS.items():
            asked = driver.tail(tail, KEY, spoil(good), num_rows=2, num_positions=8)
            assert await _reason(asked) == "malformed", name
        for value in (float("nan"), float("inf")):
            spoilt = _changed(good, activation=_with(hidden, value))
            assert await _reason(driver.tail(tail, KEY, spoilt)) == "nonfinite"
        assert tail.worker.replica.accumulated.num_micro_batches == 0
        reply = await driver.tail(tail, KEY, good)  # The same name, now in order.
        assert reply.body.applied_number == 1
        status = await driver.status(tail)
        assert status.refused == {"malformed": len(BAD_TAILS), "nonfinite": 2}
        assert (status.queued, status.queued_bytes) == (0, 0)
        with torch.no_grad():  # Values that overflow on the way.
            tail.worker.replica.module.readout.output.weight[3, 3] = float("inf")
        assert await _reason(driver.tail(tail, "e0.s0.r2", good)) == "nonfinite"
        assert tail.worker.replica.accumulated.num_micro_batches == 1
        assert await driver.applied(tail, KEY, "e0.s0.r2") == (KEY,)


async def test_requests_for_others_and_of_any_size_are_refused() -> None:
    setup = WorkerSetup("head", worker={"max_request_tokens": 16})
    async with running_worker(setup) as head, running_driver() as driver:
        await driver.forward(head, KEY, HEAD_INPUT)
        assert await _reason(driver.forward(head, KEY, HEAD_INPUT, stage="tail")) == "stage"
        for (rows, positions), reason in {(2, 9): "malformed", (64, 512): "size", (1, 33): "malformed"}.items():
            assert await _reason(driver.forward(head, KEY, {"ids": wire_ids(torch.zeros(rows, positions))})) == reason
        assert await _reason(driver.forward(head, KEY, {"ids": HEAD_INPUT["ids"] - 64})) == "malformed"
        assert await _reason(driver.tail(head, KEY, HEAD_INPUT)) == "method"


@pytest.mark.slow
async def test_a_gradient_needs_its_input_where_it_is_not_kept_and_a_number_of_tokens() -> None:
    async with running_worker(replace(HEAD, target_tokens=32)) as head, running_driver() as driver:
        for num_tokens in (17, 2**52):
            assert await _reason(_backward(head, driver, HEAD_INPUT, num_tokens=num_tokens)) == "malformed"
        assert head.worker.replica.version == head.worker.replica.accumulated.num_tokens == 0
        assert await _reason(_backward(head, driver, {})) == "no-input"
        assert await _reason(_backward(head, driver, {"gradient": GRADIENT["gradient"] * float("nan")})) == "nonfinite"
        await driver.forward(head, KEY, HEAD_INPUT)
        kept = await _backward(head, driver, {})
        again = await _backward(head, driver, HEAD_INPUT, "e0.s0.r2")
        assert (kept.body.applied_number, again.body.applied_number) == (1, 2)
        assert await _reason(_backward(head, driver, HEAD_INPUT, "e0.s0.r4", forward_version=99)) == "stale"
        async with held(head):  # What is wrong with one request is not held against one that comes with it.
            (first,) = await queued(head, _backward(head, driver, {}, "e0.s0.r4"))
            second = asyncio.create_task(_backward(head, driver, HEAD_INPUT, "e0.s0.r4"))
            await asyncio.sleep(0.1)
        assert await _reason(first) == "no-input"
        assert (await second).body.applied == ("head",)


async def test_the_same_request_again_gets_the_same_answer_and_one_gradient() -> None:
    async with running_worker(TAIL) as tail, running_driver() as driver:
        replies = await asyncio.gather(*(driver.tail(tail, KEY, TAIL_INPUT) for _ in range(4)))
        replies.append(await driver.tail(tail, KEY, TAIL_INPUT))
        replies.append(await driver.ask(tail, messages.CHAIN, messages.ChainAsk, KEY, TAIL_INPUT, {"route": ()}))
        for reply in replies[1:]:
            assert reply.body == replies[0].body
            assert torch.equal(reply.tensors["gradient"], replies[0].tensors["gradient"])
        assert tail.worker.replica.accumulated.num_micro_batches == 1
        assert await driver.applied(tail, "e0.s0.r2", KEY) == (KEY,)
        ask = messages.AppliedAsk(micro_batches=(KEY,))
        told = await driver.endpoint.call(tail.peer, messages.APPLIED, ask, messages.AppliedAnswer, timeout_s=20)
        counted_as = messages.CountedAs(incarnation=replies[0].body.incarnation, applied_number=1)
        assert told.body.counted_as == counted_as

        async def overflow(gradient: Tensor) -> Tensors:
            raise RefusedError("nonfinite", "the gradient does not fit into the codec's values")

        tail.worker.link.gradient = overflow
        for _ in range(2):  # Where no answer can be made, it does not say that nothing was counted.
            assert await _reason(driver.tail(tail, "e0.s0.r4", TAIL_INPUT)) == "already-applied"
        assert await driver.applied(tail, "e0.s0.r4") == ("e0.s0.r4",)
        assert tail.worker.replica.accumulated.num_micro_batches == 2


async def test_late_is_expired_and_stopped_while_adding_up_it_drops_all_in_another_incarnation() -> None:
    offset = [0.0]
    async with running_worker(TAIL, clock=lambda: boottime_s() + offset[0]) as tail, running_driver() as driver:
        async with held(tail):
            (late,) = await queued(tail, driver.tail(tail, KEY, TAIL_INPUT, apply_within_s=5.0))
            offset[0] = 6.0
        assert await _reason(late) == "expired"
        assert tail.worker.replica.accumulated.num_micro_batches == 0
        before = await driver.tail(tail, "e0.s0.r2", TAIL_INPUT)
        claim = tail.worker.replies.claim

        def claim_and_stop(pending: PendingCount) -> None:
            claim(pending)
            offset[0] += 100.0

        tail.worker.replies.claim = claim_and_stop
        assert await _reason(driver.tail(tail, KEY, TAIL_INPUT)) == "tainted"
        assert tail.worker.replica.accumulated.num_tokens == 0
        assert await driver.applied(tail, KEY, "e0.s0.r2") == ()
        tail.worker.replies.claim = claim
        after = await driver.tail(tail, KEY, TAIL_INPUT)
        assert after.body.incarnation != before.body.incarnation
        assert after.body.applied_number == 1


async def test_drivers_have_their_own_micro_batches_refused_and_the_keeper_anybodys() -> None:
    may: set[str] = set()
    keeper: list[str] = []
    async with AsyncExitStack() as stack:
        enter = stack.enter_async_context
        tail = await enter(running_worker(TAIL, drivers=lambda: may, keepers=lambda: keeper))
        driver, impostor = await enter(running_driver()), await enter(running_driver())
        may.add(driver.endpoint.peer_id)
        assert await _reason(impostor.applied(tail, KEY, refuse_from_now=True)) == "not-a-driver"
        assert await impostor.applied(tail, KEY) == ()
        may.add(impostor.endpoint.peer_id)
        for _ in range(2):
            assert await impostor.applied(tail, KEY, refuse_from_now=True) == ()
        assert await _reason(impostor.tail(tail, KEY, TAIL_INPUT)) == "busy"
        assert (await driver.tail(tail, KEY, TAIL_INPUT)).body.applied_number == 1
        assert await _reason(impostor.tail(tail, KEY, TAIL_INPUT)) == "counted-for-another"
        assert await driver.applied(tail, KEY, "e0.s0.r2", refuse_from_now=True) == (KEY,)
        assert await _reason(driver.tail(tail, "e0.s0.r2", TAIL_INPUT)) == "busy"
        keeper.append(impostor.endpoint.peer_id)
        async with held(tail):
            (waiting,) = await queued(tail, driver.tail(tail, "e0.s0.r4", TAIL_INPUT))
            assert await impostor.applied(tail, "e0.s0.r4", "e0.s0.r6", refuse_from_now=True) == ()
        assert await _reason(waiting) == "expired"
        assert await _reason(driver.tail(tail, "e0.s0.r6", TAIL_INPUT)) == "busy"


@pytest.mark.slow
async def test_for_strangers_nothing_is_received_computed_or_counted() -> None:
    may: set[str] = set()
    async with AsyncExitStack() as stack:
        head, tail = [await stack.enter_async_context(running_worker(it, drivers=lambda: may)) for it in (HEAD, TAIL)]
        stranger = await stack.enter_async_context(running_driver())
        asked = [
            stranger.forward(head, KEY, HEAD_INPUT),
            _backward(head, stranger, HEAD_INPUT),
            stranger.evaluate(head, HEAD_INPUT),
            stranger.tail(tail, KEY, TAIL_INPUT),
            stranger.chain([tail], KEY, *random_tokens(64, 2, 8)),
        ]
        assert [await _reason(each) for each in asked] == ["not-a-driver"] * 5
        async with _opened(stranger, tail) as stream:
            assert await _reason(stream.receive()) == "not-a-driver"
        assert head.worker.replica.cached_bytes == 0
        may.add(stranger.endpoint.peer_id)  # Its announcement has come.
        assert (await stranger.tail(tail, KEY, TAIL_INPUT)).body.applied_number == 1


async def test_what_is_being_received_is_bounded_of_each_and_of_all() -> None:
    """Strangers announce tensors and send nothing of them."""
    setup = WorkerSetup("tail", worker={"max_received_bytes": 21 << 20})
    async with AsyncExitStack() as stack:
        tail = await stack.enter_async_context(running_worker(setup))
        first, second = [await stack.enter_async_context(running_driver()) for _ in range(2)]
        memory = tail.worker.service._memory
        await stack.enter_async_context(_opened(first, tail))
        await until(lambda: memory.size_bytes == 6 << 20)
        async with _opened(first, tail) as refused:
            assert await _reason(refused.receive()) == "busy"
        await stack.enter_async_context(_opened(second, tail))
        await until(lambda: memory.size_bytes == 12 << 20)
        assert (await first.status(tail)).refused == {"busy": 1}
        async with _opened(await stack.enter_async_context(running_driver()), tail, answer_within_s=0.2) as stream:
            assert await _reason(stream.receive()) == "expired"  # It does not send what it wants answered in time.
        await until(lambda: memory.size_bytes == 12 << 20)
        await stack.pop_all().aclose()


@pytest.mark.slow
async def test_a_request_is_under_way_from_before_its_tensors_until_it_is_answered() -> None:
    async with running_worker(TAIL) as tail, running_driver() as driver:
        service = tail.worker.service
        async with held(tail):
            (waiting,) = await queued(tail, driver.tail(tail, KEY, TAIL_INPUT))
            async with _opened(driver, tail) as stream:
                await until(lambda: service.num_under_way == 2)
                assert tail.worker.runtime.figures.queued == 1
                service.accepts = "nothing"
                assert await _reason(driver.tail(tail, "e0.s0.r2", TAIL_INPUT)) == "stopping"
                assert ((await driver.status(tail)).refused, service.num_under_way) == ({"stopping": 1}, 2)
                for index in (1, 2):
                    await stream.send(index, bytes(1 << 20))
                await stream.end()
                assert await _reason(stream.receive()) == "stopping"
            await until(lambda: service.num_under_way == 1)
        assert (await waiting).body.applied == ("tail",)
        await until(lambda: service.num_under_way == 0)


@pytest.mark.slow
@pytest.mark.parametrize("routing", ["hub", "chain"])
@pytest.mark.parametrize("backward", ["cached", "recompute"])
async def test_losses_and_gradients_are_the_whole_models(routing: str, backward: str) -> None:
    ids, labels = random_tokens(64, 3, 9)
    labels = labels.clone()
    labels[0, :4] = IGNORED_LABEL
    model = build_model(small_config(), 0)
    total, _ = model.loss_sum(ids, labels)
    total.backward()
    num_tokens, loss_sum = int((labels != IGNORED_LABEL).sum()), pytest.approx(float(total.detach()), rel=1e-6)
    setups = [WorkerSetup(stage, stage_config={"backward": backward}) for stage in STAGES]
    async with AsyncExitStack() as stack:
        workers = [await stack.enter_async_context(running_worker(setup)) for setup in setups]
        driver = await stack.enter_async_context(running_driver())
        hidden = (await driver.evaluate(workers[0], {"ids": wire_ids(ids)})).tensors
        hidden = (await driver.evaluate(workers[1], hidden)).tensors
        body = (await driver.evaluate(workers[2], {**hidden, "labels": wire_ids(labels)})).body
        assert (body.loss_sum, body.num_tokens, body.applied) == (loss_sum, num_tokens, ())
        for running in workers:  # Held-out data leave nothing behind.
            assert running.worker.replica.cached_bytes == running.worker.replica.accumulated.num_micro_batches == 0
        if routing == "hub":
            replies = await driver.hub(workers, KEY, ids, labels)
            assert [reply.body.applied for reply in replies] == [("tail",), ("body-1",), ("head",)]
            body = replies[0].body
        else:
            body = (await driver.chain(workers, KEY, ids, labels)).body
            assert body.applied == STAGES
        assert (body.loss_sum, body.num_tokens) == (loss_sum, num_tokens)
        sums = {name: it for each in workers for name, it in each.worker.replica.state_dict()["sums"].items()}
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(sums[name], parameter.grad, rtol=1e-5, atol=1e-6)
