"""The driver's side of a worker's methods, by hand: one request at a time, tensors handed on as they come."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager

from torch import Tensor

from tests.support.stage_worker import FAST, RUN_ID, RunningWorker, StageProcess
from trainer.model.loss import IGNORED_LABEL
from trainer.network.rpc import Endpoint, Identity, Peer, RpcConfig
from trainer.pipeline.protocol import messages
from trainer.pipeline.protocol.tensors import TensorAnswer, ask_tensors
from trainer.pipeline.protocol.wire import part_of, wire_ids
from trainer.pipeline.worker.status import STATUS, StatusAnswer, StatusAsk

__all__ = ["StageDriver", "running_driver"]

Reply = TensorAnswer[messages.StageAnswer]
Worker = RunningWorker | StageProcess

_ANSWER_BYTES = 256 << 20


class StageDriver:
    """Asks workers.

    Args:
        endpoint: started.
        needs_ids: whether the codec wants ids everywhere.
    """

    def __init__(self, endpoint: Endpoint, *, needs_ids: bool = False) -> None:
        self.endpoint = endpoint
        self._needs_ids = needs_ids

    async def forward(self, worker: Worker, key: str, tensors: Mapping[str, Tensor], **changes: object) -> Reply:
        return await self.ask(worker, messages.FORWARD, messages.ForwardAsk, key, tensors, changes)

    async def backward(self, worker: Worker, key: str, tensors: Mapping[str, Tensor], **changes: object) -> Reply:
        return await self.ask(worker, messages.BACKWARD, messages.BackwardAsk, key, tensors, changes)

    async def tail(self, worker: Worker, key: str, tensors: Mapping[str, Tensor], **changes: object) -> Reply:
        return await self.ask(worker, messages.TAIL, messages.TailAsk, key, tensors, changes)

    async def evaluate(self, worker: Worker, tensors: Mapping[str, Tensor]) -> Reply:
        return await self.ask(worker, messages.EVALUATE, messages.EvaluateAsk, "e0.s0.r0", tensors, {})

    async def chain(self, workers: Sequence[Worker], key: str, ids: Tensor, labels: Tensor, **changes: object) -> Reply:
        route = tuple(_hop(worker) for worker in workers[1:])
        tensors = {"ids": wire_ids(ids), "labels": wire_ids(labels)}
        return await self.ask(workers[0], messages.CHAIN, messages.ChainAsk, key, tensors, {"route": route, **changes})

    async def hub(self, workers: Sequence[Worker], key: str, ids: Tensor, labels: Tensor) -> list[Reply]:
        """A micro-batch through all stages and back; what each answered, the tail first."""
        sent_ids, sent_labels = wire_ids(ids), wire_ids(labels)
        beside = {"ids": sent_ids} if self._needs_ids else {}
        inputs: list[dict[str, Tensor]] = [{"ids": sent_ids}]
        versions = []
        for worker in workers[:-1]:
            reply = await self.forward(worker, key, inputs[-1])
            inputs.append({**reply.tensors, **beside})
            versions.append(reply.body.version)
        replies = [await self.tail(workers[-1], key, {**inputs[-1], "labels": sent_labels})]
        num_tokens = int((labels != IGNORED_LABEL).sum())
        for worker, x, version in zip(workers[-2::-1], inputs[-2::-1], versions[::-1], strict=True):
            gradient = part_of("gradient", replies[-1].tensors)
            changes = {"forward_version": version, "num_tokens": num_tokens}
            replies.append(await self.backward(worker, key, {**x, **gradient}, **changes))
        return replies

    async def applied(self, worker: Worker, *keys: str, refuse_from_now: bool = False) -> tuple[str, ...]:
        ask = messages.AppliedAsk(micro_batches=keys, refuse_from_now=refuse_from_now)
        reply = await self.endpoint.call(worker.peer, messages.APPLIED, ask, messages.AppliedAnswer, timeout_s=20)
        return reply.body.micro_batches

    async def status(self, worker: Worker) -> StatusAnswer:
        return (await self.endpoint.call(worker.peer, STATUS, StatusAsk(), StatusAnswer, timeout_s=20)).body

    async def ask(
        self,
        worker: Worker,
        method: str,
        model: type[messages.StageAsk],
        key: str,
        tensors: Mapping[str, Tensor],
        changes: Mapping[str, object],
    ) -> Reply:
        first = next(iter(tensors.values()))
        fields: dict[str, object] = {
            "micro_batch": key,
            "stage": worker.setup.stage,
            "num_rows": first.shape[0],
            "num_positions": first.shape[1],
            "answer_within_s": 30.0,
        }
        if model is not messages.ForwardAsk and model is not messages.EvaluateAsk:
            fields["apply_within_s"] = 30.0
        if model is messages.BackwardAsk:
            fields |= {"forward_version": 0, "num_tokens": first.shape[0] * first.shape[1]}
        return await ask_tensors(
            self.endpoint,
            worker.peer,
            method,
            model.model_validate({**fields, **changes}),
            tensors,
            messages.StageAnswer,
            answer_bytes=_ANSWER_BYTES,
            timeout_s=30.0,
        )


def _hop(worker: Worker) -> messages.Hop:
    peer: Peer = worker.peer
    assert peer.peer_id is not None
    pem = peer.certificate.decode() if peer.certificate else ""
    return messages.Hop(stage=worker.setup.stage, peer_id=peer.peer_id, address=peer.address, certificate_pem=pem)


@asynccontextmanager
async def running_driver(*, needs_ids: bool = False) -> AsyncIterator[StageDriver]:
    """One in this process."""
    endpoint = Endpoint(Identity.create(), RUN_ID, RpcConfig(**FAST))
    await endpoint.start()
    try:
        yield StageDriver(endpoint, needs_ids=needs_ids)
    finally:
        await endpoint.stop()
