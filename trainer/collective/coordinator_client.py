"""A member's questions to a coordinator, and to other members that may know how a round ended."""

from __future__ import annotations

import logging
from typing import TypeVar

from pydantic import BaseModel

from trainer.aggregation import Moments
from trainer.collective.messages import (
    Acknowledge,
    AcknowledgeReply,
    Agreement,
    CommitDecision,
    JoinRequest,
    MomentsOpen,
    MomentsReply,
    StatusReply,
    StatusRequest,
    Task,
    Vote,
)
from trainer.collective.moments import split_sums
from trainer.collective.service import RoundService, RoundSettings
from trainer.errors import CodecError, RpcError
from trainer.network.rpc import Peer, Reply, Request

__all__ = ["CoordinatorClient"]

logger = logging.getLogger(__name__)

B = TypeVar("B", bound=BaseModel)


class CoordinatorClient:
    """Asks coordinators; one of None is this node, which is asked without a message."""

    def __init__(self, settings: RoundSettings, service: RoundService) -> None:
        self._endpoint = settings.endpoint
        self._own_id = settings.endpoint.peer_id
        self._service = service
        self._config = settings.config

    async def join(self, coordinator: Peer | None, request: JoinRequest) -> Agreement:
        """Joins a round, and returns the agreement once all have come."""
        if coordinator is None:
            return (await self._service.join(Request(self._own_id, request))).body
        timeout_s = self._config.gather_timeout_s + 2 * self._config.stall_timeout_s
        return (await self._call(coordinator, "round/join", request, Agreement, timeout_s)).body

    async def acknowledge(self, coordinator: Peer | None, agreement: Agreement) -> Agreement | None:
        """Acknowledges an agreement; returns None once all have, or the agreement that replaces it."""
        body = Acknowledge(round_index=agreement.round_index, agreement=agreement.fingerprint())
        if coordinator is None:
            return (await self._service.acknowledge(Request(self._own_id, body))).body.agreement
        timeout_s = 4 * self._config.stall_timeout_s
        return (await self._call(coordinator, "round/acknowledge", body, AcknowledgeReply, timeout_s)).body.agreement

    async def vote(self, coordinator: Peer | None, vote: Vote, sums: Moments | None) -> CommitDecision:
        """Votes, and returns the decision."""
        payload = sums.to_bytes() if sums is not None else b""
        if coordinator is None:
            return (await self._service.vote(Request(self._own_id, vote, payload))).body
        timeout_s = self._config.round_timeout_s
        return (await self._call(coordinator, "round/vote", vote, CommitDecision, timeout_s, payload)).body

    async def is_present(self, peer: Peer | None, agreement_digest: str) -> bool:
        """Returns whether a member answers for a round."""
        if peer is None:
            return True
        status = StatusRequest(agreement=agreement_digest)
        try:
            await self._endpoint.call(peer, "round/status", status, StatusReply, timeout_s=self._config.stall_timeout_s)
        except RpcError:
            return False
        return True

    async def moments(self, agreement: Agreement, task: Task, sums: Moments) -> list[Moments]:
        """Returns all reducers' sums, from the first member in succession that answers; if none does, only its own."""
        body, payload = MomentsOpen(agreement=agreement.fingerprint(), task=task.key), sums.to_bytes()
        timeout_s = self._config.round_timeout_s
        for member in agreement.succession():
            try:
                if member.peer_id == self._own_id:
                    reply = await self._service.all_reduce_moments(Request(self._own_id, body, payload))
                else:
                    reply = await self._call(member.peer, "round/moments", body, MomentsReply, timeout_s, payload)
                pieces = split_sums(reply.body, bytes(reply.payload))
                if not pieces:
                    raise CodecError("expected the sums of one reducer or more, found none")
                return [Moments.from_bytes(piece, len(agreement.members)) for piece in pieces]
            except (RpcError, CodecError, ValueError) as error:
                logger.info("round %d: no sums from %s: %s", agreement.round_index, member.peer_id[:8], error)
        return [sums]

    async def _call(
        self, peer: Peer, method: str, body: BaseModel, reply: type[B], timeout_s: float, payload: bytes = b""
    ) -> Reply[B]:
        stall_timeout_s = self._config.stall_timeout_s
        return await self._endpoint.call(
            peer, method, body, reply, payload=payload, timeout_s=timeout_s, stall_timeout_s=stall_timeout_s
        )
