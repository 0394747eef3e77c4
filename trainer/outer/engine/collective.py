"""What a strategy asks of the other members, and what it gets back: one protocol with several engines.

A strategy hands in one vector a round and gets back the vector *all* members of the round agreed on, bit for bit the
same at each of them, or :class:`~trainer.errors.RoundFailedError` and nothing. It does not learn how: alone
(`LocalCollective`: a node's own pseudo-gradient is the agreed one, spec T-15), over a process group inside a cluster,
or among strangers over the internet.

``reduce`` is a function of its argument: whatever must survive a round (the residual of a lossy encoding) travels in
:class:`Contribution` and :class:`RoundResult`, so that a round that fails, or whose result is not used, leaves nothing
behind, and one owner saves, restores and resizes all state.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import Tensor

__all__ = ["Collective", "Contribution", "LocalCollective", "MemberFinding", "RoundReport", "RoundResult"]

_KEY_DIGITS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Contribution:
    """What one node brings to one round. Tensors are 1-D fp32 on the CPU, and belong to the collective to read only."""

    round_index: int
    """Which round: number of rounds committed before it (outer step · fragments + fragment)."""
    vector: Tensor
    """[P] what is to be aggregated (a pseudo-gradient); finite."""
    num_batches: int
    """Batches that went into ``vector``. 0: nothing to contribute (``vector`` is zeros); wants the result only."""
    age_s: float
    """Seconds since the oldest batch of those was trained on."""
    progress: float = 1.0
    """Share of the round's intended work that is in ``vector``, 0 to 1; less where it was asked for early."""
    reference: Tensor
    """[P] the last accepted result for the same positions (zeros before the first); equal at all members."""
    state_digest: str
    """SHA-256 of the state all members must share before the round; empty: nothing to compare."""
    residual: Tensor | None = None
    """[P] what earlier lossy encodings left out, to be added before encoding; None: nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberFinding:
    """What this node itself measured of one member's contribution, over what it saw of it; nobody else's word."""

    member: str
    """Who, as in :attr:`RoundReport.members`."""
    reason: str
    """How it differs from the others, and so was left out of what this node reduced (or was to be, in the mode that
    only logs): a word or two, what follows a colon is for people. Empty: it does not."""
    cosine: float | None = None
    """To the nearer half of the others, -1 to 1; None: there was nothing to compare with."""
    norm_ratio: float | None = None
    """Norm over the median member's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundReport:
    """How a round went, for the log, the metrics and whoever asks."""

    round_index: int
    members: tuple[str, ...]
    """Whose contributions are in the result, in the agreed order."""
    dropped: tuple[tuple[str, str], ...] = ()
    """Who is not in it, or not wholly, and why."""
    completeness: float = 1.0
    """Share of the agreed members' values that are in the result, 0 to 1."""
    sent_bytes: int = 0
    """Payload sent to others."""
    received_bytes: int = 0
    """Payload received from others."""
    seconds: float = 0.0
    """From handing in the contribution to having the result."""
    rule: str = "mean"
    """The aggregation rule that was used, which may be a fallback of the one asked for."""
    num_passes: int = 1
    """1, plus one for each time slices of dead reducers were reduced again."""
    weights: tuple[float, ...] = ()
    """Weight of each of ``members`` before normalising; empty where the rule knows none."""
    validation: tuple[tuple[str, str], ...] = ()
    """What gradient validation found: (member, finding), also in the mode that only logs."""
    findings: tuple[MemberFinding, ...] = ()
    """Of each member, in the agreed order, where validation is on and this node has reduced anything. ``validation``
    and ``dropped`` are in part what others say; whoever judges a member does so by this."""
    note: str = ""
    """Anything a reader of the log must know, such as that no robust rule was possible among so few."""

    def remarks(self) -> tuple[str, ...]:
        """For people: who was left out, who looked odd and was not left out, and the note."""
        left_out = dict(self.dropped)
        odd = {who: why for who, why in self.validation if who not in left_out}
        return (
            *(f"{_named(who)} left out: {why}" for who, why in left_out.items()),
            *(f"{_named(who)} looks odd: {why}" for who, why in odd.items()),
            *([self.note] if self.note else []),
        )


def _named(member: str) -> str:
    """The first digits of a key, or the whole of a shorter name."""
    return member[:8] if len(member) == _KEY_DIGITS else member


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundResult:
    """What all members of a round have agreed on."""

    vector: Tensor
    """[P] fp32 CPU; bit-identical at all members; the caller's to keep."""
    report: RoundReport
    residual: Tensor | None = None
    """[P] what encoding the contribution left out, for the next contribution; None: lossless or not fed back."""
    progress: float | None = None
    """Share of the round's intended work that is in ``vector``, the same at all members; None: the node's own."""


@runtime_checkable
class Collective(Protocol):
    """Aggregates one vector a round over whoever takes part.

    ``reduce`` may be called from another thread than ``requested``, and never twice at once.
    """

    def reduce(self, contribution: Contribution) -> RoundResult:
        """Take part in one round and wait for its result; bounded in time by the engine's own deadline.

        Args:
            contribution: what this node brings.

        Returns:
            The agreed result.

        Raises:
            RoundFailedError: the round ended without a result; nothing happened, training may go on.
            TrainerError: the engine cannot go on at all (a broken process group, an incompatible run).
        """
        ...

    def requested(self) -> bool:
        """Whether others wait for this node's next round; cheap enough to ask after every inner step."""
        ...

    def close(self) -> None:
        """Give up threads, sockets and groups; a second call does nothing."""
        ...


class LocalCollective:
    """A round of one.

    Args:
        member: this node's name in the report.
    """

    def __init__(self, member: str = "self") -> None:
        self._member = member

    def reduce(self, contribution: Contribution) -> RoundResult:
        """The contribution itself, uncoded."""
        report = RoundReport(round_index=contribution.round_index, members=(self._member,), weights=(1.0,))
        return RoundResult(vector=contribution.vector, report=report)

    def requested(self) -> bool:
        """Nobody waits."""
        return False

    def close(self) -> None:
        """Nothing to give up."""
