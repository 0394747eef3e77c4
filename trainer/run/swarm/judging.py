"""Checks, in a round of two replicas, whether the other's contribution is what training brings.

Among three replicas or more the collective's rule leaves out the one that differs most. Of two, neither is in the
minority, and the average is half of a lie. But what two honest replicas learn in the same rounds points the same way,
or in no particular direction, and is of similar size. So each takes its own contribution out of the result; if the rest
points against its own work, or is many times as large, it refuses the average and has nothing to do with the other for
`_DISTRUST_S`. Both go on alone, and audits may show which of them is wrong (`trainer.pipeline.driver.auditing`).

Contributions are pseudo-gradients under DiLoCo; under SPARTA they are values, and the last average of the same slice is
subtracted from them (4 bytes a parameter).
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch
from torch import Tensor

from trainer.errors import RoundFailedError
from trainer.outer.engine.collective import Collective, Contribution, RoundReport, RoundResult

__all__ = ["JudgedCollective", "contradiction_of", "others_share"]

logger = logging.getLogger(__name__)

_MIN_COSINE = -0.5
_MAX_RATIO = 10.0
_MIN_OWN_SHARE = 1 / 3
"""Of the weight: a replica that has done much less than the other cannot tell what is usual."""
_DISTRUST_S = 3600.0


class JudgedCollective:
    """A `Collective` that refuses the average of two if the other's part contradicts this replica's own.

    Args:
        collective: the workers of the stage.
        own_id: this replica's key.
        distrust: told a key to have nothing to do with, and for how many seconds; from any thread.
        num_slices: slices whose values are contributed in turn (SPARTA); 0: contributions are changes (DiLoCo).
    """

    def __init__(
        self,
        collective: Collective,
        own_id: str,
        distrust: Callable[[str, float], None],
        *,
        num_slices: int = 0,
    ) -> None:
        self._collective = collective
        self._own_id = own_id
        self._distrust = distrust
        self._num_slices = num_slices
        self._averages: dict[int, Tensor] = {}
        """The last of each slice."""

    def reduce(self, contribution: Contribution) -> RoundResult:
        """See `Collective`.

        Raises:
            RoundFailedError: also if the other's part contradicts this replica's own.
        """
        result = self._collective.reduce(contribution)
        slice_index = contribution.round_index % self._num_slices if self._num_slices else None
        if slice_index is None:
            self._judge(result.report, contribution.vector, result.vector)
            return result
        base = self._averages.get(slice_index)
        if base is not None and base.shape == result.vector.shape:
            self._judge(result.report, contribution.vector - base, result.vector - base)
        self._averages[slice_index] = result.vector.clone()
        return result

    def requested(self) -> bool:
        """See `Collective`."""
        return self._collective.requested()

    def close(self) -> None:
        """See `Collective`."""
        self._collective.close()

    def _judge(self, report: RoundReport, own: Tensor, average: Tensor) -> None:
        """Raises `RoundFailedError` if the average is refused."""
        if len(report.members) != 2 or self._own_id not in report.members or report.completeness < 1:
            return
        place = report.members.index(self._own_id)
        weights = report.weights or (1.0, 1.0)
        share = weights[place] / sum(weights) if sum(weights) else 0.0
        if not _MIN_OWN_SHARE <= share < 1:
            return
        contradiction = contradiction_of(own, others_share(own, average, share))
        if contradiction is None:
            return
        other = report.members[1 - place]
        logger.error(
            "round %d: the contribution of %s contradicts this worker's own work (%s): the average is not taken, and "
            "there are no more rounds with it for %.0f s; one of the two is wrong, a third worker would show which",
            report.round_index,
            other[:12],
            contradiction,
            _DISTRUST_S,
        )
        self._distrust(other, _DISTRUST_S)
        raise RoundFailedError(
            f"round {report.round_index}: {other[:12]} contradicts this worker's own work: {contradiction}"
        )


def others_share(own: Tensor, average: Tensor, share: float) -> Tensor:
    """The other's contribution to a weighted mean of two, fp32[P].

    Args:
        own: this replica's contribution, fp32[P].
        average: of both, fp32[P].
        share: this replica's share of the weight, more than 0 and less than 1.
    """
    return (average - share * own) / (1 - share)


def contradiction_of(own: Tensor, other: Tensor) -> str | None:
    """Why another's contribution cannot be that of an honest replica; None: it can."""
    own, other = own.double(), other.double()
    own_norm, other_norm = float(own.norm()), float(other.norm())
    if not own_norm or not other_norm:
        return None
    cosine = float(torch.dot(own, other)) / (own_norm * other_norm)
    if cosine < _MIN_COSINE:
        return f"cosine {cosine:.2f}, {_MIN_COSINE:g} or more expected"
    if other_norm > _MAX_RATIO * own_norm:
        return f"{other_norm / own_norm:.0f} times as large, at most {_MAX_RATIO:g} times expected"
    return None
