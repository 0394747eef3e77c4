"""Checks whether a process fits the swarm it was pointed at: its terms, the states it can take up, its first weights.

Nodes that hold a whole model compare themselves with each other. The first worker of a stage has no such company, nor
have drivers, which hold none: so in a swarm all compare themselves with everybody, each by what that peer's stage would
have to announce under this run file (`trainer.run.node.compatibility`). A peer that does not fit gets no work
(`SwarmTerms.fits`). The trade-off: several that begin at once with the same wrong file keep each other company, and
train apart.

Workers that begin with a model (`swarm.start_from`) read it from folders of their own machines, so they compare the
weights: each announces a fingerprint, and a worker that is about to begin compares its own with those. Whoever differs
from most ends and says so. Workers that go on from checkpoints have read no such model and announce none. Where anybody
may announce workers, many strangers that claim another model can keep newcomers from a run that begins with a model,
though nobody that has a checkpoint.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from trainer.collective import Terms
from trainer.errors import IncompatiblePeerError
from trainer.network.discovery import Announcement
from trainer.network.discovery.stage_report import StageReport, StageUid
from trainer.network.rpc import Endpoint
from trainer.network.transfer import Descriptor, Expectation
from trainer.outer.diloco import FragmentPlan
from trainer.run.node.compatibility import ComparedPeer, FitCheck
from trainer.run.node.peer_book import peer_of
from trainer.run.node.state_form import DilocoStates, check_meta, check_vectors
from trainer.run.swarm.shape import DRIVER, SwarmShape

__all__ = ["StageFit", "SwarmTerms", "check_first_weights", "check_fit"]

logger = logging.getLogger(__name__)

_LOOK_S = 0.1


class SwarmTerms:
    """What everybody in a swarm has to announce.

    Args:
        shape: of the swarm, by one's own run file.
    """

    def __init__(self, shape: SwarmShape) -> None:
        self._terms = {name: shape.terms(name) for name in (DRIVER, *shape.plan.names)}
        self._digests = {name: terms.digest() for name, terms in self._terms.items()}

    def of(self, said: Announcement) -> Terms | None:
        """What somebody's would be under this run file; None: it has no such stage."""
        return self._terms.get(_stage_of(said))

    def fits(self, said: Announcement) -> bool:
        """Whether somebody trains what this run file says."""
        return said.terms_digest == self._digests.get(_stage_of(said))

    def fit_check(self, endpoint: Endpoint, others: Callable[[], Sequence[Announcement]], run_id: str) -> FitCheck:
        """A process's question to the others.

        Args:
            endpoint: its own.
            others: all announcements now.
            run_id: for messages.
        """

        def known() -> list[ComparedPeer]:
            return [
                ComparedPeer(peer_of(said), said.node_id, said.terms_digest, self.of(said), self.fits(said))
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
    """Compares this process with the others once they have been heard of.

    Args:
        check: its question, `SwarmTerms.fit_check`.
        others: all announcements now.
        wait_s: how long to look for the first of them.
        stop: asked now and then; True ends the wait.

    Raises:
        IncompatiblePeerError: those that answer have another run file, and what differs first.
    """
    deadline_s = time.monotonic() + wait_s
    while not others() and time.monotonic() < deadline_s and not stop():
        await asyncio.sleep(_LOOK_S)
    await check.begin(stop)


def _stage_of(said: Announcement) -> str:
    return DRIVER if said.stage is None else StageUid.parse(said.stage.uid).stage


@dataclass(frozen=True, slots=True)
class StageFit(DilocoStates):
    """The form of a stage's state on the network side (a ``StateForm``); its vocabulary does not grow.

    Args:
        plan: of the stage's parameters.
        vocab_rows: of the model.
    """

    plan: FragmentPlan
    vocab_rows: int

    def expectation(self, descriptor: Descriptor) -> Expectation:
        """What exactly a state of this descriptor has to be.

        Raises:
            IncompatiblePeerError: this worker cannot take it up.
        """
        meta, layout = check_meta(descriptor.meta), self.plan.whole()
        layout.require_same(meta.layout_digest, "the state to adopt")
        if meta.vocab_rows != self.vocab_rows or meta.fragment >= len(self.plan.layouts):
            raise IncompatiblePeerError(
                f"expected a state of {self.vocab_rows} rows of vocabulary and {len(self.plan.layouts)} fragments, "
                f"found one of {meta.vocab_rows} rows whose next fragment is {meta.fragment}"
            )
        return check_vectors(descriptor, layout.num_values, max_bytes=12 * layout.num_values)


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
