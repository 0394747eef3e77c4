"""The results, reports and announcements that are monitored, by the fields that are read here.

These are protocols, so that monitoring imports none of the packages that make them. All are values that do not change
once they are passed on; the log writes them in another thread.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol

__all__ = ["AnnouncedNode", "RoundFacts", "StepFacts"]


class StepFacts(Protocol):
    """One inner step."""

    @property
    def step(self) -> int:
        """Index of the step in the schedule, from 0."""

    @property
    def loss(self) -> float:
        """Nats a token; not finite where the step was skipped for it."""

    @property
    def grad_norm(self) -> float:
        """L2 norm before clipping."""

    @property
    def lr(self) -> float:
        """Learning rate used."""

    @property
    def num_tokens(self) -> int:
        """Tokens of all its micro-batches."""

    @property
    def skipped(self) -> bool:
        """Whether nothing was applied, since loss or gradient were not finite."""

    @property
    def seconds(self) -> float:
        """Wall time of the step."""


class RoundFacts(Protocol):
    """One round that ended with a result."""

    @property
    def round_index(self) -> int:
        """Which round."""

    @property
    def members(self) -> tuple[str, ...]:
        """Whose contributions are in, this node included."""

    @property
    def dropped(self) -> tuple[tuple[str, str], ...]:
        """Members left out, and why: a word or two, then a colon and text for people."""

    @property
    def completeness(self) -> float:
        """Share of the contributions agreed upon that are in the result, 0 to 1."""

    @property
    def sent_bytes(self) -> int:
        """Bytes this node sent."""

    @property
    def received_bytes(self) -> int:
        """Bytes this node received."""

    @property
    def seconds(self) -> float:
        """Wall time of the round."""

    @property
    def rule(self) -> str:
        """Aggregation rule used."""

    @property
    def num_passes(self) -> int:
        """Reductions it took: 1, and one more for each time a reducer died."""

    @property
    def weights(self) -> Sequence[float]:
        """Of the members, in their order."""

    @property
    def validation(self) -> Sequence[object]:
        """What gradient validation found."""

    @property
    def note(self) -> str:
        """Anything else to know."""


class AnnouncedNode(Protocol):
    """What another node announces of itself: signed, but possibly untrue."""

    @property
    def peer_id(self) -> str:
        """Its key: 64 hexadecimal digits."""

    @property
    def node_id(self) -> str:
        """Its name, for people."""

    @property
    def outer_step(self) -> int:
        """Outer steps in its state."""

    @property
    def state_digest(self) -> str:
        """sha256 of its shared state; empty while it has none."""

    @property
    def inner_step(self) -> int:
        """Inner steps it has trained."""

    @property
    def loss(self) -> float | None:
        """Its loss, smoothed over its latest steps (`TrainingTracker.smoothed_loss`), in nats a token."""

    @property
    def tokens_per_s(self) -> float:
        """Its speed."""

    @property
    def shards(self) -> Collection[int]:
        """The shards it trains on."""

    @property
    def expires_at(self) -> float:
        """Until when this holds, seconds since the epoch."""
