"""Whether a node fits the run it was pointed at, asked once before it trains; what differs is said in one line.

Compared is with the largest group of others that train alike, and only where that is larger than the node's own and of
the node's own nobody answers: one misconfigured newcomer stops no node that fits, nor does one with many keys. Terms
have no secrets, so whoever asks is told them.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from trainer.collective import Terms
from trainer.config import RunConfig
from trainer.discovery import Announcement
from trainer.errors import IncompatiblePeerError, RefusedError, RpcError
from trainer.node.peer_book import PeerBook, peer_of
from trainer.rpc import Endpoint, Peer, Reply, Request

__all__ = ["TERMS", "check_fit", "has_company", "register_terms"]

logger = logging.getLogger(__name__)

TERMS = "node/terms"
"""What a node trains; see `register_terms`."""
_FOR_GOOD = frozenset({"protocol", "run"})
"""Reasons to refuse a node that waiting does not mend."""
_MOST_ASKED = 5
"""Of strangers, until one answers: all of a group would say the same."""
_MOST_ALIKE_ASKED = 16
_ALIKE_TIMEOUT_S = 5.0


def register_terms(endpoint: Endpoint, terms: Terms) -> None:
    """Answers whoever asks what this node trains, also by its address alone."""

    async def answer(_request: Request[Terms]) -> Reply[Terms]:
        return Reply(terms)

    endpoint.register(TERMS, Terms, answer, any_recipient=True)


async def check_fit(endpoint: Endpoint, terms: Terms, book: PeerBook, config: RunConfig) -> None:
    """Compares this node with those it knows; where it knows none, asks the addresses it was given for the reason.

    Raises:
        IncompatiblePeerError: it does not fit, and how.
    """
    if book.announcements:
        await _compare(endpoint, terms, book, config)
    elif not config.discovery.uses_dht:
        asked = (_ask(endpoint, terms, address, config) for address in config.discovery.initial_peers)
        await asyncio.gather(*asked)


async def has_company(endpoint: Endpoint, alike: Sequence[tuple[Peer, Terms]]) -> bool:
    """Whether one of those that are said to train alike answers, and does; an announcement outlives its node.

    Args:
        endpoint: this node's own.
        alike: where they are, and what their terms are to be.
    """
    asking = [asyncio.ensure_future(_answers(endpoint, peer, terms)) for peer, terms in alike[:_MOST_ALIKE_ASKED]]
    try:
        for answered in asyncio.as_completed(asking):
            if await answered:
                return True
        return False
    finally:
        for task in asking:
            task.cancel()
        await asyncio.gather(*asking, return_exceptions=True)


async def _answers(endpoint: Endpoint, peer: Peer, terms: Terms) -> bool:
    try:
        reply = await endpoint.call(peer, TERMS, terms, Terms, timeout_s=_ALIKE_TIMEOUT_S)
    except RpcError:
        return False
    return reply.body == terms


async def _compare(endpoint: Endpoint, terms: Terms, book: PeerBook, config: RunConfig) -> None:
    strangers = book.strangers()
    if not book.most_are_strange:
        return
    if await has_company(endpoint, [(peer_of(said), terms) for said in book.alike()]):
        logger.warning("%d nodes of run %s train something else than this one", len(strangers), config.run_id)
        return
    for stranger in strangers[:_MOST_ASKED]:
        try:
            reply = await endpoint.call(peer_of(stranger), TERMS, terms, Terms, timeout_s=config.rpc.stall_timeout_s)
            reply.body.check(terms, "this node")
        except RefusedError as error:
            raise IncompatiblePeerError(_sentence(strangers, config.run_id, error)) from error
        except RpcError as error:
            logger.info("node %s: %s", stranger.node_id, error)


async def _ask(endpoint: Endpoint, terms: Terms, address: str, config: RunConfig) -> None:
    try:
        await endpoint.call(Peer(None, address), TERMS, terms, Terms, timeout_s=config.rpc.stall_timeout_s)
    except RefusedError as error:
        if error.reason in _FOR_GOOD:
            raise IncompatiblePeerError(str(error)) from error
        logger.info("%s", error)
    except RpcError as error:  # Discovery asks there too, and says so.
        logger.debug("%s", error)


def _sentence(strangers: list[Announcement], run_id: str, error: RefusedError) -> str:
    who = "1 node" if len(strangers) == 1 else f"{len(strangers)} nodes"
    return f"{who} of run {run_id} and this one do not fit: {error}"
