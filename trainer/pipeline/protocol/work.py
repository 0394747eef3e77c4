"""Micro-batches and what became of them, as they pass between the ledger and a driver's routing."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal, Protocol, TypeAlias

from pydantic import Field

from trainer.errors import TrainerUsageError
from trainer.model.config import IGNORED_LABEL
from trainer.network.discovery.stage_report import Counted, Incarnation, StageName
from trainer.network.rpc.messages import Message

if TYPE_CHECKING:
    from torch import Tensor

_PATTERN = r"e(0|[1-9][0-9]{0,8})\.s(0|[1-9][0-9]{0,9})\.r(0|[1-9][0-9]{0,9})"

MicroBatchKey: TypeAlias = Annotated[str, Field(pattern=f"^{_PATTERN}$")]
"""Written form of a :class:`MicroBatchId`, as messages carry it."""
LossReason: TypeAlias = Annotated[str, Field(pattern=r"^[a-z][a-z0-9_-]{0,47}$")]
"""Why a micro-batch is lost, one word for counters."""

_BOOT_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
"""macOS has no CLOCK_BOOTTIME; its CLOCK_MONOTONIC goes on while the machine sleeps."""


def boottime_s() -> float:
    """Returns seconds on CLOCK_BOOTTIME, which goes on while the process is stopped and the machine sleeps."""
    return time.clock_gettime(_BOOT_CLOCK)


@dataclass(frozen=True, slots=True, order=True)
class MicroBatchId:
    """Which rows of the data a micro-batch is; its written form never changes, whoever sends it and however often.

    ``e2.s17.r4096`` is epoch 2, shard 17, rows from 4096 on of that shard's order in that epoch.
    """

    epoch: int  # Passes over the whole store before it.
    shard: int
    row: int  # Its first row's place in the order in which the shard is read in that epoch.

    def __str__(self) -> str:
        return f"e{self.epoch}.s{self.shard}.r{self.row}"

    @classmethod
    def parse(cls, key: str) -> MicroBatchId:
        """Inverts ``str``; raises TrainerUsageError if ``key`` names no micro-batch."""
        found = re.fullmatch(_PATTERN, key)
        if found is None:
            raise TrainerUsageError(f"expected a micro-batch such as e0.s17.r4096, found {key[:80]!r}")
        return cls(*map(int, found.groups()))


@dataclass(slots=True, eq=False)
class LeaseTerm:
    """How long a lease lasts; shared by all its micro-batches, and extended whenever it is renewed."""

    send_before_s: float  # On CLOCK_BOOTTIME (`boottime_s`).


@dataclass(frozen=True, slots=True, eq=False)
class MicroBatch:
    """Rows to take through all stages once."""

    id: MicroBatchId
    input_ids: Tensor
    labels: Tensor  # int64[B, T], each id the one after its input.
    term: LeaseTerm

    @property
    def send_before_s(self) -> float:
        """On CLOCK_BOOTTIME: from then on nothing of it may be sent or applied. Renewing the lease moves it."""
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
    """A stage's acknowledgement that it has counted a micro-batch, from its answer (`StageAnswer`)."""

    stage: StageName
    incarnation: Incarnation
    applied_number: Counted
    """How many micro-batches that worker had applied, this one included; 0: not known to the driver."""
    shared_through: Counted = 0  # The first so many of them were in a state that outlives the worker.


class Settlement(Message):
    """What became of a micro-batch: done in every stage, or lost, and then where and why."""

    micro_batch: MicroBatchKey
    outcome: Literal["done", "lost"]
    credits: Annotated[tuple[StageCredit, ...], Field(max_length=512)] = ()
    """Of the stages that acknowledged it: all of them if it is done."""
    num_tokens: Counted = 0
    lost_at: StageName | None = None  # The stage that did not, or may not, have counted it; None if done.
    reason: LossReason | None = None


class Work(Protocol):
    """Where a driver's routing gets micro-batches from, and reports what became of them.

    A micro-batch is handed to one driver at a time, and nothing of it may be sent from `MicroBatch.send_before_s` on.
    In return the routing settles or hands back each once; for one with which it does neither, the workers are asked
    when its lease has run out.
    """

    async def next(self) -> MicroBatch | None:
        """Waits for the next one; None: there will be no more."""

    def settle(self, settlement: Settlement) -> None:
        """Reports what became of one. Returns at once: it is kept, and sent until it is acknowledged."""

    def hand_back(self, micro_batch: MicroBatch) -> None:
        """Gives back one that no stage was asked to apply; another driver may have it at once."""
