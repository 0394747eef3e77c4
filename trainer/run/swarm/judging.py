"""Whether the other replica of a stage brings to an average what training brings.

Among three replicas or more the collective's rule leaves out who differs from most. Of two none is in the minority, and
the average is half of a lie. But a replica knows its own work: what two honest ones learn in the same rounds points the
same way, or nowhere in particular, and is of one size. So in a round of two each takes its own contribution out of the
result; where what is left points against its own work, or is many times as large, it does not take the average, and
has nothing to do with the other for `_DISTRUST_S`. Both go on alone, and the log says so. The drivers then see two
workers that differ; which of them is wrong they may find out by what each answers (`trainer.pipeline.driver.auditing`).

What a contribution is of, is the strategy's: pseudo-gradients under DiLoCo; under SPARTA values, of which the last
average of the same slice is taken away (4 bytes a parameter).
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch
from torch import Tensor

from trainer.errors import RoundFailedError
from trainer.outer.engine.collective import Collective, Contribution, RoundReport, RoundResult

__all__ = ["MAX_RATIO", "MIN_COSINE", "JudgedCollective", "others_share", "what_is_wrong"]

logger = logging.getLogger(__name__)

MIN_COSINE = -0.5
MAX_RATIO = 10.0
_MIN_OWN_SHARE = 1 / 3
"""Of the weight: who has done much less than the other cannot tell what is usual."""
_DISTRUST_S = 3600.0


class JudgedCollective:
    """A `Collective` that refuses the average of two where the other one's part contradicts one's own.

    Args:
        collective: the workers of the stage.
        own_id: this one's key.
        distrust: told whom to have nothing to do with, and for how many seconds; from any thread.
        num_slices: contributions are values of one slice of so many, in turn (SPARTA); 0: they are changes (DiLoCo).
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
            RoundFailedError: also where the other's part contradicts one's own.
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
        """Refuses an average.

        Raises:
            RoundFailedError: it is refused.
        """
        if len(report.members) != 2 or self._own_id not in report.members or report.completeness < 1:
            return
        place = report.members.index(self._own_id)
        weights = report.weights or (1.0, 1.0)
        share = weights[place] / sum(weights) if sum(weights) else 0.0
        if not _MIN_OWN_SHARE <= share < 1:
            return
        wrong = what_is_wrong(own, others_share(own, average, share))
        if wrong is None:
            return
        other = report.members[1 - place]
        logger.error(
            "round %d: what %s brought contradicts this worker's own work (%s): the average is not taken, and there "
            "are no more rounds with it for %.0f s; one of the two is wrong, a third worker would show who",
            *(report.round_index, other[:12], wrong, _DISTRUST_S),
        )
        self._distrust(other, _DISTRUST_S)
        raise RoundFailedError(f"round {report.round_index}: {other[:12]} contradicts this worker's own work: {wrong}")


def others_share(own: Tensor, average: Tensor, share: float) -> Tensor:
    """What the other has brought to a weighted mean of two.

    Args:
        own: what this one has brought, fp32[P].
        average: of both.
        share: of the weight that is its own, more than 0 and less than 1.
    """
    return (average - share * own) / (1 - share)


def what_is_wrong(own: Tensor, other: Tensor) -> str | None:
    """Why another's work cannot be that of an honest replica; None: it can."""
    own, other = own.double(), other.double()
    own_norm, other_norm = float(own.norm()), float(other.norm())
    if not own_norm or not other_norm:
        return None
    cosine = float(torch.dot(own, other)) / (own_norm * other_norm)
    if cosine < MIN_COSINE:
        return f"cosine {cosine:.2f}, {MIN_COSINE:g} or more expected"
    if other_norm > MAX_RATIO * own_norm:
        return f"{other_norm / own_norm:.0f} times as large, at most {MAX_RATIO:g} times expected"
    return None
