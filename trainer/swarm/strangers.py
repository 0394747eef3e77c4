"""Whether a worker or driver fits the swarm it was pointed at, asked once before it takes part.

Those of a stage compare themselves with each other (`trainer.node.strangers`). That leaves the first worker of a stage,
and drivers, which hold none: they compare themselves with everybody, each by what that one's stage would have to
announce under this run file. Whoever meets more that do not fit than do, asks one of them what differs and gives up
with that; so those that came first stay, and one misconfigured newcomer stops nobody that has company. A stranger that
is let in all the same, since it came first, gets no work (`SwarmTerms.fits`).
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

from trainer.collective import Terms
from trainer.discovery import Announcement
from trainer.errors import IncompatiblePeerError, RefusedError, RpcError
from trainer.node.peer_book import peer_of
from trainer.node.strangers import TERMS
from trainer.pipeline.names import StageUid
from trainer.rpc import Endpoint
from trainer.swarm.shape import DRIVER, SwarmShape

__all__ = ["SwarmTerms", "refuse_strangers"]

logger = logging.getLogger(__name__)

_MOST_ASKED = 5
"""Of strangers, until one answers: all of a group would say the same."""
_ASK_TIMEOUT_S = 10.0


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


async def refuse_strangers(endpoint: Endpoint, terms: SwarmTerms, others: Iterable[Announcement], run_id: str) -> None:
    """Compares this process with those there are.

    Args:
        endpoint: its own.
        terms: by its run file.
        others: all announcements.
        run_id: for the message.

    Raises:
        IncompatiblePeerError: most of the others have another run file, and what differs first.
    """
    known = list(others)
    strangers = [said for said in known if not terms.fits(said)]
    if 2 * len(strangers) <= len(known):
        return
    for stranger in strangers[:_MOST_ASKED]:
        ours = terms.of(stranger)
        if ours is None:
            raise IncompatiblePeerError(
                f"expected a stage of this run file, found {stranger.node_id} with {_stage_of(stranger)}; give all of "
                f"run {run_id} the same one"
            )
        try:
            reply = await endpoint.call(peer_of(stranger), TERMS, ours, Terms, timeout_s=_ASK_TIMEOUT_S)
            reply.body.check(ours, "this node")
        except RefusedError as error:
            raise IncompatiblePeerError(
                f"{stranger.node_id} of run {run_id} and this process do not fit: {error}"
            ) from error
        except RpcError as error:
            logger.info("%s: %s", stranger.node_id, error)


def _stage_of(said: Announcement) -> str:
    return DRIVER if said.stage is None else StageUid.parse(said.stage.uid).stage
