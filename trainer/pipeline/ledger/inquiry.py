"""Asks all workers which micro-batches of a lease that ran out they have counted, and tells them to count no more.

The report says which workers answered, since one that does not answer may have counted any of the micro-batches.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from trainer.errors import RpcError
from trainer.network.rpc import Endpoint, Peer
from trainer.network.rpc.token_buckets import TokenBuckets
from trainer.pipeline.protocol.messages import APPLIED, AppliedAnswer, AppliedAsk
from trainer.pipeline.protocol.work import MicroBatchKey

__all__ = ["AppliedInquiry", "AppliedReport", "WorkerInquiry"]

logger = logging.getLogger(__name__)

_AT_ONCE = 512
"""Micro-batches asked for in one call: 30 bytes each, within the 64 KiB a message may have."""
_LOG_INTERVAL_S = 60.0


@dataclass(frozen=True, slots=True)
class AppliedReport:
    """What the workers answered."""

    applied: Mapping[str, frozenset[MicroBatchKey]]
    """By stage: counted by at least one of its workers."""
    answered: frozenset[str]
    """Incarnations of the workers that answered for all that was asked."""
    silent: int = 0
    """How many did not."""


AppliedInquiry: TypeAlias = Callable[[Sequence[MicroBatchKey]], Awaitable[AppliedReport]]
"""Asks every worker of every stage; from then on they refuse what they had not counted of it."""


class WorkerInquiry:
    """Asks over the network."""

    def __init__(
        self, endpoint: Endpoint, workers: Callable[[], Iterable[tuple[str, Peer]]], timeout_s: float = 10.0
    ) -> None:
        self._endpoint = endpoint
        self._workers = workers
        self._timeout_s = timeout_s
        self._log_limit = TokenBuckets(1.0, 1.0 / _LOG_INTERVAL_S)

    async def __call__(self, micro_batches: Sequence[MicroBatchKey]) -> AppliedReport:
        """Asks all workers at once."""
        workers = list(self._workers())
        answers = await asyncio.gather(*(self._ask(peer, micro_batches) for _, peer in workers))
        applied: dict[str, frozenset[str]] = {}
        answered = set()
        for (stage, _), answer in zip(workers, answers, strict=True):
            if answer is not None:
                answered.add(answer[0])
                applied[stage] = applied.get(stage, frozenset()) | answer[1]
        return AppliedReport(applied, frozenset(answered), answers.count(None))

    async def _ask(self, peer: Peer, micro_batches: Sequence[str]) -> tuple[str, frozenset[str]] | None:
        """Returns a worker's incarnation, and what it has counted; None: no answer, or it restarted in between."""
        incarnations: set[str] = set()
        applied: set[str] = set()
        for first in range(0, len(micro_batches), _AT_ONCE):
            part = tuple(micro_batches[first : first + _AT_ONCE])
            ask = AppliedAsk(micro_batches=part, refuse_from_now=True)
            try:
                reply = await self._endpoint.call(peer, APPLIED, ask, AppliedAnswer, timeout_s=self._timeout_s)
            except RpcError as error:
                if self._log_limit.take(peer.address):  # Each lease that runs out asks all workers.
                    logger.info("%s does not say what it has counted: %s", peer.address, error)
                return None
            incarnations.add(reply.body.incarnation)
            applied.update(set(reply.body.micro_batches) & set(part))
        return (incarnations.pop(), frozenset(applied)) if len(incarnations) == 1 else None
