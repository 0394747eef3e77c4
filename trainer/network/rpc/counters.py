"""What an endpoint has sent, received and refused: numbers for metrics and tests, changed on the event loop only."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

__all__ = ["Counters"]

_MAX_REASONS = 256


@dataclass(slots=True)
class Counters:
    """Totals since the endpoint was made; bytes are those of whole frames, heads and heartbeats included."""

    sent_bytes: int = 0
    received_bytes: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    """How often each reason was given, or an answer was refused for it."""

    def count_refusal(self, reason: str) -> None:
        """Counts one; handlers pass on words of other peers, so what is kept of them is bounded."""
        known = reason in self.refused or len(self.refused) < _MAX_REASONS
        self.refused[str(reason) if known else "other"] += 1
