"""`ReplyCache`: a micro-batch is counted once, however often it is sent, and whoever asks again gets the same answer.

What a micro-batch goes through here, under one lock:

    begin ──▶ open ──claim──▶ claimed ──counted──▶ counted ──settle──▶ answered, kept, some day forgotten
                │ (late, given up,   │ (late)
                ▼  refused)          ▼
              nothing               taint: all that is not stepped with is dropped, in a new incarnation

`claim` is called by the compute thread when nothing but the adding up is left to do; from then on nobody can call it
off, and until then anybody can: a caller that went away, the clock, the keeper of the account who gives the micro-batch
to somebody else. So for whoever asks, a micro-batch is either counted or will not be, and `counted_among` waits for
the milliseconds in between.

A name belongs to the driver it was counted for, and so does the answer: names can be guessed, and whoever sent another
micro-batch under a name to come would have the driver go on with that one's gradient.

The clock is CLOCK_BOOTTIME, which goes on while a process is stopped. A process that is stopped between claim and
counting finds out behind it. It cannot take one gradient back out of a sum, nor know what others were told meanwhile,
so it drops the sum and becomes another incarnation, which others treat like a worker that died and came back.
"""

from __future__ import annotations

import secrets
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Generic, TypeVar

from trainer.errors import RefusedError
from trainer.pipeline.protocol.work import boottime_s
from trainer.pipeline.worker.config import WorkerConfig

__all__ = ["Known", "Receipt", "ReplyCache", "Slot"]

ReplyT = TypeVar("ReplyT")


class _Phase(Enum):
    OPEN = auto()
    CLAIMED = auto()
    COUNTED = auto()
    OVER = auto()


@dataclass(slots=True, eq=False)
class Slot:
    """A micro-batch on its way to being counted; for the cache's eyes, others hand it back."""

    kind: str
    key: str
    owner: str
    waiting: list[float]
    """Until when it may be counted, of each who asks for it and has not gone away; on the cache's clock."""
    phase: _Phase = _Phase.OPEN
    decided: Future[None] = field(default_factory=Future)
    """Done when it is counted, or will not be."""

    @property
    def apply_before_s(self) -> float:
        """The latest of theirs."""
        return max(self.waiting, default=float("-inf"))


@dataclass(frozen=True, slots=True)
class Receipt:
    """What a worker signs for when it has counted a micro-batch."""

    incarnation: str
    applied_number: int
    """How many micro-batches this incarnation has counted, this one included."""


@dataclass(frozen=True, slots=True)
class Known(Generic[ReplyT]):
    """The micro-batch was counted before; this is what was answered then."""

    reply: ReplyT


@dataclass(slots=True)
class _Counted(Generic[ReplyT]):
    kind: str
    owner: str
    receipt: Receipt
    reply: ReplyT | None = None
    size_bytes: int = 0


class ReplyCache(Generic[ReplyT]):
    """What this worker has counted. Any thread may call it.

    Args:
        config: how much is remembered.
        clock: seconds; CLOCK_BOOTTIME but in tests.
    """

    def __init__(self, config: WorkerConfig, *, clock: Callable[[], float] = boottime_s) -> None:
        self._config = config
        self._clock = clock
        self._lock = threading.Lock()
        self._open: dict[str, Slot] = {}
        self._counted: OrderedDict[str, _Counted[ReplyT]] = OrderedDict()
        self._replies: OrderedDict[str, None] = OrderedDict()
        self._not_stepped: set[str] = set()
        self._refused: OrderedDict[tuple[str, str], float] = OrderedDict()
        """By name and driver; an empty one stands for all."""
        self._reply_bytes = 0
        self._incarnation = secrets.token_hex(8)
        self._applied = 0

    @property
    def incarnation(self) -> str:
        """Another one when what was counted has been dropped."""
        return self._incarnation

    @property
    def applied(self) -> int:
        """Micro-batches this incarnation has counted."""
        return self._applied

    @property
    def reply_bytes(self) -> int:
        """Tensors of answers kept."""
        return self._reply_bytes

    def begin(self, kind: str, key: str, apply_before_s: float, *, owner: str = "") -> Slot | Known[ReplyT]:
        """Somebody asks for a micro-batch to be counted.

        Args:
            kind: what is to be answered; a micro-batch is counted once whatever the kinds.
            key: its name.
            apply_before_s: on the cache's clock.
            owner: the driver whose micro-batch it is.

        Returns:
            The answer given before; or a slot, new (one is waiting) or one that others wait for too.

        Raises:
            RefusedError: ``already-applied``; ``counted-for-another`` driver; or ``busy``, where it is being counted as
                another kind or for another driver, and for a while after it was given to somebody else: that ends by
                itself, and is no failed attempt of whoever comes by.
        """
        with self._lock:
            counted = self._counted.get(key)
            if counted is not None and counted.owner != owner:
                raise RefusedError("counted-for-another", f"{key} is counted for another driver")
            if counted is not None and counted.reply is not None and counted.kind == kind:
                self._replies.move_to_end(key)
                return Known(counted.reply)
            slot = self._open.get(key)
            if slot is not None and (slot.kind, slot.owner) == (kind, owner):
                slot.waiting.append(apply_before_s)
                return slot
            if counted is not None:
                raise RefusedError("already-applied", f"{key} is counted; its answer is not kept any more")
            if slot is not None:
                raise RefusedError("busy", f"{key} is being counted as {slot.kind} of {slot.owner[:12]}; try again")
            self._check_not_refused(key, owner)
            slot = self._open[key] = Slot(kind, key, sys.intern(owner), [apply_before_s])
            return slot

    def leave(self, slot: Slot, apply_before_s: float) -> bool:
        """Somebody who asked, with that limit, has gone away.

        Returns:
            Whether nobody waits any more and it is not counted: then it never will be.
        """
        with self._lock:
            if slot.phase is not _Phase.OPEN:
                return False
            slot.waiting.remove(apply_before_s)
            if slot.waiting:
                return False
            self._close(slot)
            return True

    def check_wanted(self, slot: Slot) -> None:
        """Whether computing it is of any use.

        Raises:
            RefusedError: ``expired``.
        """
        with self._lock:
            self._check_wanted(slot)

    def is_claimed(self, slot: Slot) -> bool:
        """Whether it is just being added up."""
        with self._lock:
            return slot.phase is _Phase.CLAIMED

    def claim(self, slot: Slot) -> None:
        """The moment before it is added up; must be followed by `counted` or `fail` at once.

        Raises:
            RefusedError: ``expired``: it is late, or nobody wants it any more.
        """
        with self._lock:
            self._check_wanted(slot)
            slot.phase = _Phase.CLAIMED

    def counted(self, slot: Slot) -> Receipt | None:
        """It has been added up.

        Returns:
            What to sign for; None: time has run out in between, and `taint` must follow.
        """
        with self._lock:
            if self._clock() > slot.apply_before_s:
                return None
            slot.phase = _Phase.COUNTED
            self._applied += 1
            receipt = Receipt(self._incarnation, self._applied)
            self._counted[slot.key] = _Counted(slot.kind, slot.owner, receipt)
            self._not_stepped.add(slot.key)
            while len(self._counted) > self._config.reply_cache_ids:
                self._forget(next(iter(self._counted)))
            slot.decided.set_result(None)
            return receipt

    def settle(self, slot: Slot, reply: ReplyT, size_bytes: int) -> None:
        """This is its answer, now and for whoever asks again.

        Raises:
            RefusedError: ``tainted``: it was dropped again meanwhile.
        """
        with self._lock:
            self._take_out(slot)
            if slot.phase is not _Phase.COUNTED:
                raise RefusedError(
                    "tainted", f"{slot.key} was counted and dropped again with all that was; send it anew"
                )
            slot.phase = _Phase.OVER
            entry = self._counted.get(slot.key)
            if entry is None:
                return
            entry.reply, entry.size_bytes = reply, size_bytes
            self._replies[slot.key] = None
            self._reply_bytes += size_bytes
            while self._reply_bytes > self._config.reply_cache_bytes:
                self._drop_reply(next(iter(self._replies)))

    def fail(self, slot: Slot) -> None:
        """It is not counted, or is and has no answer."""
        with self._lock:
            self._close(slot)

    def stepped(self) -> int:
        """What was counted is in the weights now; returns `applied`."""
        with self._lock:
            self._not_stepped.clear()
            return self._applied

    def taint(self) -> int:
        """What was counted and not stepped with has been dropped: it is not counted any more.

        Returns:
            How many micro-batches that was.
        """
        with self._lock:
            dropped = self._not_stepped
            self._not_stepped = set()
            for key in dropped:
                self._forget(key)
            for slot in list(self._open.values()):
                if slot.phase is _Phase.CLAIMED or (slot.phase is _Phase.COUNTED and slot.key in dropped):
                    self._close(slot)
            self._incarnation = secrets.token_hex(8)
            self._applied = 0
            return len(dropped)

    def counted_among(
        self, keys: Iterable[str], *, refuse_from_now: bool = False, refused_of: str = ""
    ) -> tuple[str, set[str], list[Future[None]]]:
        """Which of these are counted.

        Args:
            keys: names.
            refuse_from_now: the others are refused for `WorkerConfig.refuse_s`, those that are under way included.
            refused_of: the driver whose requests are; empty: everybody's.

        Returns:
            The incarnation, those counted, and what to wait for before asking again: of those that are just being
            added up.
        """
        with self._lock:
            undecided, counted = [], set()
            for key in keys:
                slot = self._open.get(key)
                if key in self._counted:
                    counted.add(key)
                elif slot is not None and slot.phase is _Phase.CLAIMED:
                    undecided.append(slot.decided)
                elif refuse_from_now:
                    if slot is not None and refused_of in ("", slot.owner):
                        self._close(slot)
                    self._refuse(key, refused_of)
            return self._incarnation, counted, undecided

    def receipt_of(self, key: str) -> Receipt | None:
        """What was signed for when it was counted; None: it is not, or that is forgotten."""
        with self._lock:
            counted = self._counted.get(key)
            return None if counted is None else counted.receipt

    def _check_wanted(self, slot: Slot) -> None:
        if slot.phase is not _Phase.OPEN:
            raise RefusedError("expired", f"{slot.key} was given up before it was counted; nothing was")
        late_s = self._clock() - slot.apply_before_s
        if late_s > 0:
            self._close(slot)
            raise RefusedError("expired", f"{slot.key} is {late_s:.1f} s too late; nothing was counted")

    def _check_not_refused(self, key: str, owner: str) -> None:
        for refused in {(key, ""), (key, owner)}:
            left_s = self._refused.get(refused, 0.0) - self._clock()
            if left_s > 0:
                raise RefusedError(
                    "busy", f"{key} was given to somebody else and is not counted here; try again in {left_s:.1f} s"
                )
            self._refused.pop(refused, None)

    def _refuse(self, key: str, owner: str) -> None:
        now_s = self._clock()
        self._refused[key, owner] = now_s + self._config.refuse_s
        self._refused.move_to_end((key, owner))
        while self._refused:
            oldest, until_s = next(iter(self._refused.items()))
            if until_s > now_s and len(self._refused) <= self._config.reply_cache_ids:
                return
            del self._refused[oldest]

    def _close(self, slot: Slot) -> None:
        slot.phase = _Phase.OVER
        self._take_out(slot)
        if not slot.decided.done():
            slot.decided.set_result(None)

    def _take_out(self, slot: Slot) -> None:
        """Another one of the same name stays: what was dropped may be asked for again before its answer is made."""
        if self._open.get(slot.key) is slot:
            del self._open[slot.key]

    def _forget(self, key: str) -> None:
        self._drop_reply(key)
        del self._counted[key]

    def _drop_reply(self, key: str) -> None:
        entry = self._counted[key]
        self._reply_bytes -= entry.size_bytes
        entry.reply, entry.size_bytes = None, 0
        self._replies.pop(key, None)
