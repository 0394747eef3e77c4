"""Outcomes: what a failed request says of the worker and of the micro-batch, and what a driver reports in the end.

| what happened                          | counted there? | the worker         | then                        |
|----------------------------------------|----------------|--------------------|-----------------------------|
| ``busy``, ``rate``, ``not-a-driver``   | no             | rests for a moment | same or another, no attempt |
| ``stopping``                           | no             | rests longer       | another, no attempt         |
| ``no-input``                           | no             | –                  | same, with the input        |
| ``expired``, ``stale``, ``tainted``    | no             | five: banned       | another                     |
| ``nonfinite``, ``stage``, wrong key, … | no             | banned for a while | another                     |
| ``already-applied``                    | yes            | banned for a while | the answer is gone          |
| ``counted-for-another``                | yes            | –                  | the answer is gone          |
| ``malformed``                          | not clear      | banned for a while | another; twice: give up     |
| ``internal``, ``timeout``, no answer   | not clear      | banned for a while | another, when it is clear   |
| an answer that is none                 | not clear      | banned for long    | another, when it is clear   |

``not-a-driver`` says a worker that has not heard of this driver yet.

``already-applied`` is honest of a repetition only; as the answer to the first request it is what a worker would say
that wants to see nothing trained. `Bans` tells how those that do nothing but refuse are found out.

Only requests that apply something can be unclear; a forward pass is simply done again elsewhere. A refusal says so of
the request it answers only: of an earlier one of the same micro-batch whose answer did not come it says nothing.
A worker that was told not to count a micro-batch any more refuses it as ``expired`` for some 20 s, so a few of these in
a row are no reason to give it up: each uses up a quarter of an attempt.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from trainer.errors import MalformedAnswerError, PeerUnavailableError, RefusedError, RpcError
from trainer.network.rpc.messages import Reason
from trainer.pipeline.driver.balancer import WorkerLoad
from trainer.pipeline.protocol.work import Settlement, StageCredit

__all__ = [
    "AuditStatus",
    "Blame",
    "DriverStatus",
    "Effect",
    "Fate",
    "HopTime",
    "MicroBatchResult",
    "Outcome",
    "StageStatus",
    "Verdict",
    "settlement_of",
    "verdict_of",
]

Effect = Literal["none", "unclear", "counted"]
Blame = Literal["none", "rest", "leave", "doubt", "ban", "firm-ban", "long-ban"]


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a failed request says."""

    reason: str
    """One word for counters: the refusal's if it is one that is known (``refused``: another), ``unavailable`` or
    ``malformed-answer``. A worker chooses its words freely; they end up in settlements and counters."""
    effect: Effect
    blame: Blame
    attempts: float = 1.0
    """How many of a micro-batch's attempts in a stage it uses up; 0: it may go on for ever."""


_BEFORE_ANYTHING = frozenset(
    {
        *("no_request", "size", "magic", "protocol", "head", "kind", "run", "recipient", "sender", "certificate"),
        *("method", "payload_size", "clock", "signature", "replayed", "sequence", "digest", "body"),
        *("stage", "nonfinite"),
    }
)
"""Refusals that come before anything is counted, and that a worker that fits this run and stage does not make."""
_VERDICTS = {
    "busy": Verdict("busy", "none", "rest", 0.0),
    "rate": Verdict("rate", "none", "rest", 0.0),
    "stopping": Verdict("stopping", "none", "leave", 0.0),
    "no-input": Verdict("no-input", "none", "none", 0.5),
    "expired": Verdict("expired", "none", "doubt", 0.25),
    "stale": Verdict("stale", "none", "doubt"),
    "tainted": Verdict("tainted", "none", "doubt"),
    "already-applied": Verdict("already-applied", "counted", "firm-ban"),
    "counted-for-another": Verdict("counted-for-another", "counted", "none"),
    "not-a-driver": Verdict("not-a-driver", "none", "rest", 0.0),
    "malformed": Verdict("malformed", "unclear", "ban", 3.0),
}
_KNOWN_WORDS = frozenset(map(str, Reason))


def verdict_of(error: RpcError) -> Verdict:
    """What a failed request says, if it is the first of its micro-batch at this worker."""
    if isinstance(error, MalformedAnswerError):
        return Verdict("malformed-answer", "unclear", "long-ban")
    if isinstance(error, RefusedError):
        if error.reason in _BEFORE_ANYTHING:
            return Verdict(error.reason, "none", "ban")
        word = error.reason if error.reason in _KNOWN_WORDS else "refused"
        return _VERDICTS.get(error.reason, Verdict(word, "unclear", "ban"))
    if isinstance(error, PeerUnavailableError):
        return Verdict("unavailable", "unclear", "ban")
    return Verdict("failed", "unclear", "ban")


Fate = Literal["done", "lost", "handed-back", "left"]
"""``done`` in every stage; ``lost``, counted in some or perhaps in some; ``handed-back``, nobody was asked to count it;
``left`` to the keeper of the account, which asks the workers once its lease has run out."""


@dataclass(frozen=True, slots=True)
class HopTime:
    """One answered request."""

    stage: str
    method: str
    worker: str
    """Its name for people."""
    key: str
    """What it is known by."""
    round_trip_s: float
    compute_s: float
    queue_s: float
    version: int
    """Of the weights it was computed with."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a micro-batch."""

    fate: Fate
    credits: tuple[StageCredit, ...] = ()
    """Of the stages that said that they counted it, in the order in which they did."""
    loss_sum: float = 0.0
    """Of the labels that count; 0 unless the tail answered."""
    num_tokens: int = 0
    """Labels that counted."""
    stage: str | None = None
    """Lost: the stage that did not, or may not, have counted it."""
    reason: str | None = None
    """Why it was lost, handed back or left; one word."""


@dataclass(frozen=True, slots=True)
class MicroBatchResult:
    """An outcome with what it took."""

    micro_batch: str
    outcome: Outcome
    wall_s: float
    hops: tuple[HopTime, ...]
    num_retries: int
    """Requests of it that failed."""


@dataclass(frozen=True, slots=True)
class StageStatus:
    """A stage as the driver sees it."""

    stage: str
    workers: tuple[WorkerLoad, ...]
    names: Mapping[str, str]
    """By key, for people."""
    banned: Mapping[str, float]
    """Seconds left, by key."""
    stalled_s: float
    """How long it has had no worker to send to; 0 if it has one."""


@dataclass(frozen=True, slots=True)
class AuditStatus:
    """What comparing workers with each other has shown."""

    compared: int = 0
    """Answers with another worker's."""
    disputed: int = 0
    """Of them, those that differed."""
    unopposed: tuple[str, ...] = ()
    """Stages in which there was nobody to compare with."""
    liars: Mapping[str, int] = field(default_factory=dict)
    """How often each was banned for it, by its name for people."""
    undecided: tuple[tuple[str, str], ...] = ()
    """Pairs of workers that differ where nothing shows which is wrong, by their names for people."""


@dataclass(frozen=True, slots=True)
class DriverStatus:
    """A driver, for those who watch it."""

    in_flight: int
    done: int
    lost: int
    handed_back: int
    left: int
    tokens: int
    """Of what is done."""
    failures: Mapping[str, int]
    """Requests that failed, by reason."""
    lost_by: Mapping[str, int]
    """Lost micro-batches, by ``stage: reason``."""
    stalls: Mapping[str, float]
    """Seconds in all that each stage had no worker to send to, while there was something to send."""
    stages: tuple[StageStatus, ...]
    audit: AuditStatus = AuditStatus()
    silent: Mapping[str, float] = field(default_factory=dict)
    """Workers that micro-batches wait for and that do not answer: for how many seconds, by key."""


def settlement_of(micro_batch: str, outcome: Outcome) -> Settlement:
    """A ``done`` or ``lost`` outcome as the account takes it."""
    if outcome.fate == "done":
        return Settlement(
            micro_batch=micro_batch, outcome="done", credits=outcome.credits, num_tokens=outcome.num_tokens
        )
    return Settlement(
        micro_batch=micro_batch,
        outcome="lost",
        credits=outcome.credits,
        num_tokens=outcome.num_tokens,
        lost_at=outcome.stage,
        reason=outcome.reason,
    )
