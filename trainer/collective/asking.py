"""Asking a coordinator, which may be this node itself: then without a message."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from trainer.aggregation import Moments
from trainer.collective.config import CollectiveConfig
from trainer.collective.messages import (
    Acknowledge,
    AcknowledgeReply,
    Agreement,
    Decision,
    JoinRequest,
    MomentsOpen,
    MomentsReply,
    StatusReply,
    StatusRequest,
    Task,
    Vote,
)
from trainer.collective.moments import split_sums
from trainer.errors import CodecError, RpcError
from trainer.network.rpc import Endpoint, Peer

if TYPE_CHECKING:
    from trainer.collective.service import RoundService

__all__ = ["Asking"]

logger = logging.getLogger(__name__)


class Asking:
    """The questions of a round; a peer of None is this node."""

    def __init__(self, endpoint: Endpoint, service: RoundService, config: CollectiveConfig) -> None:
        self._endpoint = endpoint
        self._service = service
        self._config = config

    async def join(self, coordinator: Peer | None, request: JoinRequest) -> Agreement:
        """Waits for the others, and for the agreement."""
        if coordinator is None:
            return await self._service.join(self._endpoint.peer_id, request)
        reply = await self._endpoint.call(
            coordinator,
            "round/join",
            request,
            Agreement,
            timeout_s=self._config.gather_timeout_s + 2 * self._config.stall_timeout_s,
            stall_timeout_s=self._config.stall_timeout_s,
        )
        return reply.body

    async def acknowledge(self, coordinator: Peer | None, agreement: Agreement) -> Agreement | None:
        """Waits until all have acknowledged."""
        digest = agreement.fingerprint()
        if coordinator is None:
            return await self._service.acknowledge(self._endpoint.peer_id, agreement.round_index, digest)
        reply = await self._endpoint.call(
            coordinator,
            "round/acknowledge",
            Acknowledge(round_index=agreement.round_index, agreement=digest),
            AcknowledgeReply,
            timeout_s=4 * self._config.stall_timeout_s,
            stall_timeout_s=self._config.stall_timeout_s,
        )
        return reply.body.agreement

    async def vote(self, coordinator: Peer | None, vote: Vote, sums: Moments | None) -> Decision:
        """Waits for the decision."""
        if coordinator is None:
            return await self._service.vote(self._endpoint.peer_id, vote, sums)
        reply = await self._endpoint.call(
            coordinator,
            "round/vote",
            vote,
            Decision,
            payload=sums.to_bytes() if sums is not None else b"",
            timeout_s=self._config.round_timeout_s,
            stall_timeout_s=self._config.stall_timeout_s,
        )
        return reply.body

    async def is_there(self, peer: Peer | None, agreement_digest: str) -> bool:
        """Whether a member answers for a round."""
        if peer is None:
            return True
        status = StatusRequest(agreement=agreement_digest)
        try:
            await self._endpoint.call(peer, "round/status", status, StatusReply, timeout_s=self._config.stall_timeout_s)
        except RpcError:
            return False
        return True

    async def moments(self, agreement: Agreement, task: Task, sums: Moments) -> list[Moments]:
        """Everybody's sums, from the first coordinator in order that answers; this node's own, if none does."""
        first = agreement.peer_ids.index(agreement.coordinator) if agreement.coordinator in agreement.peer_ids else 0
        for term in range(len(agreement.members)):
            member = agreement.members[(first + term) % len(agreement.members)]
            try:
                pieces = await self._moments_at(
                    member.peer_id, member.address, member.certificate, agreement, task, sums
                )
                if not pieces:
                    raise CodecError("expected the sums of one reducer or more, found none")
                return [Moments.from_bytes(piece, len(agreement.members)) for piece in pieces]
            except (RpcError, CodecError, ValueError) as error:
                logger.info("round %d: no sums from %s: %s", agreement.round_index, member.peer_id[:8], error)
        return [sums]

    async def _moments_at(
        self, peer_id: str, address: str, certificate: str | None, agreement: Agreement, task: Task, sums: Moments
    ) -> list[bytes]:
        digest = agreement.fingerprint()
        if peer_id == self._endpoint.peer_id:
            return list(await self._service.consult(peer_id, digest, sums.to_bytes()))
        reply = await self._endpoint.call(
            Peer(peer_id, address, certificate.encode() if certificate else None),
            "round/moments",
            MomentsOpen(agreement=digest, task=task.key),
            MomentsReply,
            payload=sums.to_bytes(),
            timeout_s=self._config.round_timeout_s,
            stall_timeout_s=self._config.stall_timeout_s,
        )
        return split_sums(reply.body, bytes(reply.payload))
