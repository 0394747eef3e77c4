"""Ours: a `StageWorker` with its real service, and who asks it by `ask_tensors`; plain and with TLS.

The replica computes backward passes from the input again (``recompute``), as hivemind's backend does, so that both do
the same for a forward pass.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch

from scripts.baselines.swarm.stage_call import (
    DIM,
    NUM_POSITIONS,
    Scale,
    SlowScale,
    activation,
    session_cpu_s,
    timed_calls,
)
from scripts.baselines.trainer.serving import serve
from trainer.compression.activations import activation_codec
from trainer.inner import InnerConfig
from trainer.model.config import ModelConfig
from trainer.model.plan import StagePlan
from trainer.network.rpc import Endpoint, Identity, Peer, RpcConfig
from trainer.pipeline.protocol.messages import FORWARD, ForwardAsk, StageAnswer
from trainer.pipeline.protocol.tensors import TensorAnswer, ask_tensors
from trainer.pipeline.stage import StageConfig, StageReplica
from trainer.pipeline.worker import StageWorker, WorkerConfig
from trainer.run.node.loop_thread import LoopThread

RUN_ID = "bench"
STAGE = "body-1"
_START_S = 20.0
_CALL_S = 60.0
_KEPT_BYTES = 64 << 20
_NEVER = 1 << 40
_PLAN = StagePlan.of(
    ModelConfig(
        vocab_size=1024, dim=DIM, num_layers=3, num_heads=8, num_kv_heads=8, ffn_dim=DIM, max_seq_len=NUM_POSITIONS
    ),
    3,
)


class StageMember:
    """One process: a worker, or who asks it."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        self._loop = LoopThread("bench")
        self._loop.start()
        self._endpoints: dict[str, Endpoint] = {}
        self._workers: dict[str, StageWorker] = {}
        self._peers: dict[str, Peer] = {}
        self._numbers = itertools.count()

    def serve(self, name: str, tls: bool, pass_s: float = 0.0) -> dict[str, Any]:
        """Starts a worker that takes at least ``pass_s`` for a forward pass; how to reach it."""
        module = SlowScale(pass_s) if pass_s else Scale()
        replica = StageReplica(
            module,
            torch.optim.SGD(module.parameters()),
            InnerConfig(precision="fp32", compile="off"),
            StageConfig(backward="recompute", max_cached_bytes=_KEPT_BYTES),
            kind="body",
            num_stages=3,
        )
        endpoint = self._open(name, tls)
        worker = StageWorker(
            endpoint, _PLAN, STAGE, replica, activation_codec("fp32"), WorkerConfig(), target_tokens=_NEVER
        )
        worker.register()
        self._loop.run(endpoint.start(), _START_S)
        worker.start()
        worker.service.accepts = "all"
        self._loop.spawn(worker.run())
        self._workers[name] = worker
        certificate = endpoint.certificate.decode() if endpoint.certificate else None
        return {"peer": [endpoint.peer_id, endpoint.address, certificate]}

    def leave(self, name: str) -> dict[str, Any]:
        """Ends a worker, whatever it is at."""
        worker, endpoint = self._workers.pop(name), self._endpoints.pop(name)
        self._loop.run(endpoint.stop(), _START_S)
        self._loop.spawn(worker.stop())
        return {}

    def connect(self, name: str, tls: bool, peer: list[str | None]) -> dict[str, Any]:
        """Gets ready to ask a worker."""
        endpoint = self._open(name, tls)
        self._loop.run(endpoint.start(), _START_S)
        peer_id, address, certificate = peer
        self._peers[name] = Peer(peer_id, str(address), certificate.encode() if certificate else None)
        return {}

    def call(self, name: str, rows: int, count: int, in_flight: int) -> dict[str, Any]:
        """Forward passes, one micro-batch after another."""
        x = activation(rows)

        def once() -> TensorAnswer[StageAnswer]:
            return self._loop.run(self._asked(name, {"activation": x}), _CALL_S)

        answer = once()
        if not torch.equal(answer.tensors["activation"], 2 * x):
            raise SystemExit("expected twice the input, found something else")
        return timed_calls(once, count, in_flight)

    def cpu(self) -> dict[str, Any]:
        """Processor time so far."""
        return {"session_cpu_s": session_cpu_s()}

    def _open(self, name: str, tls: bool) -> Endpoint:
        endpoint = Endpoint(Identity.create(), RUN_ID, RpcConfig(host="127.0.0.1", tls=tls, stop_grace_s=0.05))
        self._endpoints[name] = endpoint
        return endpoint

    async def _asked(self, name: str, tensors: dict[str, torch.Tensor]) -> TensorAnswer[StageAnswer]:
        x = tensors["activation"]
        ask = ForwardAsk(
            micro_batch=f"e0.s0.r{next(self._numbers)}",
            stage=STAGE,
            num_rows=x.shape[0],
            num_positions=x.shape[1],
            answer_within_s=_CALL_S,
        )
        return await ask_tensors(
            self._endpoints[name],
            self._peers[name],
            FORWARD,
            ask,
            tensors,
            StageAnswer,
            answer_bytes=x.numel() * x.element_size(),
            timeout_s=_CALL_S,
        )


if __name__ == "__main__":
    member = StageMember()
    serve(
        {
            "serve": member.serve,
            "leave": member.leave,
            "connect": member.connect,
            "call": member.call,
            "cpu": member.cpu,
        }
    )
