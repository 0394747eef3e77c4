"""Rounds that close without this node's work: it attends them beside training, and goes on from their anchor.

Where rounds have a quorum (`collective.quorum`), a slower node is called to a round that closes. A thread of its own
takes part in that with zeros, which weigh nothing, and makes the outer step on copies, one round after the other,
however long an inner step takes. The training thread takes up what is newest between two inner steps: it shifts the
parameters by what the anchor moved,

    parameters ← parameters + (new anchor − old anchor)

so the node's own pseudo-gradient, anchor − parameters, stays what it was, and is in no round before it is contributed:
nothing is lost and nothing counts twice. Only its **lag** grows, the rounds over the same parameters that it missed.

The price is that of any member: a vector sent and one received a round, beside training; and 8 bytes a parameter for
the copies until they are taken up.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final

import torch

from trainer.errors import RoundFailedError, RoundLeftError, StateBehindError, TrainerError
from trainer.outer.diloco.rounds import AgreedChanges, Measured, Outcome, RoundWork
from trainer.outer.diloco.state import ReplicaState
from trainer.outer.engine.collective import AttendedCollective, Collective, Contribution, RoundResult

logger = logging.getLogger(__name__)

MOST_MISSED: Final = 5
"""Rounds over the same parameters after which the work of a node that could not attend them is dropped (spec P-40)."""
_LOOK_EVERY_S: Final = 1.0
_PAUSE_S: Final = 0.5
"""After a call in vain: each has this node ask every coordinator before it, and costs who calls one message."""


@dataclass(frozen=True, slots=True, eq=False)
class Attended:
    """What the rounds led to that this node attended since it last took them up."""

    outcome: Outcome | None
    """Of the newest of them; None: there was none, and it cannot attend any more."""
    num_rounds: Mapping[int, int] = field(default_factory=dict)  # By fragment.
    error: StateBehindError | None = None  # Why it cannot attend the next one: the others hold another state.


@dataclass(frozen=True, slots=True, eq=False)
class AttendingCollective:
    """A collective that attends where others take part, to be wrapped as that is."""

    collective: AttendedCollective

    def reduce(self, contribution: Contribution) -> RoundResult:
        """Attends one round."""
        return self.collective.attend(contribution)

    def requested(self) -> bool:
        """Returns False: who attends is called."""
        return False

    def close(self) -> None:
        """Does nothing; the collective is another's."""


class Attendance:
    """The thread that attends rounds, from one state on; for the training thread.

    Args:
        collective: that calls to rounds.
        reducing: the same, which attends, with what lies around it in rounds of the node's own.
    """

    def __init__(self, collective: AttendedCollective, reducing: Collective) -> None:
        self._collective = collective
        self._reducing = reducing
        self._thread: threading.Thread | None = None
        self._ends = threading.Event()
        self._lock = threading.Lock()
        self._found: Attended | None = None
        self._known_rows = 0

    @property
    def is_under_way(self) -> bool:
        """Whether there is a thread that attends."""
        return self._thread is not None and self._thread.is_alive()

    def begin(self, work: RoundWork, changes: AgreedChanges | None) -> None:
        """Attends from a state on, which has no work that counts; what was not taken before is forgotten."""
        self.end()
        self._ends, self._found = threading.Event(), None
        self._collective.open_attendance(is_open=True)
        arguments = (work, changes, self._ends)
        self._thread = threading.Thread(target=self._attend, args=arguments, name="diloco-attendance", daemon=True)
        self._thread.start()

    def vocabulary_changed(self) -> bool:
        """Returns whether members have agreed on other rows than when this was asked last: the model may grow first."""
        before, self._known_rows = self._known_rows, self._collective.agreed_vocabulary_rows
        return before != self._known_rows

    def take(self) -> Attended | None:
        """Returns what was found since the last time; None: nothing."""
        with self._lock:
            found, self._found = self._found, None
        return found

    def end(self) -> Attended | None:
        """Ends attendance, after a round that is agreed on already; returns as `take`."""
        self._ends.set()
        if self._thread is not None:
            self._collective.open_attendance(is_open=False)
            self._thread.join()
            self._thread = None
        return self.take()

    def _attend(self, work: RoundWork, changes: AgreedChanges | None, ends: threading.Event) -> None:
        rows = self._collective.agreed_vocabulary_rows
        # The vocabulary may grow after a round, which is the training thread's to do before the next one.
        while not ends.is_set() and rows == self._collective.agreed_vocabulary_rows:
            called_to = self._collective.wait_to_attend(_LOOK_EVERY_S)
            if called_to is None or called_to < work.state.round_index or ends.is_set():
                continue
            try:
                outcome = self._outcome(work, changes)
            except StateBehindError as error:
                self._add(None, work.state.fragment, error)
                break
            except RoundLeftError:
                continue
            except RoundFailedError as error:
                logger.info("round %d was not attended: %s", work.state.round_index, error)
                ends.wait(_PAUSE_S)
                continue
            except TrainerError as error:
                logger.warning("round %d was not attended: %s", work.state.round_index, error)
                break
            logger.info("round %d closed without this node's work, which counts later", work.state.round_index)
            self._add(outcome, work.state.fragment)
            work = replace(work, state=outcome.state, state_digest=outcome.digest, config=outcome.config)
        if not ends.is_set():
            self._collective.open_attendance(is_open=False)

    def _outcome(self, work: RoundWork, changes: AgreedChanges | None) -> Outcome:
        current = work.state.fragments[work.state.fragment]
        nothing = Contribution(
            round_index=work.state.round_index,
            vector=torch.zeros_like(current.anchor),
            num_batches=0,
            age_s=0.0,
            progress=0.0,
            reference=current.reference,
            state_digest="",
            basis=current.basis,
        )
        outcome = work.carried_out(Measured(nothing), self._reducing, changes)
        # What encoding left out of this node's last contribution waits for the next one.
        fragments = list(outcome.state.fragments)
        fragments[work.state.fragment] = replace(fragments[work.state.fragment], residual=current.residual)
        return replace(outcome, state=replace(outcome.state, fragments=tuple(fragments)))

    def _add(self, outcome: Outcome | None, fragment: int, error: StateBehindError | None = None) -> None:
        with self._lock:
            before = self._found if self._found is not None else Attended(None)
            num_rounds = dict(before.num_rounds)
            if outcome is not None:
                num_rounds[fragment] = num_rounds.get(fragment, 0) + 1
            self._found = Attended(outcome if outcome is not None else before.outcome, num_rounds, error)


def rounds_between(before: ReplicaState, after: ReplicaState) -> dict[int, int]:
    """Returns the rounds of each fragment that lie between two states of one run, where there are any.

    States that are no further leave no round between; their anchors may differ all the same, so each counts one.
    """
    count = len(after.fragments)

    def done(state: ReplicaState, fragment: int) -> int:
        return state.round_index // count + (fragment < state.round_index % count)

    if after.round_index <= before.round_index:
        return dict.fromkeys(range(count), 1)
    missed = {fragment: done(after, fragment) - done(before, fragment) for fragment in range(count)}
    return {fragment: rounds for fragment, rounds in missed.items() if rounds}
