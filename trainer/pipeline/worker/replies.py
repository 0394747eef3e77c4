"""`ReplyCache`: a micro-batch is counted once, however often it is sent, and every repetition gets the same answer.

A micro-batch goes through these phases, under one lock:

    begin ──▶ open ──claim──▶ claimed ──counted──▶ counted ──settle──▶ answered, kept, some day forgotten
                │ (late, given up,   │ (late)
                ▼  refused)          ▼
              nothing               taint: all that is not stepped with is dropped, in a new incarnation

The compute thread calls `claim` when only the adding up is left to do. Until then anybody can call it off: a caller
that went away, the clock, the ledger server. From then on nobody can, and `counted_among` says what to wait for.

A name and its answer belong to the driver it was counted for, because names can be guessed. The clock goes on while a
process is stopped: one that is stopped between claim and counting cannot take one gradient back out of a sum, so it
drops the sum and becomes another incarnation, which others treat like a worker that died and came back.
"""

from __future__ import annotations

import secrets
import sys
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple, TypeAlias

from trainer.errors import RefusedError
from trainer.pipeline.protocol.messages import StageAnswer
from trainer.pipeline.protocol.tensors import TensorAnswer
from trainer.pipeline.protocol.work import boottime_s
from trainer.pipeline.worker.config import WorkerConfig

StageReply: TypeAlias = TensorAnswer[StageAnswer]

_MAX_STEPS = 65_536

_Phase = Enum("_Phase", ["OPEN", "CLAIMED", "COUNTED", "OVER"])


@dataclass(slots=True, eq=False)
class PendingCount:
    """A micro-batch on its way to being counted; opaque to users of the cache."""

    kind: str
    key: str
    owner: str
    deadlines_s: list[float]  # Until when it may be counted, for each caller that still waits; on the cache's clock.
    phase: _Phase = _Phase.OPEN
    decided: Future[None] = field(default_factory=Future)  # Done when it is counted, or will not be.

    @property
    def apply_before_s(self) -> float:
        """The latest deadline."""
        return max(self.deadlines_s, default=float("-inf"))


class Acknowledgement(NamedTuple):
    """A worker's word that it has counted a micro-batch, and how many this incarnation has with it."""

    incarnation: str
    applied_number: int


class Mark(NamedTuple):
    """What was counted, and in no step yet, at a moment: that of handing gradients over to a round."""

    incarnation: str
    applied: int
    keys: frozenset[str]


@dataclass(slots=True)
class _Counted:
    kind: str
    owner: str
    acknowledgement: Acknowledgement
    reply: StageReply | None = None
    size_bytes: int = 0


class SharedThrough:
    """Tells how many of the micro-batches that a worker counted would outlive it; never more than is true.

    A micro-batch outlives its worker when the weights it changed are on disk, or part of a committed round (of every
    fragment). A round commits the weights from its beginning, so each says how many steps were taken meanwhile.
    Written by the compute thread; `count` may be read from any thread.
    """

    def __init__(self, num_fragments: int = 1) -> None:
        self._steps: deque[tuple[int, int]] = deque(maxlen=_MAX_STEPS)
        """Version and micro-batches counted, of each step."""
        self._by_fragment = [0] * num_fragments
        self._saved = 0
        self._former_version = -1
        """The highest of earlier incarnations: a checkpoint up to there may hold their weights."""

    @property
    def count(self) -> int:
        """The first so many would outlive the worker."""
        return max(self._saved, min(self._by_fragment))

    @property
    def in_weights(self) -> int:
        """The first so many are in the weights now."""
        return self._steps[-1][1] if self._steps else 0

    def stepped(self, version: int, applied: int) -> None:
        """Notes a step, after so many micro-batches."""
        self._steps.append((version, applied))

    def committed(self, fragment: int, steps_ago: int) -> None:
        """Notes a committed round that holds this worker's weights of so many steps ago."""
        past = len(self._steps) - 1 - steps_ago
        if past >= 0 and fragment < len(self._by_fragment):
            self._by_fragment[fragment] = max(self._by_fragment[fragment], self._steps[past][1])

    def saved(self, version: int) -> None:
        """Notes the newest version whose weights are on disk."""
        if version <= self._former_version:
            return
        for stepped_version, applied in reversed(self._steps):
            if stepped_version <= version:
                self._saved = max(self._saved, applied)
                return

    def start_over(self) -> None:
        """Counts from 0, for another incarnation."""
        if self._steps:
            self._former_version = max(self._former_version, self._steps[-1][0])
        self._steps.clear()
        self._by_fragment = [0] * len(self._by_fragment)
        self._saved = 0


class ReplyCache:
    """What this worker has counted, and its answers. Any thread may call it."""

    def __init__(
        self, config: WorkerConfig, *, num_fragments: int = 1, clock: Callable[[], float] = boottime_s
    ) -> None:
        self.shared = SharedThrough(num_fragments)
        self.incarnation = secrets.token_hex(8)  # Changes when counted micro-batches are dropped.
        self.applied = 0
        self.reply_bytes = 0
        self._config = config
        self._clock = clock
        self._lock = threading.RLock()
        self._open: dict[str, PendingCount] = {}
        self._counted: OrderedDict[str, _Counted] = OrderedDict()
        self._replies: OrderedDict[str, None] = OrderedDict()
        self._not_stepped: set[str] = set()
        self._refused: OrderedDict[tuple[str, str], float] = OrderedDict()
        """By micro-batch and driver; an empty driver stands for all."""

    def begin(self, kind: str, key: str, apply_before_s: float, *, owner: str = "") -> PendingCount | StageReply:
        """Registers a caller that asks for a micro-batch of ``owner`` to be counted; once, whatever the kinds.

        Returns the earlier answer, or a pending count, new or shared with other callers. Raises RefusedError:
        ``already-applied``; ``counted-for-another`` driver; or ``busy``, while it is being counted as another kind or
        for another driver, and for a while after it was given to somebody else.
        """
        with self._lock:
            counted = self._counted.get(key)
            if counted is not None and counted.owner != owner:
                raise RefusedError("counted-for-another", f"{key} is counted for another driver")
            if counted is not None and counted.reply is not None and counted.kind == kind:
                self._replies.move_to_end(key)
                return counted.reply
            pending = self._open.get(key)
            if pending is not None and (pending.kind, pending.owner) == (kind, owner):
                pending.deadlines_s.append(apply_before_s)
                return pending
            if counted is not None:
                raise RefusedError("already-applied", f"{key} is counted; its answer is not kept any more")
            if pending is not None:
                raise RefusedError(
                    "busy", f"{key} is being counted as {pending.kind} of {pending.owner[:12]}; try again"
                )
            self._check_not_refused(key, owner)
            pending = self._open[key] = PendingCount(kind, key, sys.intern(owner), [apply_before_s])
            return pending

    def leave(self, pending: PendingCount, apply_before_s: float) -> bool:
        """Unregisters a caller; returns whether nobody waits any more and it is not counted: then it never will be."""
        with self._lock:
            if pending.phase is not _Phase.OPEN:
                return False
            pending.deadlines_s.remove(apply_before_s)
            if pending.deadlines_s:
                return False
            self.fail(pending)
            return True

    def check_wanted(self, pending: PendingCount) -> None:
        """Checks that somebody still waits for it; raises RefusedError (``expired``) if not."""
        with self._lock:
            if pending.phase is not _Phase.OPEN:
                raise RefusedError("expired", f"{pending.key} was given up before it was counted; nothing was")
            late_s = self._clock() - pending.apply_before_s
            if late_s > 0:
                self.fail(pending)
                raise RefusedError("expired", f"{pending.key} is {late_s:.1f} s too late; nothing was counted")

    def is_claimed(self, pending: PendingCount) -> bool:
        """Returns whether it is just being added up."""
        with self._lock:
            return pending.phase is _Phase.CLAIMED

    def claim(self, pending: PendingCount) -> None:
        """Marks it as being added up, to be followed by `counted` or `fail` at once; raises as `check_wanted`."""
        with self._lock:
            self.check_wanted(pending)
            pending.phase = _Phase.CLAIMED

    def counted(self, pending: PendingCount) -> Acknowledgement | None:
        """Marks it as added up; returns None if time has run out in between: `taint` must follow."""
        with self._lock:
            if self._clock() > pending.apply_before_s:
                return None
            pending.phase = _Phase.COUNTED
            self.applied += 1
            acknowledgement = Acknowledgement(self.incarnation, self.applied)
            self._counted[pending.key] = _Counted(pending.kind, pending.owner, acknowledgement)
            self._not_stepped.add(pending.key)
            while len(self._counted) > self._config.reply_cache_ids:
                self._forget(next(iter(self._counted)))
            pending.decided.set_result(None)
            return acknowledgement

    def settle(self, pending: PendingCount, reply: StageReply, size_bytes: int) -> None:
        """Keeps its answer for repetitions; raises RefusedError (``tainted``) if it was dropped again meanwhile."""
        with self._lock:
            self._take_out(pending)
            if pending.phase is not _Phase.COUNTED:
                raise RefusedError(
                    "tainted", f"{pending.key} was counted and dropped again with all that was; send it anew"
                )
            pending.phase = _Phase.OVER
            entry = self._counted.get(pending.key)
            if entry is None:
                return
            entry.reply, entry.size_bytes = reply, size_bytes
            self._replies[pending.key] = None
            self.reply_bytes += size_bytes
            while self.reply_bytes > self._config.reply_cache_bytes:
                self._drop_reply(next(iter(self._replies)))

    def fail(self, pending: PendingCount) -> None:
        """Closes what is not counted, or is and has no answer."""
        with self._lock:
            pending.phase = _Phase.OVER
            self._take_out(pending)
            if not pending.decided.done():
                pending.decided.set_result(None)

    def mark(self) -> Mark:
        """Returns what the gradients added up until now are of."""
        with self._lock:
            return Mark(self.incarnation, self.applied, frozenset(self._not_stepped))

    def stepped(self, version: int, mark: Mark | None = None) -> None:
        """Notes that all that was counted, until ``mark`` if there is one, is in the weights of ``version``."""
        with self._lock:
            if mark is None:
                self._not_stepped.clear()
                self.shared.stepped(version, self.applied)
            elif mark.incarnation == self.incarnation:
                self._not_stepped -= mark.keys
                self.shared.stepped(version, mark.applied)
            else:  # What was counted before was dropped since, here at least.
                self.shared.stepped(version, 0)

    def taint(self) -> int:
        """Forgets what was counted and not stepped with, and becomes another incarnation; returns how many it was."""
        with self._lock:
            dropped = self._not_stepped
            self._not_stepped = set()
            for key in dropped:
                self._forget(key)
            for pending in list(self._open.values()):
                if pending.phase is _Phase.CLAIMED or (pending.phase is _Phase.COUNTED and pending.key in dropped):
                    self.fail(pending)
            self.shared.start_over()  # Before the incarnation changes: its count must not be too high.
            self.incarnation = secrets.token_hex(8)
            self.applied = 0
            return len(dropped)

    def counted_among(
        self, keys: Iterable[str], *, refuse_from_now: bool = False, refused_of: str = ""
    ) -> tuple[str, dict[str, Acknowledgement], list[Future[None]]]:
        """Returns the incarnation, which micro-batches are counted, and what to wait for: those being added up.

        With ``refuse_from_now`` the others are refused for `WorkerConfig.refuse_s`, pending ones included; requests of
        the driver ``refused_of`` only, empty: everybody's.
        """
        with self._lock:
            undecided, counted = [], dict[str, Acknowledgement]()
            for key in keys:
                pending = self._open.get(key)
                if key in self._counted:
                    counted[key] = self._counted[key].acknowledgement
                elif pending is not None and pending.phase is _Phase.CLAIMED:
                    undecided.append(pending.decided)
                elif refuse_from_now:
                    if pending is not None and refused_of in ("", pending.owner):
                        self.fail(pending)
                    self._refuse(key, refused_of)
            return self.incarnation, counted, undecided

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

    def _take_out(self, pending: PendingCount) -> None:
        """Another one of the same name stays: what was dropped may be asked for again before its answer is made."""
        if self._open.get(pending.key) is pending:
            del self._open[pending.key]

    def _forget(self, key: str) -> None:
        self._drop_reply(key)
        del self._counted[key]

    def _drop_reply(self, key: str) -> None:
        entry = self._counted[key]
        self.reply_bytes -= entry.size_bytes
        entry.reply, entry.size_bytes = None, 0
        self._replies.pop(key, None)
