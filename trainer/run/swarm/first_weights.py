"""Whether all that begin a run with a model (`swarm.start_from`) begin with the same one.

Each names a folder of its own machine, so the run file cannot say; the weights can. A worker that read such a model
announces its fingerprint, and one that is about to begin compares its own with those: two stages of two models would
train on, from a loss that nobody understands. Workers that go on from checkpoints have read none and say nothing.

As with run files, those that came first stay, and whoever differs from most ends and says so. So does one among many
strangers that claim another model: where anybody may announce workers, that can keep newcomers from a run that begins
with a model, though nobody that has a checkpoint.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

from trainer.errors import IncompatiblePeerError
from trainer.network.discovery.stage_report import StageReport

__all__ = ["check_first_weights"]

logger = logging.getLogger(__name__)


def check_first_weights(began_from: str, path: str, others: Iterable[StageReport]) -> None:
    """Compares what this worker has begun with to what those have that serve already, or else to all that begin.

    Args:
        began_from: fingerprint of its own; empty: it read none.
        path: where it was read.
        others: what the run's other workers say.

    Raises:
        IncompatiblePeerError: most of them began with another model.
    """
    said = [report for report in others if report.began_from]
    said = [report for report in said if report.status == "serving"] or said
    differing = [report for report in said if report.began_from != began_from]
    if not began_from or not differing:
        return
    one = differing[0]
    text = (
        f"swarm.start_from: expected the model that {one.uid} began with, of fingerprint {one.began_from}, found "
        f"{path} with {began_from}; give all workers a copy of the same folder"
    )
    if 2 * len(differing) > len(said):
        raise IncompatiblePeerError(text)
    logger.warning("%s (%d of %d differ)", text, len(differing), len(said))
