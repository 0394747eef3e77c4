"""Whether workers compute what they say: now and then one's answer is compared with another worker's.

An answer of the right form and full of noise passes every other check, and a worker that makes such answers is the
fastest of its stage. So one forward pass in `audit_every`, drawn where no worker can foresee it, is evaluated by a
second worker of the stage, whose evaluation counts nothing; where the two differ, by a third. Who differs from two
others, none of whom differs from as many, is wrong, and banned as one that answers nonsense. Likewise the tail, by its
loss.

The comparison is rough, since replicas of a stage drift apart between averages: activations are alike if their cosine
is `MIN_COSINE` or more, losses if they differ by less than half, or less than `MIN_NATS` a label. It finds noise, zeros
and constants within some `audit_every` passes of a worker. It does not find one that comes close (by handing on its
input, say, or with a subspace codec, by which the tokens' fixed rows are part of every activation, zeros), one that
lies in gradients only, or a majority of liars. By chain (000) the driver sees no activations: all of a pass is then
evaluated for the sake of the comparison, which a worker can tell that computes well only then. In a stage with one
worker there is nobody to compare with, and of two that differ none is banned; the status says so.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

import torch
from torch import Tensor

from trainer.driver.asking import Answered, StageCaller
from trainer.driver.links import LinkForm
from trainer.driver.pool import StagePool
from trainer.driver.refusals import Verdict
from trainer.driver.results import AuditStatus
from trainer.driver.workers import StageWorker
from trainer.errors import CodecError, NonFiniteActivationError, RpcError
from trainer.pipeline.wire import ACTIVATION, part_of
from trainer.pipeline.work import MicroBatch
from trainer.rpc.boundary import peer_boundary

__all__ = ["MIN_COSINE", "MIN_NATS", "Auditor"]

logger = logging.getLogger(__name__)

MIN_COSINE = 0.5
MIN_NATS = 1.0
_TO_CONVICT = 2
"""Others that one has to differ from."""
_LIED = Verdict("audit", "none", "long-ban")


class Auditor:
    """Compares workers of a stage with each other, one comparison at a time, beside the work.

    Args:
        pools: of the stages, in order.
        caller: asks the workers.
        form: of the links.
        every: one forward pass in so many; 0: none.
        failures: where liars are counted, as ``audit``.
        seed: of the draws; None: not to be foreseen.
    """

    def __init__(
        self,
        pools: Mapping[str, StagePool],
        caller: StageCaller,
        form: LinkForm,
        every: int,
        failures: Counter[str],
        seed: int | None = None,
    ) -> None:
        self._pools = pools
        self._caller = caller
        self._form = form
        self._every = every
        self._failures = failures
        self._random = random.Random(seed)
        self._task: asyncio.Task[None] | None = None
        self._compared = self._disputed = 0
        self._unopposed: set[str] = set()
        self._liars: Counter[str] = Counter()
        self._disputes: defaultdict[str, set[str]] = defaultdict(set)
        """Keys of those whom a worker differed from when they were last compared."""

    def status(self) -> AuditStatus:
        """What has come of it."""
        return AuditStatus(self._compared, self._disputed, tuple(sorted(self._unopposed)), dict(self._liars))

    def passed(
        self, worker: StageWorker, micro_batch: MicroBatch, given: Mapping[str, Tensor], answered: Answered
    ) -> None:
        """A stage has answered; perhaps it is compared.

        Args:
            worker: who answered.
            micro_batch: which.
            given: the stage's input, as it was sent.
            answered: output, or the tail's loss.
        """
        self._perhaps(lambda: self._compare(worker, micro_batch, given, answered))

    def chained(self, micro_batch: MicroBatch) -> None:
        """A micro-batch went its way from worker to worker; perhaps all stages are compared."""
        self._perhaps(lambda: self._walk(micro_batch))

    async def close(self) -> None:
        """Ends a comparison that is under way."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    # -- inside --------------------------------------------------------------------------------------------------------

    def _perhaps(self, begin: Callable[[], Coroutine[Any, Any, None]]) -> None:
        is_drawn = self._every > 0 and self._random.randrange(self._every) == 0
        if is_drawn and (self._task is None or self._task.done()):
            self._task = asyncio.create_task(self._audit(begin()), name="driver-audit")

    async def _audit(self, comparison: Coroutine[Any, Any, None]) -> None:
        try:
            await comparison
        except (RpcError, CodecError, NonFiniteActivationError) as error:
            logger.info("a comparison of workers came to nothing: %s", error)

    async def _walk(self, micro_batch: MicroBatch) -> None:
        """Takes a micro-batch through evaluations of all stages, and compares each."""
        activation: Mapping[str, Tensor] | None = None
        for stage in self._pools:
            workers = self._workers(stage)
            if not workers:
                return
            given = self._form.input_of(micro_batch, activation)
            answered = await self._evaluated(workers[0], micro_batch, given)
            await self._compare(workers[0], micro_batch, given, answered)
            activation = part_of(ACTIVATION, answered.tensors)

    async def _compare(
        self, worker: StageWorker, micro_batch: MicroBatch, given: Mapping[str, Tensor], answered: Answered
    ) -> None:
        """Compares an answer with another worker's, and where they differ with a third one's."""
        others = [other for other in self._workers(worker.stage) if other.key != worker.key]
        self._note_unopposed(worker, is_alone=not others)
        found = {worker: await self._value(worker, answered, micro_batch)}
        for other in others[:2]:
            found[other] = await self._value(other, await self._evaluated(other, micro_batch, given), micro_batch)
            alike = [self._note(other, known, found) for known in found if known is not other]
            self._compared += 1
            if all(alike):
                return
            self._disputed += 1
        if len(found) > 1:
            self._judge(list(found), is_settled=len(found) > _TO_CONVICT)

    def _note(self, one: StageWorker, other: StageWorker, found: Mapping[StageWorker, Tensor | float]) -> bool:
        """Whether two are alike, which is kept."""
        is_alike = _alike(found[one], found[other])
        for worker, against in ((one, other), (other, one)):
            (self._disputes[worker.key].discard if is_alike else self._disputes[worker.key].add)(against.key)
            if not self._disputes[worker.key]:
                del self._disputes[worker.key]
        return is_alike

    def _judge(self, workers: list[StageWorker], *, is_settled: bool) -> None:
        """Bans who differs from two others, unless one of these differs from as many."""
        by_key = {worker.key: worker for worker in workers}
        liar = max(workers, key=lambda worker: len(self._disputes.get(worker.key, ())))
        against = self._disputes.get(liar.key, set())
        if len(against) < _TO_CONVICT or any(len(self._disputes[key]) >= len(against) for key in against):
            if not is_settled:
                first, second = workers
                logger.warning("%s and %s differ; a third worker of the stage would show who is wrong", first, second)
            return
        logger.error(
            "%s computes something else than %s", liar, " and ".join(str(by_key.get(key, key[:12])) for key in against)
        )
        self._liars[liar.uid] += 1
        self._failures[_LIED.reason] += 1
        self._pools[liar.stage].blame(liar, _LIED, time.monotonic())
        for key in self._disputes.pop(liar.key):
            self._disputes[key].discard(liar.key)

    def _note_unopposed(self, worker: StageWorker, *, is_alone: bool) -> None:
        if is_alone and worker.stage not in self._unopposed:
            logger.info("stage %s has a single worker: nothing shows whether it computes what it says", worker.stage)
        (self._unopposed.add if is_alone else self._unopposed.discard)(worker.stage)

    def _workers(self, stage: str) -> list[StageWorker]:
        """Those of a stage that are not banned, in any order."""
        usable = list(self._pools[stage].usable())
        self._random.shuffle(usable)
        return usable

    async def _evaluated(self, worker: StageWorker, micro_batch: MicroBatch, given: Mapping[str, Tensor]) -> Answered:
        return await self._caller.evaluate(worker, micro_batch, given, is_tail=worker.stage == list(self._pools)[-1])

    async def _value(self, worker: StageWorker, answered: Answered, micro_batch: MicroBatch) -> Tensor | float:
        """What is compared: the tail's loss of a label, else the activation."""
        if answered.body.loss_sum is not None:
            return answered.body.loss_sum / max(1, answered.body.num_tokens)
        tensors = part_of(ACTIVATION, answered.tensors)
        with peer_boundary(str(worker)):
            return await asyncio.to_thread(self._form.codec.decode, tensors, micro_batch.input_ids)


def _alike(one: Tensor | float, other: Tensor | float) -> bool:
    """Whether two answers may be those of two replicas."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        norms = float(one.norm()) * float(other.norm())
        if not norms:
            return torch.equal(one, other)  # Some first weights make zeros.
        return float(torch.vdot(one.flatten(), other.flatten())) >= MIN_COSINE * norms
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        return False
    return abs(one - other) < max(MIN_NATS, max(one, other) / 2)
