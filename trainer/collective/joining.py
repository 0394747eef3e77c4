"""How one node joins a round: it finds the coordinator, claims its work, and acknowledges an agreement with all others.

If a coordinator is lost before its agreement is in force, the node asks the next in order; so it does with one under
which this round has failed before, itself included: else one that spoils a round would do so at each attempt, for the
order does not depend on the attempt. What a node agrees to it has checked: its own entry, weights and parts by the
rules that all share, and under a quorum the lags that it saw itself.
"""

from __future__ import annotations

import asyncio
import logging
import time

from trainer.collective import messages
from trainer.collective.config import MAX_ROUND_MEMBERS
from trainer.collective.levels import GroupedAgreement
from trainer.collective.messages import MOST_LAG, Agreement
from trainer.collective.planning import check_agreement, coordinator_order, most_part_values
from trainer.collective.quorum import check_lags, check_workers
from trainer.collective.service import KnownRound, RoundService
from trainer.errors import RefusedError, RoundFailedError, RpcError, StateBehindError
from trainer.network.rpc import Peer
from trainer.outer.engine.collective import Contribution

logger = logging.getLogger(__name__)

_RETRY_S = 0.3
_BEHIND = ("behind", "state", "late")
"""Reasons for which this node is to fetch the others' state."""
_ENOUGH_SAY_FEW = 3


class Joining:
    """One node's way into one round, after which it could have at most ``vocabulary_rows`` rows of vocabulary."""

    def __init__(self, service: RoundService, contribution: Contribution, vocabulary_rows: int) -> None:
        self.settings = service.settings.at(contribution.round_index)
        """Those in force, which a change of the run that the others know replaces."""
        self.known: KnownRound | None = None  # What the node has acknowledged, so that others count on it.
        self.is_late = False  # Its work was done before it knew of a change that is in force.
        self.expects_phase = False  # Whether others may come to a second phase before this node.
        self._said: dict[str, set[str]] = {}  # Coordinators, by the reason for which they refuse this node.
        self._said_behind = ""  # What the last of them that said so said.
        self._service = service
        self._own_id = service.settings.own_id
        self._contribution = contribution
        self._vocabulary_rows = vocabulary_rows

    async def run(self) -> Agreement:
        """Finds the coordinator and agrees; tries the next one wherever one is lost, until it is cancelled.

        Raises:
            StateBehindError: the others hold another state, or have gone on without this node.
            RoundFailedError: too few came, or too many, or nobody gathers for a round that could be attended.
        """
        # Its own failures too: the others do not come to it first either.
        tried = set(self._service.failed_under(self._contribution.round_index))
        while True:
            for coordinator in self._coordinators(tried):
                try:
                    agreement = await self._agree_with(coordinator, tried)
                except RefusedError as error:
                    if error.reason == "change" and await self._has_fetched_changes(coordinator):
                        break
                    if error.reason == "fork":
                        self._service.note_fork(coordinator, error)
                    self._said.setdefault(error.reason, set()).add(coordinator)
                    if error.reason in _BEHIND:
                        self._said_behind = str(error)
                    if self._is_final(error, coordinator):
                        is_failure = error.reason in {"few", "full"}
                        raise (RoundFailedError if is_failure else StateBehindError)(str(error)) from error
                    if error.reason == "not_coordinator":
                        tried.clear()
                        break
                    tried.add(coordinator)
                except RpcError as error:
                    logger.info("round %d: %s", self._contribution.round_index, error)
                    tried.add(coordinator)
                else:
                    if agreement is not None:
                        return agreement
            if self.settings.config.quorum and not self._contribution.num_batches:
                raise RoundFailedError(
                    f"round {self._contribution.round_index}: nobody gathers for it whom this node could attend"
                )
            await asyncio.sleep(_RETRY_S)

    async def _has_fetched_changes(self, coordinator: str) -> bool:
        """Fetches the changes of the run that a coordinator knows; returns whether another is in force here now."""
        changes, before = self.settings.changes, self.settings.change
        peer = self.settings.directory.peers().get(coordinator)
        if changes is not None and peer is not None:
            await changes.fetch(peer)
        self.settings = self.settings.at(self._contribution.round_index)
        return self.settings.change != before

    def _num_batches(self) -> int:
        """Returns what this node's work counts for: nothing if it was done by other settings than those in force.

        The node takes the result all the same: what it did is dropped, and it goes on with what the others hold.
        """
        changes = self.settings.changes
        self.is_late = changes is not None and changes.trained_by() < self.settings.change
        if not self.is_late:
            return self._contribution.num_batches
        logger.warning(
            "round %d: change %d of the run was not known here in time: the work of %d batches is not contributed",
            *(self._contribution.round_index, self.settings.change, self._contribution.num_batches),
        )
        return 0

    def _work(self) -> messages.ClaimedWork | None:
        if not self.settings.config.quorum:
            return None
        contribution = self._contribution
        return messages.ClaimedWork(num_steps=contribution.num_steps, lag=min(contribution.lag, MOST_LAG))

    def _coordinators(self, tried: set[str]) -> list[str]:
        """Returns whom to ask: those that precede this node, in order, then itself; all others first if it failed."""
        peer_ids = {self._own_id, *self.settings.directory.peers()}
        order = coordinator_order(self.settings.run_id, self._contribution.round_index, peer_ids)
        first = order if self._own_id in tried else order[: order.index(self._own_id)]
        return [*(peer_id for peer_id in first if peer_id not in tried), self._own_id]

    async def _agree_with(self, coordinator: str, tried: set[str]) -> Agreement | None:
        """Returns the agreement that all have acknowledged; None if the coordinator is not known any more."""
        endpoint = self.settings.endpoint
        is_own = coordinator == self._own_id
        peer = endpoint.peer if is_own else self.settings.directory.peers().get(coordinator)
        if peer is None:
            return None
        contribution = self._contribution
        request = messages.JoinRequest(
            round_index=contribution.round_index,
            terms=self.settings.terms,
            state_digest=contribution.state_digest,
            num_values=contribution.vector.numel(),
            num_batches=self._num_batches(),
            age_s=max(0.0, contribution.age_s),
            progress=contribution.progress,
            work=self._work(),
            change=self.settings.change,
            change_digest=self.settings.change_digest,
            vocabulary_rows=self._vocabulary_rows,
            address=endpoint.address,
            certificate=endpoint.certificate.decode() if endpoint.certificate else None,
            tried=tuple(sorted(tried)[:MAX_ROUND_MEMBERS]),
        )
        timeout_s = self.settings.config.gather_timeout_s + 2 * self.settings.config.stall_timeout_s
        sent = (await self._service.ask(peer, "round/join", request, Agreement, timeout_s)).body
        while True:
            agreement = await self._service.levels.resolved(sent, peer)
            check_agreement(
                agreement,
                request,
                own_id=self._own_id,
                values_per_part=most_part_values(agreement, self.settings.values_per_part),
                max_weight_ratio=self.settings.config.max_weight_ratio,
                weighing=self.settings.weighing,
                block_values=self.settings.codec.block_values,
            )
            self._check_company(agreement)
            self._check_quorum(agreement, is_replaced=self.known is not None)
            known = self.known = self._service.acknowledged(agreement)
            # Others may come to the levels of a round in groups, as to a second phase, before this node.
            known.expects_phase = self.expects_phase or isinstance(agreement, GroupedAgreement)
            other = await self._wait_until_begun(peer, known)
            if other is None:
                return agreement
            known.abandoned, known.expects_phase = True, False
            sent = other

    def _check_company(self, agreement: Agreement) -> None:
        """Raises StateBehindError for a round of few where somebody has said that this node is behind: it may be."""
        known = {*self.settings.directory.peers(), self._own_id}
        if self._said_behind and 2 * len(known & set(agreement.peer_ids)) <= len(known):
            raise StateBehindError(self._said_behind)

    def _check_quorum(self, agreement: Agreement, *, is_replaced: bool) -> None:
        """Raises RefusedError for lags that are not as this node saw them, and for too little work to attend."""
        history, quorum = self._service.history, self.settings.config.quorum
        check_lags(agreement, history.lags.observed(agreement.round_index) if quorum else None)
        attends = bool(quorum) and not self._contribution.num_batches
        if attends and not history.may_close_with_few(self.settings.config.gather_timeout_s, time.monotonic()):
            known = {*self.settings.directory.peers(), self._own_id}
            check_workers(agreement, quorum, history.num_members, known, is_replaced=is_replaced)

    async def _wait_until_begun(self, coordinator: Peer, known: KnownRound) -> Agreement | None:
        """Returns None once the round has begun, or the agreement that replaces this one.

        If a coordinator is lost after it told some members, but not all, that the round has begun, some of those open
        streams to this node, which says as much. A moment is left for that.
        """
        begun = known.begun
        asking = asyncio.create_task(self._acknowledge(coordinator, known.agreement))
        waiting = asyncio.create_task(begun.wait())
        try:
            await asyncio.wait({asking, waiting}, return_when=asyncio.FIRST_COMPLETED)
            if asking.done() and asking.exception() is not None and not begun.is_set():
                await asyncio.wait({waiting}, timeout=min(1.0, self.settings.config.stall_timeout_s / 4))
            if begun.is_set():
                return None
            if asking.exception() is not None:
                known.abandoned = True
            return asking.result()
        finally:
            for task in (asking, waiting):
                task.cancel()
            await asyncio.gather(asking, waiting, return_exceptions=True)

    async def _acknowledge(self, coordinator: Peer, agreement: Agreement) -> Agreement | None:
        """Returns None once all have acknowledged an agreement, or the one that replaces it."""
        body = messages.Acknowledge(round_index=agreement.round_index, agreement=agreement.fingerprint())
        timeout_s = 4 * self.settings.config.stall_timeout_s
        return (
            await self._service.ask(coordinator, "round/acknowledge", body, messages.AcknowledgeReply, timeout_s)
        ).body.agreement

    def _is_final(self, error: RefusedError, coordinator: str) -> bool:
        """Whether asking another coordinator is no use.

        A single one is not believed that a node is behind that holds the state of most, nor that too few have come: it
        would say so whenever it is the first, and in each attempt, and no round would come after. What may still come
        is a round of most nodes (`_check_company`).
        """
        directory = self.settings.directory
        is_own, num_peers = coordinator == self._own_id, len(directory.peers())
        if error.reason in _BEHIND:
            behind = set().union(*(self._said.get(reason, ()) for reason in _BEHIND))
            most_say = 2 * len(behind) > num_peers
            return (is_own and error.reason != "behind") or most_say or not directory.holds_most_held_state()
        if error.reason == "few":
            return is_own or len(self._said["few"]) >= min(_ENOUGH_SAY_FEW, num_peers // 2 + 1)
        return error.reason == "full"
