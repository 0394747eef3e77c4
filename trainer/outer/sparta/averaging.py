"""A round's arithmetic and its time under way: what went in, when it is over, and what parameters become of it.

``parameter ← average + (parameter − said)``, where ``said`` is what this node's contribution was to the others: the
average with the node's own progress since. Written this way round, and not as ``parameter + (average − said)``, a
replica that has not stepped since takes the average bit for bit, so that replicas at rest become identical in one
cycle; and where the average is what was said, the parameter keeps its bits.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
from torch import Tensor

from trainer.errors import RoundFailedError
from trainer.outer.diloco.flight import BackgroundCall
from trainer.outer.engine.collective import Contribution, RoundResult
from trainer.outer.sparta.slices import ParameterSlice

__all__ = ["AsyncSliceRound", "Round", "is_finite", "merged"]


@dataclass(frozen=True, slots=True, eq=False)
class Round:
    """One attempt at a round.

    Args:
        values: what it averages.
        contribution: their values when it began.
        num_batches: batches in them since the slice's last round, also of a node that counts for nothing.
    """

    values: ParameterSlice
    contribution: Contribution
    num_batches: int


@dataclass(frozen=True, slots=True, eq=False)
class AsyncSliceRound:
    """A round under way in the background.

    Args:
        attempt: the round.
        call: the collective at work.
        deadline_s: on the monotonic clock; then it is given up.
    """

    attempt: Round
    call: BackgroundCall[RoundResult]
    deadline_s: float

    def is_over(self) -> bool:
        """Whether there is nothing more to wait for."""
        return self.call.done() or time.monotonic() >= self.deadline_s

    def result(self) -> RoundResult:
        """Wait for the round's result.

        Raises:
            RoundFailedError: it failed, or is not back in time.
        """
        try:
            return self.call.result(max(0.0, self.deadline_s - time.monotonic()))
        except TimeoutError as error:
            raise RoundFailedError("the round in the background is not back in time, and given up") from error


def merged(now: Tensor, contributed: Tensor, result: RoundResult) -> Tensor:
    """What a slice's values become.

    A lossy encoding's remainder is kept at home (``said`` is what the others decoded), so that the mean over the
    replicas is what it was and errors do not build up.

    Args:
        now: [P] fp32, the values now.
        contributed: [P] fp32, the values when the round began.
        result: what the members agreed on.

    Returns:
        [P] fp32, a new tensor.

    Raises:
        RoundFailedError: the result does not fit or is not finite, or the sum is not.
    """
    average = result.vector
    if average.shape != contributed.shape or not is_finite(average):
        raise RoundFailedError(
            f"expected {contributed.numel()} finite values as the round's result, "
            f"found {list(average.shape)}, not all finite or not as many"
        )
    said = contributed if result.residual is None else contributed - result.residual
    untouched = average == said
    if result.report.completeness < 1:
        untouched |= average == 0  # What a part is answered with if nothing usable came of it.
    new = torch.where(untouched, now, average + (now - said))
    if not is_finite(new):
        raise RoundFailedError("the round's result is so large that parameters overflow")
    return new


def is_finite(vector: Tensor) -> bool:
    """Whether all values are, in one pass and without a mask of its size."""
    smallest, largest = torch.aminmax(vector)
    return bool(torch.isfinite(smallest)) and bool(torch.isfinite(largest))
