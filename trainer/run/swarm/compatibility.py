"""Checks whether a process fits the swarm it was pointed at: its terms, the states it can take up, its first weights.

Nodes that hold a whole model compare themselves with each other. Drivers and the first worker of a stage have no such
peers: so in a swarm each compares itself with everybody, by what that peer's stage would have to announce under this
run file (`trainer.run.node.compatibility`). The trade-off: several processes that begin at once with the same wrong
file train apart from the rest.

Workers read the model that a run begins with (`swarm.start_from`) from their own machines, so they compare
fingerprints of the weights; a worker that goes on from a checkpoint has read none and announces none. Where anybody may
announce workers, many strangers that claim another model can keep newcomers from such a run.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from trainer.errors import IncompatiblePeerError
from trainer.network.discovery import Announcement
from trainer.network.discovery.stage_report import StageReport
from trainer.network.rpc import Endpoint
from trainer.network.transfer import Descriptor, Expectation
from trainer.outer.diloco import FragmentPlan
from trainer.run.node.compatibility import ComparedPeer, FitCheck
from trainer.run.node.state_form import DilocoStates, check_meta, check_vectors
from trainer.run.swarm.shape import DRIVER, SwarmShape, stage_of

__all__ = ["StageFit", "SwarmTerms", "check_first_weights", "check_fit"]

logger = logging.getLogger(__name__)

_LOOK_S = 0.1


class SwarmTerms:
    """What everybody in a swarm has to announce, by this process's run file."""

    def __init__(self, shape: SwarmShape) -> None:
        self._terms = {name: shape.terms(name) for name in (DRIVER, *shape.plan.names)}
        self._digests = {name: terms.digest() for name, terms in self._terms.items()}

    def fits(self, said: Announcement) -> bool:
        """Whether a peer trains what this run file says."""
        return said.terms_digest == self._digests.get(_role_of(said))

    def fit_check(self, endpoint: Endpoint, others: Callable[[], Sequence[Announcement]], run_id: str) -> FitCheck:
        """The comparison of a process, at its ``endpoint``, with the peers that ``others`` returns."""

        def known() -> list[ComparedPeer]:
            return [
                ComparedPeer(
                    said.peer(), said.node_id, said.terms_digest, self._terms.get(_role_of(said)), self.fits(said)
                )
                for said in others()
            ]

        return FitCheck(endpoint, self._terms[DRIVER], known, run_id)


async def check_fit(
    check: FitCheck,
    others: Callable[[], Sequence[Announcement]],
    *,
    wait_s: float = 0.0,
    stop: Callable[[], bool] = lambda: False,
) -> None:
    """Compares this process with its peers once some are known.

    Args:
        check: from `SwarmTerms.fit_check`.
        others: all announcements now.
        wait_s: how long to wait for the first of them.
        stop: True ends the wait.

    Raises:
        IncompatiblePeerError: those that answer have another run file, and what differs first.
    """
    deadline_s = time.monotonic() + wait_s
    while not others() and time.monotonic() < deadline_s and not stop():
        await asyncio.sleep(_LOOK_S)
    await check.begin(stop)


def _role_of(said: Announcement) -> str:
    return DRIVER if said.stage is None else stage_of(said.stage)


@dataclass(frozen=True, slots=True)
class StageFit(DilocoStates):
    """The form of a stage's state on the network side (a `StateForm`); its vocabulary does not grow."""

    plan: FragmentPlan
    vocab_rows: int

    def expectation(self, descriptor: Descriptor) -> Expectation:
        """See `StateForm.expectation`."""
        meta, layout = check_meta(descriptor.meta), self.plan.whole()
        layout.require_same(meta.layout_digest, "the state to adopt")
        if meta.vocab_rows != self.vocab_rows or meta.fragment >= len(self.plan.layouts):
            raise IncompatiblePeerError(
                f"expected a state of {self.vocab_rows} rows of vocabulary and {len(self.plan.layouts)} fragments, "
                f"found one of {meta.vocab_rows} rows whose next fragment is {meta.fragment}"
            )
        return check_vectors(descriptor, layout.num_values, max_bytes=12 * layout.num_values)


def check_first_weights(began_from: str, path: str, others: Iterable[StageReport]) -> None:
    """Compares the model this worker began with to that of the workers that serve, or else of all that begin.

    Args:
        began_from: fingerprint of its own; empty: it read none.
        path: where it was read.
        others: reports of the run's other workers.

    Raises:
        IncompatiblePeerError: most of them began with another model.
    """
    known = [report for report in others if report.began_from]
    known = [report for report in known if report.status == "serving"] or known
    differing = [report for report in known if report.began_from != began_from]
    if not began_from or not differing:
        return
    one = differing[0]
    text = (
        f"swarm.start_from: expected the model that {one.uid} began with, of fingerprint {one.began_from}, found "
        f"{path} with {began_from}; give all workers a copy of the same folder"
    )
    if 2 * len(differing) > len(known):
        raise IncompatiblePeerError(text)
    logger.warning("%s (%d of %d differ)", text, len(differing), len(known))
