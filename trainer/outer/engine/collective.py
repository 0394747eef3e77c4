"""What a strategy asks of the other members, and what it gets back: one protocol with several engines.

In each round a strategy passes one vector and gets the vector that *all* members of the round agreed on, bit for bit
the same at each of them, or :class:`~trainer.errors.RoundFailedError`. ``reduce`` is a function of its argument: what
must survive a round (the residual of a lossy encoding, the basis of PowerSGD) travels in :class:`Contribution` and
:class:`RoundResult`, and the strategy alone saves, restores and resizes state.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

from torch import Tensor

from trainer.aggregation import Finding

_KEY_DIGITS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Contribution:
    """A node's part in a round. Tensors are 1-D fp32 on the CPU; the collective only reads them."""

    round_index: int  # Rounds committed before this one.
    vector: Tensor  # [P] to be aggregated (a pseudo-gradient); finite.
    num_batches: int
    """Batches that went into ``vector``. 0: ``vector`` counts for nothing; the node only wants the result."""
    age_s: float  # Seconds since the oldest of those batches was trained on.
    progress: float = 1.0
    """Share of the round's planned work that is in ``vector``, 0 to 1; less if the round was requested early."""
    num_steps: int = 0  # Inner steps that the batches took; 0: not told.
    lag: int = 0
    """Rounds over the same parameters that went by without this work since it began; it weighs the less for them."""
    reference: Tensor
    """[P] the last accepted result for the same positions (zeros before the first); equal at all members."""
    state_digest: str  # SHA-256 of the state all members must share before the round; empty: nothing to compare.
    residual: Tensor | None = None
    """[P] what earlier lossy encodings left out, to be added before encoding; None: nothing."""
    basis: Tensor | None = None
    """What PowerSGD begins with (`trainer.outer.engine.powersgd`), equal at all members: that of the last result for
    the same positions; None before the first, and for collectives that do not factor."""
    filled: Future[None] | None = None
    """Done when the values of ``vector`` are there; until then members may agree on the round, and no longer. None:
    they are there already. Whoever gives it fills it within some seconds, or the others take it for dead."""

    def wait_until_filled(self) -> None:
        """Waits until the values of ``vector`` are there."""
        if self.filled is not None:
            self.filled.result()


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberFinding:
    """What this node itself measured of one member's contribution, independent of what others say."""

    member: str  # As in :attr:`RoundReport.members`.
    reason: str
    """How it differs from the others, and so was left out of what this node reduced (in log mode: would have been); a
    word or two, followed by a colon and a text for people. Empty: it does not differ."""
    cosine: float | None = None  # To the nearer half of the others, -1 to 1; None: there was nothing to compare with.
    norm_ratio: float | None = None  # Norm over the median member's.


def member_findings(findings: Sequence[Finding], names: Sequence[str]) -> tuple[MemberFinding, ...]:
    """Returns the findings of gradient validation with the members' names for their positions."""
    return tuple(
        MemberFinding(
            member=names[finding.member],
            reason="" if finding.passed else finding.reason,
            cosine=finding.cosine,
            norm_ratio=finding.norm_ratio,
        )
        for finding in findings
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundReport:
    """How a round went, for log and metrics."""

    round_index: int
    members: tuple[str, ...]  # In the result, in the agreed order.
    dropped: tuple[tuple[str, str], ...] = ()  # Members not in it, or not wholly, and why.
    completeness: float = 1.0  # Share of the agreed members' values that are in the result, 0 to 1.
    sent_bytes: int = 0
    received_bytes: int = 0
    seconds: float = 0.0
    rule: str = "mean"  # The one used, possibly a fallback of the configured one.
    num_passes: int = 1  # 1, plus one for each time slices of dead reducers were reduced again.
    weights: tuple[float, ...] = ()  # Weight of each of ``members`` before normalising; empty if the rule knows none.
    validation: tuple[tuple[str, str], ...] = ()
    """(member, finding) of gradient validation, also in the mode that only logs."""
    findings: tuple[MemberFinding, ...] = ()
    """For each member, in the agreed order, if validation is on and this node has reduced anything. Judge a member by
    these: ``validation`` and ``dropped`` are partly the word of others."""
    note: str = ""  # Anything else a reader of the log must know.
    phases: tuple[float, float, float] = (0.0, 0.0, 0.0)
    """Of `seconds`: until all had agreed, while tensors moved, for the vote; zeros where an engine does not tell."""
    num_values: int = 0  # Of the vector that was agreed on: sent and received bytes count for so many parameters.
    result_digest: str = ""  # SHA-256 of what all members hold as the result; empty: the engine knows none.

    @property
    def bits_per_value(self) -> tuple[float, float] | None:
        """Bits sent and received for each value of the vector, messages of the round included; None: not known."""
        if not self.num_values:
            return None
        return 8 * self.sent_bytes / self.num_values, 8 * self.received_bytes / self.num_values

    def remarks(self) -> tuple[str, ...]:
        """Returns lines for people: members left out, members that look odd and were kept, and the note.

        A member that was alone is not called odd: nobody was there to compare it with.
        """
        left_out = dict(self.dropped)
        found = self.validation if len(self.members) > 1 else ()
        odd = {member: reason for member, reason in found if member not in left_out}
        said = [(member, "left out", reason) for member, reason in left_out.items()]
        said += [(member, "looks odd", reason) for member, reason in odd.items()]
        # Of a key the first digits; any other name as it is.
        lines = (f"{who[:8] if len(who) == _KEY_DIGITS else who} {what}: {reason}" for who, what, reason in said)
        return (*lines, *([self.note] if self.note else []))


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundResult:
    """What all members of a round have agreed on."""

    vector: Tensor  # [P] fp32 CPU; bit-identical at all members; owned by the caller.
    report: RoundReport
    residual: Tensor | None = None
    """[P] what encoding the contribution left out, for the next contribution; None: lossless or not fed back."""
    progress: float | None = None
    """Share of the round's planned work that is in ``vector``, the same at all members; None: the node's own."""
    change: int | None = None
    """Number of the newest change of the run in force in this round, by its agreement; None: it has no agreement."""
    basis: Tensor | None = None
    """For the next contribution; bit-identical at all members, and part of what a joiner fetches. None: nothing."""


FollowingPhase = Callable[[RoundResult], Contribution]
"""Makes a node's part in the second phase of the first one's result; it may take seconds, and runs in any thread."""


@runtime_checkable
class Collective(Protocol):
    """Aggregates one vector a round over all members.

    ``reduce`` may be called from another thread than ``requested``, and never twice at once.
    """

    def reduce(self, contribution: Contribution) -> RoundResult:
        """Takes part in one round and waits for its result, up to the engine's own deadline.

        Raises:
            RoundFailedError: the round ended without a result; nothing happened, training may go on.
            TrainerError: the engine cannot go on at all (a broken process group, an incompatible run).
        """
        ...

    def requested(self) -> bool:
        """Returns whether others wait for this node's next round; cheap enough to ask after every inner step."""
        ...

    def close(self) -> None:
        """Releases threads, sockets and groups; a second call does nothing."""
        ...


@runtime_checkable
class PhasedCollective(Collective, Protocol):
    """One whose rounds may have two phases among the same members."""

    def reduce_in_phases(self, contribution: Contribution, following: FollowingPhase) -> RoundResult:
        """Takes part in a round of which the second vector depends on the result of the first.

        Members and weights are those of the first phase. Of the second contribution only tensors and state digest
        count; all members must make it of the same length. Nothing happens unless both phases have a result: that of
        the second is returned, with a report on both.

        Raises:
            RoundFailedError, TrainerError: as `Collective.reduce`.
        """
        ...


@runtime_checkable
class AttendedCollective(Collective, Protocol):
    """One whose rounds may close without the work of members that train on, and then attend the round for its result.

    Attendance is from a thread of its own, beside training; `attend` and ``reduce`` are never called at once.
    """

    @property
    def closes_early(self) -> bool:
        """Whether rounds close by a quorum; if not, nobody is ever called."""
        ...

    @property
    def agreed_vocabulary_rows(self) -> int:
        """Rows of vocabulary that the members of the last round all can have; 0 before the first."""
        ...

    def open_attendance(self, *, is_open: bool) -> None:
        """Says whether somebody waits for calls, or ends that waiting, and a round that is not agreed on yet."""
        ...

    def wait_to_attend(self, timeout_s: float) -> int | None:
        """Waits for a call to a round that closes, and returns its number; None: there was none."""
        ...

    def attend(self, contribution: Contribution) -> RoundResult:
        """Takes part in a round without batches; see `Collective.reduce`."""
        ...


def reduce_each_phase(collective: Collective, contribution: Contribution, following: FollowingPhase) -> RoundResult:
    """Goes through two phases as a round each, for engines whose members cannot change between rounds."""
    first = collective.reduce(contribution)
    second = collective.reduce(following(first))
    return replace(second, report=report_on_both(first.report, second.report))


def report_on_both(first: RoundReport, second: RoundReport) -> RoundReport:
    """Returns one report on a round of two phases: a member counts as left out if it was in either."""
    odd = {finding.member: finding.reason for finding in first.findings}
    notes = dict.fromkeys(note for note in (first.note, second.note) if note)
    return replace(
        second,
        dropped=tuple(sorted({**dict(second.dropped), **dict(first.dropped)}.items())),
        completeness=min(first.completeness, second.completeness),
        sent_bytes=first.sent_bytes + second.sent_bytes,
        received_bytes=first.received_bytes + second.received_bytes,
        seconds=first.seconds + second.seconds,
        num_passes=max(first.num_passes, second.num_passes),
        validation=tuple({**dict(second.validation), **dict(first.validation)}.items()),
        findings=tuple(
            finding if finding.reason else replace(finding, reason=odd.get(finding.member, ""))
            for finding in second.findings or first.findings
        ),
        note="; ".join(notes),
        phases=(
            first.phases[0] + second.phases[0],
            first.phases[1] + second.phases[1],
            first.phases[2] + second.phases[2],
        ),
        result_digest=_digest_of_both(first.result_digest, second.result_digest),
    )


def _digest_of_both(first: str, second: str) -> str:
    return hashlib.sha256(f"{first} {second}".encode()).hexdigest() if first and second else ""


class LocalCollective:
    """A round of one: the node's own pseudo-gradient is the agreed one (spec T-15)."""

    def __init__(self, member: str = "self") -> None:
        self._member = member

    def reduce(self, contribution: Contribution) -> RoundResult:
        """Returns the contribution itself, not encoded."""
        contribution.wait_until_filled()
        report = RoundReport(round_index=contribution.round_index, members=(self._member,), weights=(1.0,))
        return RoundResult(vector=contribution.vector, report=report)

    def reduce_in_phases(self, contribution: Contribution, following: FollowingPhase) -> RoundResult:
        """Returns the second contribution itself."""
        return reduce_each_phase(self, contribution, following)

    def requested(self) -> bool:
        """Returns False: there is nobody else."""
        return False

    def close(self) -> None:
        """Does nothing."""
