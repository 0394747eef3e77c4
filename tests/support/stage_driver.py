"""The driver's side of a worker's methods, by hand: one request at a time, tensors handed on as they come."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager

from torch import Tensor

from tests.support.stage_worker import FAST, RUN_ID, RunningWorker, StageProcess
from trainer.model.loss import IGNORED_LABEL
from trainer.network.rpc import Endpoint, Identity, RpcConfig
from trainer.pipeline.protocol import messages
from trainer.pipeline.protocol.tensors import TensorAnswer, ask_tensors
from trainer.pipeline.protocol.wire import part_of, wire_ids
from trainer.pipeline.worker.status import STATUS, StatusAnswer, StatusAsk

Reply = TensorAnswer[messages.StageAnswer]
Worker = RunningWorker | StageProcess


class StageDriver:
    """Asks workers; ``needs_ids``: whether the codec wants ids everywhere."""

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
        """What each answered, the tail first."""
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
        shape = {"num_rows": first.shape[0], "num_positions": first.shape[1]}
        known = {"apply_within_s": 30.0, "forward_version": 0, "num_tokens": first.shape[0] * first.shape[1]}
        fields = {name: value for name, value in known.items() if name in model.model_fields}
        fields |= {"micro_batch": key, "stage": worker.setup.stage, "answer_within_s": 30.0, **shape, **changes}
        ask, limits = model.model_validate(fields), {"answer_bytes": 256 << 20, "timeout_s": 30.0}
        return await ask_tensors(self.endpoint, worker.peer, method, ask, tensors, messages.StageAnswer, **limits)


def _hop(worker: Worker) -> messages.Hop:
    pem = (worker.peer.certificate or b"").decode()
    peer = {"peer_id": worker.peer.peer_id, "address": worker.peer.address, "certificate_pem": pem}
    return messages.Hop(stage=worker.setup.stage, **peer)


@asynccontextmanager
async def running_driver(*, needs_ids: bool = False) -> AsyncIterator[StageDriver]:
    endpoint = Endpoint(Identity.create(), RUN_ID, RpcConfig(**FAST))
    await endpoint.start()
    try:
        yield StageDriver(endpoint, needs_ids=needs_ids)
    finally:
        await endpoint.stop()
