"""What a failed request says of its worker and micro-batch, and what a driver reports.

``already-applied`` is honest only as the answer to a repetition: else a worker says it that wants nothing trained. One
that was told not to count a micro-batch refuses it as ``expired`` for some 20 s, so that is a quarter of an attempt.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from trainer.errors import MalformedAnswerError, PeerUnavailableError, RefusedError, RpcError
from trainer.network.rpc.messages import Reason
from trainer.pipeline.driver.balancer import WorkerLoad
from trainer.pipeline.protocol.work import StageCredit


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a failed request says."""

    reason: str  # One word for counters; workers choose theirs freely, so an unknown one is ``refused``.
    effect: Literal["none", "unclear", "counted"]
    """Whether it may have been counted there: ``none`` goes to another worker, ``counted`` has lost its answer."""
    blame: Literal["none", "rest", "leave", "doubt", "ban", "firm-ban", "long-ban"]
    """From a moment without work (``rest``) or a longer one (``leave``) to a ban at the fifth ``doubt``, or at once."""
    attempts: float = 1.0
    """How many of a micro-batch's attempts in a stage it uses up; 0: it may be retried without end."""


_BEFORE_ANYTHING = frozenset(
    {
        *("no_request", "size", "magic", "protocol", "head", "kind", "run", "recipient", "sender", "certificate"),
        *("method", "payload_size", "clock", "signature", "replayed", "sequence", "digest", "body", "credential"),
        *("stage", "nonfinite"),
    }
)
"""Refusals that precede any counting, and that a worker of this run and stage does not give."""
_VERDICTS = {
    verdict.reason: verdict
    for verdict in (
        Verdict("busy", "none", "rest", 0.0),
        Verdict("rate", "none", "rest", 0.0),
        Verdict("not-a-driver", "none", "rest", 0.0),
        Verdict("stopping", "none", "leave", 0.0),
        Verdict("no-input", "none", "none", 0.5),
        Verdict("expired", "none", "doubt", 0.25),
        Verdict("stale", "none", "doubt"),
        Verdict("tainted", "none", "doubt"),
        Verdict("already-applied", "counted", "firm-ban"),
        Verdict("counted-for-another", "counted", "none"),
        Verdict("malformed", "unclear", "ban", 3.0),
    )
}
_KNOWN_REASONS = frozenset(map(str, Reason))


def verdict_of(error: RpcError) -> Verdict:
    """Returns what a failed request says, if it is the first of its micro-batch at this worker."""
    if isinstance(error, MalformedAnswerError):
        return Verdict("malformed-answer", "unclear", "long-ban")
    if isinstance(error, RefusedError):
        if error.reason in _BEFORE_ANYTHING:
            return Verdict(error.reason, "none", "ban")
        reason = error.reason if error.reason in _KNOWN_REASONS else "refused"
        return _VERDICTS.get(error.reason, Verdict(reason, "unclear", "ban"))
    return Verdict("unavailable" if isinstance(error, PeerUnavailableError) else "failed", "unclear", "ban")


Fate = Literal["done", "lost", "handed-back", "left"]
"""``done`` in every stage; ``lost``: counted, or perhaps counted, in some; ``handed-back``: nobody was asked to count
it; ``left`` to the ledger's keeper, which asks the workers once the lease has run out."""


@dataclass(frozen=True, slots=True)
class HopTime:
    """One answered request."""

    stage: str
    method: str
    worker: str
    key: str
    round_trip_s: float
    compute_s: float
    queue_s: float
    version: int


@dataclass(frozen=True, slots=True)
class MicroBatchOutcome:
    """What became of a micro-batch, with the acknowledgements of the stages that counted it, and why it ended."""

    fate: Fate
    credits: tuple[StageCredit, ...] = ()
    loss_sum: float = 0.0
    num_tokens: int = 0
    stage: str | None = None  # Lost: the stage that did not, or may not, have counted it.
    reason: str | None = None


@dataclass(frozen=True, slots=True)
class MicroBatchResult:
    """An outcome with what it took, failed requests as `num_retries`."""

    micro_batch: str
    outcome: MicroBatchOutcome
    wall_s: float
    hops: tuple[HopTime, ...]
    num_retries: int


@dataclass(frozen=True, slots=True)
class StageView:
    """A stage as the driver sees it; workers by key, and their names for people."""

    stage: str
    workers: tuple[WorkerLoad, ...]
    names: Mapping[str, str]
    banned: Mapping[str, float]
    stalled_s: float  # Seconds for which the stage has had no worker to send to; 0 if it has one.


@dataclass(frozen=True, slots=True)
class AuditStatus:
    """What comparing workers has shown: answers compared, and of them disputed; workers by their names for people."""

    compared: int = 0
    disputed: int = 0
    unopposed: tuple[str, ...] = ()
    liars: Mapping[str, int] = field(default_factory=dict)
    undecided: tuple[tuple[str, str], ...] = ()  # Pairs of workers that differ where nothing shows which is wrong.


@dataclass(frozen=True, slots=True)
class DriverStatus:
    """A driver's state and counters."""

    in_flight: int
    done: int
    lost: int
    handed_back: int
    left: int
    tokens: int
    failures: Mapping[str, int]
    lost_by: Mapping[str, int]
    stalls: Mapping[str, float]  # Seconds in all for which each stage had no worker while there was something to send.
    stages: tuple[StageView, ...]
    audit: AuditStatus = AuditStatus()
    silent: Mapping[str, float] = field(default_factory=dict)
    """Seconds without an answer of workers that micro-batches wait for, by key."""


@dataclass(frozen=True, slots=True)
class StepLoss:
    """The mean loss of one optimizer step over its labels, after ``step`` others that this driver has seen."""

    step: int
    loss: float
    num_tokens: int
    micro_batches: int
