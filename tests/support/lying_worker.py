"""A worker that answers without computing anything, in the right form but for its lie."""

from __future__ import annotations

import math
import secrets
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from trainer.network.rpc import Endpoint, Identity, PeerId, Reply, Request, RpcConfig
from trainer.network.transfer.descriptor import TensorSpec
from trainer.pipeline.protocol import messages
from trainer.pipeline.protocol.tensors import TensorAnswer, TensorService

MAX_BYTES = 1 << 26
Answer = TensorAnswer[messages.StageAnswer]
Bodies = Callable[[messages.StageAnswer], dict[str, Any]]
Tensors = Callable[[Tensor], dict[str, Tensor]]


def _impossible(*shape: int) -> TensorSpec:
    """What no receiver would take for a description of a tensor."""
    return TensorSpec.model_construct(name="activation", dtype="float32", shape=shape)


@dataclass(frozen=True)
class Lie:
    methods: tuple[str, ...]
    """Where; all others are answered in the right form."""
    body: Bodies = lambda _: {}
    tensors: Tensors = lambda tensor: {"": tensor}
    """By the suffix of the tensor's name; the empty one: as it should be."""
    announces: tuple[TensorSpec, ...] = ()
    """Tensors that are said to follow, and do not."""


_ASKS: dict[str, type[messages.StageAsk]] = {
    messages.FORWARD: messages.ForwardAsk,
    messages.BACKWARD: messages.BackwardAsk,
    messages.TAIL: messages.TailAsk,
    messages.CHAIN: messages.ChainAsk,
}
_FORWARD = (messages.FORWARD,)
_COUNTING = (messages.BACKWARD, messages.TAIL, messages.CHAIN)
_ANY = (*_FORWARD, *_COUNTING)

LIES: dict[str, Lie] = {
    "NaN activations": Lie(_FORWARD, tensors=lambda t: {"": t * math.nan}),
    "NaN gradients": Lie(_COUNTING, tensors=lambda t: {"": t / 0.0}),
    "fewer positions": Lie(_ANY, tensors=lambda t: {"": t[:, 1:].contiguous()}),
    "a wider activation": Lie(_FORWARD, tensors=lambda t: {"": torch.cat([t, t], dim=-1)}),
    "another type": Lie(_ANY, tensors=lambda t: {"": t.to(torch.float64)}),
    "more tensors": Lie(_ANY, tensors=lambda t: {"": t, ".more": t}),
    "a terabyte announced": Lie(_ANY, announces=(TensorSpec(name="activation", dtype="float32", shape=(1 << 38,)),)),
    "an empty tensor of a vast shape": Lie(_ANY, announces=(_impossible(0, 2**47, 2**47),)),
    "a dimension beyond 63 bits": Lie(_ANY, announces=(_impossible(2**63),)),
    "a negative dimension": Lie(_ANY, announces=(_impossible(-1),)),
    "a number beyond 53 bits": Lie(_ANY, body=lambda _: {"version": 2**62}),
    "no tensors": Lie(_ANY, tensors=lambda _: {}),
    "other rows": Lie(_ANY, body=lambda body: {"num_rows": body.num_rows + 1}),
    "counted in a forward pass": Lie(_FORWARD, body=lambda _: {"applied": ("body-1",), "applied_number": 1}),
    "not counted": Lie(_COUNTING, body=lambda _: {"applied": ()}),
    "counted elsewhere": Lie(_COUNTING, body=lambda _: {"applied": ("head",)}),
    "counted as none": Lie(_COUNTING, body=lambda _: {"applied_number": 0}),
    "a negative loss": Lie((messages.TAIL, messages.CHAIN), body=lambda _: {"loss_sum": -1.0}),
    "no loss": Lie((messages.TAIL, messages.CHAIN), body=lambda _: {"loss_sum": None}),
    "all counted behind it": Lie((messages.CHAIN,)),
    "more labels": Lie((messages.TAIL, messages.CHAIN), body=lambda body: {"num_tokens": body.num_tokens + 1}),
}
"""By name."""


@dataclass
class Liar:
    stage: str
    lie: Lie
    dim: int
    says_counted: bool = False
    """Whether it says, when it is asked, that it has counted whatever it is asked about."""
    stages: tuple[str, ...] = ("head", "body-1", "tail")
    """Of the run, for what it says of those behind it."""
    incarnation: str = field(default_factory=lambda: secrets.token_hex(8))
    asked: Counter[str] = field(default_factory=Counter)
    """Requests, by method."""

    def register(self, endpoint: Endpoint) -> None:
        """Makes the methods of a stage answerable; before the endpoint starts."""
        service = TensorService(endpoint)
        for method, ask in _ASKS.items():
            if self.lie.announces:
                endpoint.register(method, ask, self._announcing(method))
            else:
                service.register(method, ask, self._answering(method), max_bytes=MAX_BYTES)
        endpoint.register(messages.APPLIED, messages.AppliedAsk, self._applied)

    def _announcing(self, method: str) -> Any:
        async def answer(request: Request[messages.StageAsk]) -> Reply[messages.StageAnswer]:
            self.asked[method] += 1
            body = messages.StageAnswer(incarnation=self.incarnation, version=0, num_rows=request.body.num_rows)
            return Reply(body.model_copy(update={"tensors": self.lie.announces}))

        return answer

    def _answering(self, method: str) -> Any:
        async def answer(_: PeerId, ask: messages.StageAsk, tensors: dict[str, Tensor]) -> Answer:
            self.asked[method] += 1
            true = self._true_answer(method, ask, tensors)
            if method not in self.lie.methods:
                return true
            lies = {name: self.lie.tensors(tensor) for name, tensor in true.tensors.items()}
            changed = {name + suffix: lie for name, each in lies.items() for suffix, lie in each.items()}
            return TensorAnswer(true.body.model_copy(update=self.lie.body(true.body)), changed)

        return answer

    def _true_answer(self, method: str, ask: messages.StageAsk, tensors: dict[str, Tensor]) -> Answer:
        """In the right form, of values out of nowhere."""
        values = torch.randn(ask.num_rows, ask.num_positions, self.dim) * 0.1
        body = messages.StageAnswer(incarnation=self.incarnation, version=0, num_rows=ask.num_rows)
        if method == messages.FORWARD:
            return TensorAnswer(body, {"activation": values})
        behind = self.stages[self.stages.index(self.stage) :] if method == messages.CHAIN else (self.stage,)
        number = {"applied_number": self.asked.total(), "applied": behind}
        if "labels" in tensors:
            number |= {"loss_sum": 100.0, "num_tokens": int((tensors["labels"] >= 0).sum())}
        return TensorAnswer(body.model_copy(update=number), {} if self.stage == "head" else {"gradient": values})

    async def _applied(self, request: Request[messages.AppliedAsk]) -> Reply[messages.AppliedAnswer]:
        self.asked[messages.APPLIED] += 1
        counted = request.body.micro_batches if self.says_counted else ()
        return Reply(messages.AppliedAnswer(incarnation=self.incarnation, micro_batches=counted))


@asynccontextmanager
async def lying_worker(
    stage: str, lie: Lie, *, dim: int, run_id: str, rpc: RpcConfig, says_counted: bool = False
) -> AsyncIterator[tuple[Liar, Endpoint]]:
    liar, endpoint = Liar(stage, lie, dim, says_counted), Endpoint(Identity.create(), run_id, rpc)
    liar.register(endpoint)
    await endpoint.start()
    try:
        yield liar, endpoint
    finally:
        await endpoint.stop()
