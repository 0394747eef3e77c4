"""The losses of several drivers as one curve over the tokens they did together."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from trainer.monitor import Event


@dataclass(frozen=True, slots=True)
class LossCurve:
    """Steps in the order in which they ended."""

    tokens: Sequence[int]
    """Of each."""
    losses: Sequence[float]

    @property
    def num_tokens(self) -> int:
        """In all."""
        return sum(self.tokens)

    def parts(self, num_tokens: int, count: int) -> list[float]:
        """Mean losses of equal parts of the first ``num_tokens``; a step belongs where its middle is.

        Raises:
            ValueError: a part has no step.
        """
        sums, weights, behind = [0.0] * count, [0] * count, 0
        for tokens, loss in zip(self.tokens, self.losses, strict=True):
            part = int((behind + tokens / 2) * count / num_tokens)
            behind += tokens
            if part < count:
                sums[part] += loss * tokens
                weights[part] += tokens
        if not all(weights):
            raise ValueError(f"expected steps in each {count}th of {num_tokens} tokens, found {len(self.tokens)} steps")
        return [total / weight for total, weight in zip(sums, weights, strict=True)]


def curve_of(steps: Iterable[Event]) -> LossCurve:
    """Of the ``step`` events of all drivers."""
    ordered = sorted(steps, key=lambda event: event.time)
    return LossCurve(
        [int(event.number("num_tokens")) for event in ordered], [event.number("loss") for event in ordered]
    )
