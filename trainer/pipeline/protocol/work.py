"""What passes between the account of the data and a driver's routing: micro-batches, and what became of them.

The routing knows a `Work` and nothing of leases, files or other drivers; the account knows settlements and nothing of
workers' queues. Both can therefore be tried alone, and a run on one machine needs no keeper process.

Guarantees a `Work` gives: a micro-batch is handed to one driver at a time, and nothing of it may be sent from
`MicroBatch.send_before_s` on, so that whoever gets it next cannot meet a late copy. What the routing owes in return:
each micro-batch it was given is settled or handed back once; one that it does neither with is asked after at the
workers when its lease has run out.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Annotated, Literal, Protocol, TypeAlias

from pydantic import Field
from torch import Tensor

from trainer.model.loss import IGNORED_LABEL
from trainer.network.rpc.messages import Message
from trainer.pipeline.protocol.messages import Counted, Incarnation, StageName
from trainer.pipeline.protocol.micro_batch import MicroBatchId, MicroBatchKey

__all__ = ["LeaseTerm", "LossReason", "MicroBatch", "Settlement", "StageCredit", "Work", "boottime_s"]

LossReason: TypeAlias = Annotated[str, Field(pattern=r"^[a-z][a-z0-9_-]{0,47}$")]
"""Why a micro-batch is lost, one word for counters: ``unclear``, ``refused``, ``attempts``, ``driver-lost``, …"""


_BOOT_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
"""macOS has no CLOCK_BOOTTIME; its CLOCK_MONOTONIC goes on while the machine sleeps."""


def boottime_s() -> float:
    """Seconds on CLOCK_BOOTTIME: goes on while the process is stopped and the machine sleeps."""
    return time.clock_gettime(_BOOT_CLOCK)


@dataclass(slots=True, eq=False)
class LeaseTerm:
    """How long a lease lasts; shared by all its micro-batches, and put off whenever it is renewed."""

    send_before_s: float
    """On CLOCK_BOOTTIME (`boottime_s`)."""


@dataclass(frozen=True, slots=True, eq=False)
class MicroBatch:
    """Rows to take through all stages once."""

    id: MicroBatchId
    input_ids: Tensor
    """int64[B, T]."""
    labels: Tensor
    """int64[B, T], each id the one after its input."""
    term: LeaseTerm

    @property
    def send_before_s(self) -> float:
        """On CLOCK_BOOTTIME: from then on nothing of it may be sent; `apply_within_s` has to end before it too.

        It moves on while the lease is renewed, so it is read before each sending.
        """
        return self.term.send_before_s

    @property
    def key(self) -> MicroBatchKey:
        """The id as messages carry it."""
        return str(self.id)

    @property
    def num_tokens(self) -> int:
        """Labels that count."""
        return int((self.labels != IGNORED_LABEL).sum())


class StageCredit(Message):
    """A stage's acknowledgement that it has counted a micro-batch, as its answer (`StageAnswer`) said."""

    stage: StageName
    incarnation: Incarnation
    """Of the worker."""
    applied_number: Counted
    """How many micro-batches that worker had applied, this one included; 0: not known to the driver."""
    shared_through: Counted = 0
    """Of them, the first so many were in a state that outlives the worker."""


class Settlement(Message):
    """What became of a micro-batch: done in every stage, or lost, and then where and why."""

    micro_batch: MicroBatchKey
    outcome: Literal["done", "lost"]
    credits: Annotated[tuple[StageCredit, ...], Field(max_length=512)] = ()
    """Of the stages that acknowledged it: all of them if it is done."""
    num_tokens: Counted = 0
    """Labels that counted."""
    lost_at: StageName | None = None
    """The stage that did not, or may not, have counted it; None if done."""
    reason: LossReason | None = None
    """None if done."""


class Work(Protocol):
    """Where a driver's routing gets micro-batches from, and where it says what became of them."""

    async def next(self) -> MicroBatch | None:
        """The next one; waits while there is none to be had. None: there will be no more."""
        ...

    def settle(self, settlement: Settlement) -> None:
        """Says what became of one. Returns at once: it is kept, and sent until it is acknowledged."""
        ...

    def hand_back(self, micro_batch: MicroBatch) -> None:
        """Gives back one that no stage was asked to apply; another driver may have it at once."""
        ...
