"""Whether a worker or driver fits the swarm it was pointed at, asked once before it takes part.

Those of a stage compare themselves with each other (`trainer.node.strangers`). That leaves the first worker of a stage,
and drivers, which hold none: they compare themselves with everybody, each by what that one's stage would have to
announce under this run file. Whoever meets more that do not fit than do, and nobody that fits and answers, asks one of
them what differs and gives up with that; so those that came first stay, and one misconfigured newcomer stops nobody
that has company. Nor does a stranger with many keys: one honest peer is company enough, and the others are heard out
for a while, since lists of peers come piece by piece. A stranger that is let in all the same gets no work
(`SwarmTerms.fits`). The trade-off: several that begin at once with the same wrong file keep each other company; they
say that they do, and train apart.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Sequence

from trainer.collective import Terms
from trainer.discovery import Announcement
from trainer.errors import IncompatiblePeerError, RefusedError, RpcError
from trainer.node.peer_book import peer_of
from trainer.node.strangers import TERMS, has_company
from trainer.pipeline.names import StageUid
from trainer.rpc import Endpoint
from trainer.swarm.shape import DRIVER, SwarmShape

__all__ = ["SwarmTerms", "check_fit"]

logger = logging.getLogger(__name__)

_MOST_ASKED = 5
"""Of strangers, until one answers: all of a group would say the same."""
_ASK_TIMEOUT_S = 10.0
_LOOK_S = 0.1
_SETTLE_S = 3.0
"""Behind the first of the others, for the rest of them to be heard of."""


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


async def check_fit(
    endpoint: Endpoint,
    terms: SwarmTerms,
    others: Callable[[], Sequence[Announcement]],
    run_id: str,
    *,
    wait_s: float = 0.0,
    stop: Callable[[], bool] = lambda: False,
) -> None:
    """Compares this process with the others once they have been heard of; at once where most of those known fit.

    Args:
        endpoint: its own.
        terms: by its run file.
        others: all announcements now.
        run_id: for the message.
        wait_s: how long to look for the first of them.
        stop: asked now and then; True ends the wait.

    Raises:
        IncompatiblePeerError: most of the others have another run file, and what differs first.
    """
    deadline_s = time.monotonic() + wait_s
    while not others() and time.monotonic() < deadline_s and not stop():
        await asyncio.sleep(_LOOK_S)
    deadline_s = time.monotonic() + _SETTLE_S
    while _most_are_strange(terms, others()) and time.monotonic() < deadline_s and not stop():
        await asyncio.sleep(_LOOK_S)
    await _refuse_strangers(endpoint, terms, others(), run_id)


async def _refuse_strangers(endpoint: Endpoint, terms: SwarmTerms, others: Iterable[Announcement], run_id: str) -> None:
    """Compares this process with those that are known now.

    Args:
        endpoint: its own.
        terms: by its run file.
        others: all announcements.
        run_id: for the message.

    Raises:
        IncompatiblePeerError: most of the others have another run file, and what differs first.
    """
    known = list(others)
    if not _most_are_strange(terms, known):
        return
    strangers = [said for said in known if not terms.fits(said)]
    alike = [(peer_of(said), ours) for said in known if terms.fits(said) and (ours := terms.of(said)) is not None]
    if await has_company(endpoint, alike):
        logger.warning("%d of %d in run %s have another run file than this one", len(strangers), len(known), run_id)
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


def _most_are_strange(terms: SwarmTerms, known: Sequence[Announcement]) -> bool:
    return 2 * sum(not terms.fits(said) for said in known) > len(known)


def _stage_of(said: Announcement) -> str:
    return DRIVER if said.stage is None else StageUid.parse(said.stage.uid).stage
