"""When a round closes without everybody's work (`collective.quorum`), and what work that missed rounds weighs.

With a quorum a round closes when so many members have come with work of their own and a grace window has passed. Who is
not among them attends: it is a member without weight, so it holds the result as everybody does, and its work goes into
the round that it comes to next, weighed down by its **lag**, the rounds over the same parameters that it missed
(``1/sqrt(1 + lag)``: FedBuff, arXiv 2106.06639; FedAsync, arXiv 1903.03934, with a = 1/2). The agreement names each
member's lag, and nobody has to believe it: all count for themselves in which rounds they saw a member without weight
(`RoundLags`), and refuse an agreement that has it fresher.

The window follows the spread of arrivals that this node itself measured in rounds that it coordinated (`ArrivalGaps`):
a quarter longer than the typical gap of the typical member that can be caught at all. It never exceeds
`collective.max_grace_s` nor an eighth of the time between rounds: waiting costs at most a ninth of the time, whatever
others do.
"""

from __future__ import annotations

import math
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Collection, Mapping
from itertools import pairwise
from statistics import median_low
from typing import TYPE_CHECKING, Final

from trainer.errors import RefusedError

if TYPE_CHECKING:
    from trainer.collective.messages import Agreement

MAX_LAG: Final = 15
"""Rounds beyond which more lag weighs nothing more: so a coordinator can weigh nobody down below a quarter."""
_LONGEST_SHARE: Final = 1 / 8  # Of the time between rounds, for the window.
_UNUSED_SHARE: Final = 1 / 8  # Of the longest window, where nobody that is late can be caught.
_MARGIN: Final = 1.25
_KEPT_GAPS: Final = 8
_MAX_MEMBERS: Final = 1024
_ROUNDING: Final = 1e-9
_ON_THE_WAY_S: Final = 2.0


def freshness(lag: int) -> float:
    """Returns what is left of the weight of work that missed so many rounds, 1/4 to 1; the same bits everywhere."""
    return 1.0 / math.sqrt(1 + min(max(lag, 0), MAX_LAG))


def members_needed(quorum: float, num_before: int) -> int:
    """Returns how many members make a quorum: a number of them, or below 1 a share of those of the round before."""
    return max(1, math.ceil(quorum * num_before - _ROUNDING)) if quorum < 1 else math.ceil(quorum)


def unaged_weights(agreement: Agreement) -> list[float]:
    """Returns the members' weights without their freshness, which are what is capped."""
    return [member.weight / freshness(member.lag) for member in agreement.members]


def check_lags(agreement: Agreement, observed: Mapping[str, int] | None) -> None:
    """Raises RefusedError (``agreement``) for an agreement that has a member fresher than this node saw it to be.

    ``observed`` None: rounds have no quorum, so no work is late, and none may be weighed down as if it were.
    """
    late = [member.peer_id[:8] for member in agreement.members if observed is None and member.lag]
    if late:
        text = f"round {agreement.round_index}: expected no lags, since rounds wait for all, found one of {late[0]}"
        raise RefusedError("agreement", text)
    observed = observed or {}
    for member in agreement.members:
        least = min(observed.get(member.peer_id, 0), MAX_LAG)
        if member.weight > 0 and member.lag < least:
            raise RefusedError(
                "agreement",
                f"round {agreement.round_index}: expected the work of {member.peer_id[:8]} to have missed {least} "
                f"rounds or more, found {member.lag}; it would weigh more than it may",
            )


def check_workers(
    agreement: Agreement, quorum: float, num_before: int, known: Collection[str], *, is_replaced: bool
) -> None:
    """Raises RefusedError (``agreement``) where too few known nodes' work is there for a node to attend the round.

    Or whoever coordinates could call everybody as soon as a round is over, and have its own work alone be the result.
    ``num_before`` members were in the round before. Of an agreement in the place of one with enough work
    (``is_replaced``), half of it and that of two is enough: some of them may have gone.
    """
    needed = members_needed(quorum, num_before)
    needed = min(needed, len(known)) if quorum < 1 else needed
    if is_replaced:
        needed = max(min(2, needed), -(-needed // 2))
    working = sum(member.weight > 0 and member.peer_id in known for member in agreement.members)
    if working < needed:
        raise RefusedError(
            "agreement",
            f"round {agreement.round_index}: expected the work of {needed} known nodes before others attend, "
            f"found that of {working}",
        )


class RoundLags:
    """How many rounds over the same parameters each member has attended without work since its work was in one.

    ``cycle`` rounds are over different parameters each. Bounded: the members of as many agreements. A node that was
    not in the last round over some parameters knows no lags there: others may have come with their work meanwhile.
    """

    def __init__(self, cycle: int = 1) -> None:
        self._cycle = cycle
        self._by_round: dict[int, dict[str, int]] = {}

    def observed(self, round_index: int) -> Mapping[str, int]:
        """Returns the lags of the members of the round before this one over the same parameters, if it was seen."""
        return self._by_round.get(round_index - self._cycle, {})

    def committed(self, agreement: Agreement) -> None:
        """Takes a committed round into account; who was no member of it is forgotten."""
        before, newest = self.observed(agreement.round_index), agreement.round_index
        self._by_round[newest] = {
            member.peer_id: 0 if member.weight > 0 else before.get(member.peer_id, 0) + 1
            for member in agreement.members
        }
        kept = range(newest - self._cycle + 1, newest + 1)
        self._by_round = {number: lags for number, lags in self._by_round.items() if number in kept}


class ArrivalGaps:
    """How long after the quorum further members came with their work, the last times that this node saw it.

    A member has one voice, the lower median of its last eight gaps, and the window follows the lower median member: so
    a minority that comes as late as it can moves it no further than other members' gaps.
    """

    def __init__(self) -> None:
        self._gaps: OrderedDict[str, deque[float]] = OrderedDict()

    def note(self, peer_id: str, gap_s: float) -> None:
        """Takes down that a member came so long after the quorum."""
        self._gaps.setdefault(peer_id, deque(maxlen=_KEPT_GAPS)).append(max(0.0, gap_s))
        self._gaps.move_to_end(peer_id)
        while len(self._gaps) > _MAX_MEMBERS:
            self._gaps.popitem(last=False)

    def window_s(self, longest_s: float) -> float:
        """Returns how long to wait after the quorum: the longest until there are gaps, short where none is shorter."""
        if not self._gaps:
            return longest_s
        typical = [gap_s for gap_s in map(median_low, self._gaps.values()) if gap_s <= longest_s]
        return min(longest_s, _MARGIN * median_low(typical)) if typical else _UNUSED_SHARE * longest_s


class QuorumHistory:
    """What one node remembers of rounds for those to come."""

    def __init__(self, cycle: int = 1) -> None:
        self.lags = RoundLags(cycle)
        self.gaps = ArrivalGaps()
        self.num_members = 0
        """Of the last committed round; 0: none yet."""
        self._agreed_at_s: deque[float] = deque(maxlen=_KEPT_GAPS + 1)

    def committed(self, agreement: Agreement, now_s: float) -> None:
        """Takes a committed round into account."""
        self.lags.committed(agreement)
        self.num_members = len(agreement.members)
        self._agreed_at_s.append(now_s)

    @property
    def last_agreed_at_s(self) -> float | None:
        """When the last committed round was; None: there was none."""
        return self._agreed_at_s[-1] if self._agreed_at_s else None

    def may_close_with_few(self, gather_timeout_s: float, now_s: float) -> bool:
        """Whether a gathering since the last committed round may have come to its end without a quorum."""
        before_s = self.last_agreed_at_s
        return before_s is None or now_s - before_s >= gather_timeout_s - _ON_THE_WAY_S

    def longest_window_s(self, max_grace_s: float) -> float:
        """Returns what a grace window may last: the option, or an eighth of the usual time between rounds if less."""
        intervals = [after - before for before, after in pairwise(self._agreed_at_s)]
        return min(max_grace_s, _LONGEST_SHARE * median_low(intervals)) if intervals else max_grace_s


class QuorumWatch:
    """One gathering's arrivals, and from when on it may close; times are of one monotonic clock, in seconds."""

    def __init__(self, quorum: float, max_grace_s: float, history: QuorumHistory, num_known: int) -> None:
        self._history = history
        needed = members_needed(quorum, history.num_members or num_known)
        self.needed = min(needed, num_known) if quorum < 1 else needed
        """Members with work that make a quorum."""
        self._longest_s = history.longest_window_s(max_grace_s)
        self._window_s = history.gaps.window_s(self._longest_s)
        self._came: set[str] = set()
        self._quorum_at_s: float | None = None

    @property
    def closes_at_s(self) -> float | None:
        """When the window ends; None while there is no quorum. Later arrivals do not move it."""
        return None if self._quorum_at_s is None else self._quorum_at_s + self._window_s

    def came(self, peer_id: str, lag: int, now_s: float) -> None:
        """Takes down that a member has come with work of its own; once a member."""
        if peer_id in self._came:
            return
        self._came.add(peer_id)
        before_s = self._history.last_agreed_at_s
        if self._quorum_at_s is not None:
            self._history.gaps.note(peer_id, now_s - self._quorum_at_s)
        elif lag and before_s is not None:  # Too late for the round before, by so much.
            self._history.gaps.note(peer_id, now_s - before_s + self._window_s)
        if self._quorum_at_s is None and len(self._came) >= self.needed:
            self._quorum_at_s = now_s

    def left(self, peer_id: str) -> None:
        """Takes down that a member has left; a quorum that it was needed for is none any more."""
        self._came.discard(peer_id)
        if len(self._came) < self.needed:
            self._quorum_at_s = None

    def left_s(self, now_s: float) -> float | None:
        """Returns how long the window lasts yet; None while there is no quorum."""
        return None if self.closes_at_s is None else max(0.0, self.closes_at_s - now_s)

    def is_over(self, now_s: float) -> bool:
        """Returns whether the round may close."""
        return self.left_s(now_s) == 0.0


class AttendanceCall:
    """Calls the thread that attends rounds beside training; from the event loop to that thread."""

    def __init__(self) -> None:
        self._called = threading.Event()
        self._guard = threading.Lock()  # Over both of what says that there is a call, and to which round.
        self._round_index = -1
        self._is_open = False  # Whether there is such a thread now.
        self._comes_until_s = 0.0

    @property
    def is_open(self) -> bool:
        """Whether a call is heard."""
        return self._is_open

    def open(self) -> None:
        """Says that a thread waits for calls."""
        self._is_open, self._comes_until_s = True, 0.0

    def close(self) -> None:
        """Ends that thread's waiting; whoever called now would find the node on its way to the round with its work."""
        self._is_open = False
        self.comes_for(_ON_THE_WAY_S)
        self._called.set()

    def comes_for(self, seconds: float) -> None:
        """Says for how long the node is on its way to a round by itself; 0: it is not."""
        self._comes_until_s = time.monotonic() + seconds

    def call(self, round_index: int) -> bool:
        """Asks for attendance; returns whether the node comes, to attend or with its own work."""
        if self._is_open:
            with self._guard:
                self._round_index = max(self._round_index, round_index)
                self._called.set()
        return self._is_open or time.monotonic() < self._comes_until_s

    def wait(self, timeout_s: float) -> int | None:
        """Waits for a call, and returns its round; None: there was none."""
        if not self._called.wait(timeout_s):
            return None
        with self._guard:
            self._called.clear()
            found, self._round_index = self._round_index, -1
        return found if found >= 0 else None
