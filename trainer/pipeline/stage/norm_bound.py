"""`NormBound`: how much one micro-batch's gradient may weigh, told from those that came before it.

A step is clipped by the norm of its sum, so a single gradient of 1e12 among others of 1 would leave its direction
alone, step after step. Therefore each micro-batch is measured before it is added: beyond `factor` times what is usual
in this stage it is scaled down to that. What is usual is the median over the last `WINDOW` micro-batches that were
counted here, which says the same however large the largest are, as long as those that lie are fewer than half of them.
The idea is centered clipping's (Karimireddy et al. 2021) with a radius that follows the run, as AutoClip's percentile
of the norms so far does (Seetharaman et al. 2020).

Scaled, not refused, and nobody is banned for it. A norm proves nothing about who is to blame: an honest worker's
gradient is what it was made of by the worker behind it, and, through the activation, by the one before. A micro-batch
that was refused here would be lost, since the stages behind have counted it. And scaled down, an honest outlier still
counts, so a bound that is wrong for a while (weights from elsewhere, a run that changes its ways) costs little and
mends itself: what came is remembered as it came, and after half a window of it that is what is usual.

Sums of few tokens are noisier, of many larger. For n tokens, a gradient of norm g over m is taken to say up to
g * max(n / m, sqrt(n / m)): signal grows with the tokens, noise with their root; so a short last micro-batch of a shard
is not out of the ordinary. The measure is the gradient of the stage's parameters, which is what is added; it costs
nothing, as its norm is taken anyway to see that it is finite. Before `WARM_UP` micro-batches have been seen there is no
bound. What is remembered goes with the stage's state, so a restart does not begin anew.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from statistics import median_high
from typing import Final

__all__ = ["WARM_UP", "WINDOW", "NormBound"]

WINDOW: Final = 64
WARM_UP: Final = 16


class NormBound:
    """What is usual, and what is too much.

    Args:
        factor: times the usual; infinity: nothing is.
    """

    def __init__(self, factor: float) -> None:
        self._factor = factor
        self._seen: deque[tuple[float, int]] = deque(maxlen=WINDOW)

    @property
    def seen(self) -> tuple[tuple[float, int], ...]:
        """Norm and tokens of each of the last micro-batches, the oldest first."""
        return tuple(self._seen)

    def usual(self, num_tokens: int) -> float | None:
        """The norm that a micro-batch of so many tokens is known to have; None: too few have been seen."""
        if len(self._seen) < WARM_UP:
            return None
        return median_high(norm * _growth(num_tokens / tokens) for norm, tokens in self._seen)

    def coefficient(self, norm: float, num_tokens: int) -> float:
        """What a gradient is to be multiplied by: exactly 1 where it is not out of the ordinary.

        Args:
            norm: of the sum over its tokens.
            num_tokens: 1 or more.
        """
        usual = self.usual(num_tokens)
        if not usual or norm <= self._factor * usual:
            return 1.0
        return self._factor * usual / norm

    def note(self, norm: float, num_tokens: int) -> None:
        """A micro-batch was counted, whose gradient came with this norm."""
        self._seen.append((norm, num_tokens))

    def restore(self, seen: Iterable[tuple[float, int]]) -> None:
        """Takes up what was seen before."""
        self._seen = deque(seen, maxlen=WINDOW)


def _growth(ratio: float) -> float:
    return max(ratio, math.sqrt(ratio))
