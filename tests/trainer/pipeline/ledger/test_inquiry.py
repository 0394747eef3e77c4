"""Workers on real sockets are asked what they have counted."""

from __future__ import annotations

from tests.support.event_loop import on_event_loop
from tests.support.rpc_pair import running_endpoint
from trainer.network.rpc import Endpoint, Peer, Reply, Request
from trainer.pipeline.ledger import WorkerInquiry
from trainer.pipeline.protocol.messages import APPLIED, AppliedAnswer, AppliedAsk

KEYS = tuple(f"e0.s0.r{row}" for row in range(1100))


def answer_with(endpoint: Endpoint, incarnation: str, counted: set[str], asked: list[AppliedAsk]) -> None:
    async def answer(request: Request[AppliedAsk]) -> Reply[AppliedAnswer]:
        asked.append(request.body)
        mine = tuple(key for key in request.body.micro_batches if key in counted)
        return Reply(AppliedAnswer(incarnation=incarnation, micro_batches=(*mine, "e9.s9.r0")))

    endpoint.register(APPLIED, AppliedAsk, answer)


@on_event_loop
async def test_a_stage_has_counted_what_any_of_its_workers_has_and_who_is_silent_is_said() -> None:
    asked: list[AppliedAsk] = []
    async with running_endpoint() as own, running_endpoint() as one, running_endpoint() as two:
        answer_with(one, "1" * 16, {KEYS[0], KEYS[1050]}, asked)
        answer_with(two, "2" * 16, {KEYS[1]}, asked)
        workers = [("head", one.peer), ("head", two.peer)]
        inquiry = WorkerInquiry(own, lambda: workers, timeout_s=5.0)
        report = await inquiry(KEYS)
        assert report.applied == {"head": {KEYS[0], KEYS[1], KEYS[1050]}}
        assert (report.answered, report.silent) == ({"1" * 16, "2" * 16}, 0)
        assert {key for ask in asked for key in ask.micro_batches} == set(KEYS)
        assert all(ask.refuse_from_now for ask in asked)
        workers.append(("tail", Peer("f" * 64, "127.0.0.1:9")))
        report = await inquiry(KEYS[:2])
        assert report.applied == {"head": {KEYS[0], KEYS[1]}}
        assert (report.answered, report.silent) == ({"1" * 16, "2" * 16}, 1)


@on_event_loop
async def test_a_worker_that_forgets_while_it_is_asked_has_not_answered() -> None:
    incarnations = iter(["1" * 16, "2" * 16, "2" * 16])
    async with running_endpoint() as own, running_endpoint() as worker:

        async def answer(request: Request[AppliedAsk]) -> Reply[AppliedAnswer]:
            return Reply(AppliedAnswer(incarnation=next(incarnations), micro_batches=request.body.micro_batches))

        worker.register(APPLIED, AppliedAsk, answer)
        report = await WorkerInquiry(own, lambda: [("head", worker.peer)])(KEYS)
        assert (report.applied, report.answered, report.silent) == ({}, frozenset(), 1)
