"""Whether a worker or driver fits the swarm it was pointed at, asked of everybody before it takes part.

Nodes that hold a whole model compare themselves with each other. The first worker of a stage has no such company, nor
have drivers, which hold none: so in a swarm all compare themselves with everybody, each by what that one's stage would
have to announce under this run file; how, says `trainer.run.node.strangers`. A stranger that is let in all the same
gets no work (`SwarmTerms.fits`). The trade-off: several that begin at once with the same wrong file keep each other
company, and train apart.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

from trainer.collective import Terms
from trainer.network.discovery import Announcement
from trainer.network.discovery.stage_report import StageUid
from trainer.network.rpc import Endpoint
from trainer.run.node.peer_book import peer_of
from trainer.run.node.strangers import Acquaintance, FitCheck
from trainer.run.swarm.shape import DRIVER, SwarmShape

__all__ = ["SwarmTerms", "check_fit"]

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

        def known() -> list[Acquaintance]:
            return [
                Acquaintance(peer_of(said), said.node_id, said.terms_digest, self.of(said), self.fits(said))
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
