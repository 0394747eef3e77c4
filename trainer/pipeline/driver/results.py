"""What a driver says of a micro-batch when it is through with it, and of itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from trainer.pipeline.driver.balancer import WorkerLoad
from trainer.pipeline.protocol.work import Settlement, StageCredit

__all__ = [
    "AuditStatus",
    "DriverStatus",
    "Fate",
    "HopTime",
    "MicroBatchResult",
    "Outcome",
    "StageStatus",
    "settlement_of",
]

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
