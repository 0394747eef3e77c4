"""Whether workers compute what they say: some of their answers are compared with another worker's.

Of a random share of the micro-batches that a worker has counted, a second worker evaluates the same input and upstream
gradient, which counts nothing. Where they are not alike, a third one is asked, and each is examined by itself: an
honest worker's gradient predicts how its output changes when the input moves. A worker that contradicts itself while
another does not is wrong; else one that differs from two others that are alike; else both are named, and work on.

A comparison costs 0.77 of a counted pass; at one in 64 that is 1.2 %. Not found are: a worker that lies in chains only;
one whose answers are closer than replicas are to each other; one whose lie about the same input is always the same and
the gradient of its other lie, where it is one of two or most lie alike.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trainer.errors import CodecError, NonFiniteActivationError, RpcError
from trainer.network.rpc.envelope import peer_boundary
from trainer.pipeline.driver.pool import StagePool
from trainer.pipeline.driver.results import AuditStatus, Verdict
from trainer.pipeline.driver.stage_caller import Answered, LinkForm, StageCaller
from trainer.pipeline.driver.workers import StageWorker
from trainer.pipeline.protocol.wire import ACTIVATION, GRADIENT, part_of
from trainer.pipeline.protocol.work import MicroBatch

logger = logging.getLogger(__name__)

STRIKES = 2  # Times to be found wrong after which a worker is banned.
FORGIVEN_AFTER = 8
_PASSED_PER_HALVING = 2
_MAX_WORKERS = 4096
_WITNESSES = 2
_EXAMINED_TIMES = 3
_LIED = Verdict("audit", "none", "long-ban")
MIN_COSINE = 0.3
MAX_RATIO = 4.0  # Of the larger norm to the smaller one.
MIN_NATS = 1.0  # A label; losses are also alike if they differ by less than half.
MAX_SLOPE_RATIO = 4.0  # Between the change that a gradient predicts and the one that is seen.
_NUDGE = 0.05  # Of each position's norm.
_UNUSABLE = (RpcError, CodecError, NonFiniteActivationError)


@dataclass(slots=True)
class _Record:
    passed: int = 0
    passed_in_a_row: int = 0
    strikes: float = 0.0


class AuditRates:
    """How often each worker is audited, by key.

    A new worker is audited with each of its first micro-batches, then with half of them, a quarter and so on as it
    passes, down to one in ``every`` (0: never); one that was found wrong, with each until it has passed
    `FORGIVEN_AFTER` times.
    """

    def __init__(self, every: int) -> None:
        self._every = every
        self._records: dict[str, _Record] = {}  # The last one used at the end.

    def rate(self, key: str) -> float:
        """Returns the share of a worker's micro-batches that is audited, 0 to 1."""
        if not self._every:
            return 0.0
        record = self._records.get(key, _Record())
        if record.strikes:
            return 1.0
        return max(1.0 / self._every, 2.0 ** -min(record.passed // _PASSED_PER_HALVING, 64))

    def passed(self, key: str) -> None:
        """Counts a comparison that found a worker right."""
        record = self._record(key)
        record.passed += 1
        record.passed_in_a_row += 1
        if record.passed_in_a_row >= FORGIVEN_AFTER:
            record.strikes = 0.0

    def struck(self, key: str, weight: float = 1.0) -> bool:
        """Counts a comparison that found a worker wrong; returns whether it was the last, so its record starts anew."""
        record = self._record(key)
        record.passed_in_a_row = 0
        record.strikes += weight
        if record.strikes < STRIKES:
            return False
        self._records[key] = _Record()
        return True

    def _record(self, key: str) -> _Record:
        record = self._records[key] = self._records.pop(key, _Record())
        if len(self._records) > _MAX_WORKERS:
            del self._records[next(iter(self._records))]
        return record


@dataclass(frozen=True, slots=True, eq=False)
class Visit:
    """A micro-batch's visit at one worker, which has counted it."""

    worker: StageWorker
    micro_batch: MicroBatch
    given: Mapping[str, Tensor]
    answers: tuple[Answered, ...]  # To the forward and backward pass, or the tail's one.
    gradient: Mapping[str, Tensor] | None = None  # Body: with respect to the stage's output, as sent.


@dataclass(eq=False, repr=False)
class Auditor:
    """Compares workers of a stage with each other, one comparison per stage at a time, beside the work.

    ``failures`` counts liars as ``audit``; ``seed`` is of the draws, unpredictable if None.
    """

    pools: Mapping[str, StagePool]
    caller: StageCaller
    form: LinkForm
    every: int
    failures: Counter[str]
    seed: int | None = None

    def __post_init__(self) -> None:
        self._rates = AuditRates(self.every)
        self._random = random.Random(self.seed)
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._compared = self._disputed = 0
        self._unopposed: set[str] = set()
        self._liars: Counter[str] = Counter()
        self._undecided: dict[frozenset[str], tuple[str, str]] = {}  # Names of two workers that differ, by their keys.

    def status(self) -> AuditStatus:
        """Returns what the comparisons have shown."""
        return AuditStatus(
            self._compared,
            self._disputed,
            tuple(sorted(self._unopposed)),
            dict(self._liars),
            tuple(sorted(self._undecided.values())),
        )

    def draws(self) -> bool:
        """Draws whether a micro-batch is sent by hub, with all its visits audited; called once per micro-batch."""
        rates = [self._rates.rate(worker.key) for pool in self.pools.values() for worker in pool.usable()]
        return self._random.random() < max(rates, default=0.0)

    def visited(self, visit: Visit, *, is_drawn: bool = False) -> None:
        """Audits a random share of the visits; if ``is_drawn``, each, unless another audit of the stage is running."""
        key, stage = visit.worker.key, visit.worker.stage
        is_drawn = self._random.random() < self._rates.rate(key) or is_drawn
        task = self._tasks.get(stage)
        if is_drawn and (task is None or task.done()) and not self.pools[stage].is_banned(visit.worker):
            self._tasks[stage] = asyncio.create_task(self._audit(visit), name=f"driver-audit-{stage}")

    async def close(self) -> None:
        """Cancels running comparisons."""
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    async def _audit(self, visit: Visit) -> None:
        try:
            await self._compare(visit)
        except _UNUSABLE as error:
            logger.info("a comparison of workers failed: %s", error)

    async def _compare(self, visit: Visit) -> None:
        """Compares the answers with another worker's evaluation, and where they differ finds out which is wrong."""
        worker, said = visit.worker, await self._output(visit, *visit.answers)
        others = [other for other in self.pools[worker.stage].usable() if other.key != worker.key]
        self._random.shuffle(others)
        if not others:
            if worker.stage not in self._unopposed:
                logger.info("stage %s has a single worker: nobody shows whether it computes what it says", worker.stage)
            self._unopposed.add(worker.stage)
            if weight := await self._contradicts_itself(worker, visit, said, ()):
                self._strike(worker, "what it says contradicts itself", weight)
            else:
                self._rates.passed(worker.key)
            return
        self._unopposed.discard(worker.stage)
        witnesses: dict[StageWorker, StageOutput] = {}
        for other in others:
            try:
                witnesses[other] = await self._evaluated(other, visit)
            except RpcError as error:
                logger.info("%s gives no evaluation: %s", other, error)
                continue
            differs = difference(said, witnesses[other])
            self._compared += 1
            if differs is None and len(witnesses) == 1:
                self._undecided.pop(frozenset((worker.key, other.key)), None)
                self._rates.passed(worker.key)
                return
            self._disputed += differs is not None
            if len(witnesses) == _WITNESSES:
                break
        if witnesses:
            await self._find_liar({worker: said, **witnesses}, visit)

    async def _find_liar(self, found: Mapping[StageWorker, StageOutput], visit: Visit) -> None:
        """Strikes the wrong ones of workers that differ, or notes that it is undecided."""
        weights = {
            worker: await self._contradicts_itself(
                worker, visit, said, [other.gradient for other in found.values() if other is not said]
            )
            for worker, said in found.items()
        }
        contradicting = [worker for worker, weight in weights.items() if weight]
        if 0 < len(contradicting) < len(found):
            for worker in contradicting:
                self._strike(worker, "what it says contradicts itself", weights[worker])
            return
        differing = {
            worker: [other for other in found if other is not worker and difference(said, found[other])]
            for worker, said in found.items()
        }
        for worker, others in differing.items():
            if len(others) == _WITNESSES and not difference(*(found[other] for other in others)):
                why = f"it computes something else than {others[0]} and {others[1]}"
                self._strike(worker, why, _weight(list(found.values())))
                return
        for worker, others in differing.items():
            for other in others:
                self._note_undecided(worker, other, str(difference(found[worker], found[other])))

    async def _contradicts_itself(
        self, worker: StageWorker, visit: Visit, said: StageOutput, others: Sequence[Tensor | None]
    ) -> float:
        """Returns how certainly a worker's output on both sides of an input contradicts its answers; 0: it does not.

        The mean of both outputs has to be the answer, and their difference what the gradient predicts. The input is
        moved by the worker's gradient, or by one of ``others`` where that is zero; a head is asked for the same again.
        """
        try:
            return await self._examined(worker, visit, said, others)
        except _UNUSABLE as error:
            logger.info("%s is not examined: %s", worker, error)
            return 0.0

    async def _examined(
        self, worker: StageWorker, visit: Visit, said: StageOutput, others: Sequence[Tensor | None]
    ) -> float:
        if said.gradient is None:
            again = await self._evaluated(worker, visit)
            return _weight([said, again]) if difference(said, again) else 0.0
        ids, codec = visit.micro_batch.input_ids, self.form.codec
        grad_y = None if visit.gradient is None else codec.grad_decode(visit.gradient)
        gradients = [each for each in (said.gradient, *others, grad_y) if each is not None and bool(each.any())]
        if not gradients:
            return 0.0
        gradient = gradients[0]

        def sides() -> tuple[dict[str, Tensor], dict[str, Tensor], Tensor]:
            given = part_of(ACTIVATION, visit.given)
            x, step = codec.decode(given, ids), nudge(own_part(self.form, given, ids), gradient)
            ahead, behind = codec.encode(x + step, ids).tensors, codec.encode(x - step, ids).tensors
            return ahead, behind, codec.decode(ahead, ids) - codec.decode(behind, ids)

        ahead, behind, moved = await asyncio.to_thread(sides)
        for _ in range(_EXAMINED_TIMES):  # A worker may take a step in between.
            answers = [
                await self.caller.evaluate(worker, visit.micro_batch, {**visit.given, **side}, visit.gradient)
                for side in (ahead, behind)
            ]
            if answers[0].body.version == answers[1].body.version:
                break
        else:
            return 0.0
        outputs = [await self._output(visit, answered) for answered in answers]

        def is_contradicted() -> bool:
            ratio = slope_ratio(
                moved, gradient, *outputs, grad_y=grad_y, num_labels=max(1, visit.micro_batch.num_tokens)
            )
            differs = difference(said, midpoint(*outputs))
            logger.debug("%s: %s, slope ratio %s", worker, differs or "says the same again", ratio)
            is_predicted = ratio is None or 1 / MAX_SLOPE_RATIO < ratio < MAX_SLOPE_RATIO
            if gradient is not said.gradient:  # Its own gradient is zero; those of the others predict a change.
                is_predicted = ratio is None or not is_predicted
            return differs is not None or not is_predicted

        return _weight([said, *outputs]) if await asyncio.to_thread(is_contradicted) else 0.0

    def _strike(self, worker: StageWorker, why: str, weight: float) -> None:
        if not self._rates.struck(worker.key, weight):
            logger.warning("%s: %s; from now on all it does is compared", worker, why)
            return
        logger.error("%s: %s", worker, why)
        self._liars[worker.uid] += 1
        self.failures[_LIED.reason] += 1
        self.pools[worker.stage].blame(worker, _LIED, time.monotonic())
        self._undecided = {keys: text for keys, text in self._undecided.items() if worker.key not in keys}

    def _note_undecided(self, one: StageWorker, other: StageWorker, why: str) -> None:
        keys = frozenset((one.key, other.key))
        if keys not in self._undecided:
            self._undecided[keys] = (min(one.uid, other.uid), max(one.uid, other.uid))
            logger.warning(
                "%s and %s disagree (%s); one of them is wrong, a third worker would show who", one, other, why
            )

    async def _evaluated(self, worker: StageWorker, visit: Visit) -> StageOutput:
        answered = await self.caller.evaluate(worker, visit.micro_batch, visit.given, visit.gradient)
        return await self._output(visit, answered)

    async def _output(self, visit: Visit, *answers: Answered) -> StageOutput:
        """Decodes what a worker answered to one request, or to the forward and the backward pass."""
        body, ids = answers[-1].body, visit.micro_batch.input_ids
        versions = frozenset(answered.body.version for answered in answers)
        tensors = {name: tensor for answered in answers for name, tensor in answered.tensors.items()}
        loss = None if body.loss_sum is None else body.loss_sum / max(1, body.num_tokens)
        with peer_boundary("an audited worker"):
            return await asyncio.to_thread(
                output_of, self.form, tensors, ids, loss=loss, scale=body.scale, versions=versions
            )


def _weight(outputs: Sequence[StageOutput]) -> float:
    """Returns how certain a difference is: across a step, above all the first, honest workers may differ."""
    return 1.0 if len(frozenset[int]().union(*(output.versions for output in outputs))) == 1 else 0.5


@dataclass(frozen=True, slots=True, eq=False)
class StageOutput:
    """What a stage made of one input, by one worker's answer."""

    activation: Tensor | None = None  # Head, body: fp32[B, S, dim], the stage's own part of it.
    loss: float | None = None  # Tail: mean of the labels.
    gradient: Tensor | None = None
    """Body, tail: with respect to the input, fp32[B, S, dim], before the worker scaled it down."""
    versions: frozenset[int] = frozenset()  # The stage's at its forward and its backward pass.


def output_of(
    form: LinkForm,
    tensors: Mapping[str, Tensor],
    ids: Tensor,
    *,
    loss: float | None = None,
    scale: float = 1.0,
    versions: frozenset[int] = frozenset(),
) -> StageOutput:
    """Decodes an answer; the gradient is divided by ``scale``, which the worker says to have multiplied it by.

    Raises CodecError or NonFiniteActivationError if it is not what the codec makes, or not finite.
    """
    activation, gradient = part_of(ACTIVATION, tensors), part_of(GRADIENT, tensors)
    return StageOutput(
        activation=own_part(form, activation, ids) if activation else None,
        loss=loss,
        gradient=form.codec.grad_decode(gradient) / scale if gradient else None,
        versions=versions,
    )


def difference(one: StageOutput, other: StageOutput) -> str | None:
    """Returns in what two answers differ by more than replicas do, of what is in both; None: they are alike.

    That is rough, by direction *and* size: replicas drift apart between averages, and the link's codec rounds.
    """
    for what in ("activation", "gradient"):
        found, expected = getattr(one, what), getattr(other, what)
        if found is not None and expected is not None and not _is_alike(found, expected):
            norms = float(found.double().norm()), float(expected.double().norm())
            return f"{what}: cosine {_cosine(found, expected):.2f}, norms {norms[0]:.3g} and {norms[1]:.3g}"
    if one.loss is None or other.loss is None:
        return None
    if abs(one.loss - other.loss) < max(MIN_NATS, max(one.loss, other.loss) / 2):
        return None
    return f"loss: {one.loss:.3f} and {other.loss:.3f} nats a label"


def nudge(own: Tensor, gradient: Tensor) -> Tensor:
    """Returns a step along a gradient, at each position by `_NUDGE` of the norm of ``own`` there, fp32[B, S, dim]."""
    norm = gradient.norm(dim=-1, keepdim=True).clamp_min(torch.finfo(gradient.dtype).tiny)
    step: Tensor = gradient / norm * (_NUDGE * own.norm(dim=-1, keepdim=True))
    return step


def midpoint(one: StageOutput, other: StageOutput) -> StageOutput:
    """Returns the mean of two answers: up to curvature, the answer to the input in between."""

    def mean(first: Tensor | None, second: Tensor | None) -> Tensor | None:
        return None if first is None or second is None else (first + second) / 2

    loss = None if one.loss is None or other.loss is None else (one.loss + other.loss) / 2
    return StageOutput(mean(one.activation, other.activation), loss, mean(one.gradient, other.gradient))


def slope_ratio(
    moved: Tensor, gradient: Tensor, ahead: StageOutput, behind: StageOutput, *, grad_y: Tensor | None, num_labels: int
) -> float | None:
    """Returns the change of the losses, seen through the stage's output, per nat that a gradient predicts.

    It is about 1 for an honest worker, and None where no change is predicted or there is no output to see one in.
    ``moved`` is what the input was moved by between ``behind`` and ``ahead``; ``gradient`` is of the sum of losses with
    respect to the input, as claimed, ``grad_y`` with respect to the output (None: the output is the loss, of
    ``num_labels``).
    """
    predicted = _dot(gradient, moved)
    if grad_y is None:
        if ahead.loss is None or behind.loss is None:
            return None
        seen = (ahead.loss - behind.loss) * num_labels
    else:
        if ahead.activation is None or behind.activation is None:
            return None
        seen = _dot(grad_y, ahead.activation.double() - behind.activation.double())
    return seen / predicted if predicted else None


def own_part(form: LinkForm, tensors: Mapping[str, Tensor], ids: Tensor) -> Tensor:
    """Returns what a stage computed of an activation: without what the codec would decode of zeros."""
    decoded = form.codec.decode(tensors, ids)
    if not form.codec.needs_ids:
        return decoded
    zeros = {name: torch.zeros_like(tensor) if name == ACTIVATION else tensor for name, tensor in tensors.items()}
    return decoded - form.codec.decode(zeros, ids)


def _dot(one: Tensor, other: Tensor) -> float:
    return float(torch.vdot(one.double().flatten(), other.double().flatten()))


def _cosine(one: Tensor, other: Tensor) -> float:
    norms = float(one.double().norm()) * float(other.double().norm())
    return _dot(one, other) / norms if norms else float(torch.equal(one, other))


def _is_alike(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors may be those of two replicas; some initial weights give zeros, which are alike."""
    norms = sorted((float(one.double().norm()), float(other.double().norm())))
    return _cosine(one, other) >= MIN_COSINE and norms[1] <= MAX_RATIO * norms[0]
