"""`Chain`: a micro-batch is passed on from worker to worker, and its gradient comes back the same way.

This stage runs the forward pass, the next worker is asked to do the rest, and the gradient that it answers is counted
here. Meanwhile the graph is kept (within the replica's bound, beyond it the input is). A failure at a later stage is
answered as ``hop`` (no clear outcome; asking again the same way gets the answers that were given, and only what was not
done is done) or ``hop-…`` with the reason of the worker that refused, whose stage and key come first in the text. A
failure here after the later stages have counted is ``partly``: asking again would not help.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping

from torch import Tensor

from trainer.errors import MalformedAnswerError, PeerUnavailableError, PipelineError, RefusedError, RpcError
from trainer.model.loss import IGNORED_LABEL
from trainer.model.plan import StagePlan
from trainer.network.rpc import Endpoint, Peer, PeerId
from trainer.network.rpc.boundary import peer_boundary
from trainer.pipeline.protocol import messages
from trainer.pipeline.protocol.tensors import TensorAnswer, ask_tensors
from trainer.pipeline.protocol.wire import IDS, LABELS
from trainer.pipeline.worker.admission import Priority
from trainer.pipeline.worker.received import ReceivedChain
from trainer.pipeline.worker.replies import PendingCount, StageReply
from trainer.pipeline.worker.stage_executor import StageExecutor

__all__ = ["Chain"]

_NAMED = re.compile(r"\b(?:head|tail|body-[1-9][0-9]{0,3}) [0-9a-f]{64}: ")
"""Beginning of a refusal that names the worker that failed."""
_SHARE_BEHIND = 0.9
"""Of the time that is left, for the stages behind this one; the rest is for counting here."""


class Chain:
    """One stage's part in chains.

    Args:
        endpoint: asks the next worker.
        plan: the run's stages.
        executor: runs this stage's passes.
        peer_of: finds the worker of a hop; raises `RefusedError` for an unknown one.
    """

    def __init__(
        self, endpoint: Endpoint, plan: StagePlan, executor: StageExecutor, peer_of: Callable[[messages.Hop], Peer]
    ) -> None:
        self._endpoint = endpoint
        self._executor = executor
        self._name = executor.name
        self._behind = plan.names[plan.index(executor.name) + 1 :]
        self._peer_of = peer_of

    def check_route(self, ask: ReceivedChain) -> None:
        """Checks that a route names the stages behind this one.

        Raises:
            RefusedError: ``malformed``; or the next worker is unknown.
        """
        found = tuple(hop.stage for hop in ask.route)
        if found != self._behind:
            raise RefusedError(
                "malformed",
                f"expected a route of {', '.join(self._behind) or 'no stage'}, found {', '.join(found) or 'none'}",
            )
        if ask.route:
            self._peer_of(ask.route[0])

    async def answer(
        self, pending: PendingCount, sender: PeerId, ask: ReceivedChain, tensors: Mapping[str, Tensor]
    ) -> StageReply:
        """Takes a micro-batch through this stage and those behind it.

        Raises:
            RefusedError: as of `StageExecutor`, and ``hop``, ``hop-…`` or ``partly``.
        """
        if not self._behind:
            return await self._executor.answer_tail(pending, sender, ask, tensors)
        self._executor.check_room(Priority.FORWARD, sender, ask)  # Before the labels cost anything.
        labels = self._executor.link.labels_of(ask, tensors)
        num_tokens = int((labels != IGNORED_LABEL).sum())
        passed, x, sent = await self._executor.forward(sender, ask, tensors)
        try:
            behind = await self._ask_next(ask, tensors, sent, num_tokens, pending.owner)
            del sent  # As large as the gradient that comes in its place.
            grad_y = await self._gradient_in(ask, behind)
        except RefusedError:
            await self._executor.forget(sender, ask)
            raise
        try:
            own = await self._executor.count_gradient(
                pending, sender, ask, x, grad_y, num_tokens, passed.version, owed=True
            )
        except (PipelineError, RefusedError) as error:
            raise RefusedError("partly", f"counted behind {self._name}, not in it: {error}") from error
        body = own.body.model_copy(
            update={
                "applied": (self._name, *behind.body.applied),
                "loss_sum": behind.body.loss_sum,
                "num_tokens": num_tokens,
                "compute_s": own.body.compute_s + passed.compute_s,
                "queue_s": own.body.queue_s + passed.queue_s,
            }
        )
        return TensorAnswer(body, own.tensors)

    async def _ask_next(
        self, ask: ReceivedChain, tensors: Mapping[str, Tensor], sent: dict[str, Tensor], num_tokens: int, driver: str
    ) -> StageReply:
        left_s = (ask.apply_within_s - ask.waited_s) * _SHARE_BEHIND
        if left_s <= 0:
            raise RefusedError("expired", f"no time was left for the stages behind {self._name}; nothing was counted")
        sent = {**sent, LABELS: tensors[LABELS]}
        if self._executor.link.codec.needs_ids:
            sent[IDS] = tensors[IDS]
        hop, *rest = ask.route
        next_ask = messages.ChainAsk(
            micro_batch=ask.micro_batch,
            stage=hop.stage,
            num_rows=ask.num_rows,
            num_positions=ask.num_positions,
            answer_within_s=min(left_s, ask.answer_within_s),
            apply_within_s=left_s,
            route=tuple(rest),
            driver=driver,
        )
        peer, answer_bytes = self._peer_of(hop), self._executor.link.gradient_bytes(ask.num_rows, ask.num_positions)
        try:
            answer = await ask_tensors(
                self._endpoint,
                peer,
                messages.CHAIN,
                next_ask,
                sent,
                messages.StageAnswer,
                answer_bytes=answer_bytes,
                timeout_s=left_s,
            )
            self._check(answer.body, num_tokens)
        except RpcError as error:
            raise _refusal(hop, error) from error
        return answer

    async def _gradient_in(self, ask: ReceivedChain, behind: StageReply) -> Tensor:
        hop = ask.route[0]
        try:
            with peer_boundary(f"{hop.stage} {hop.peer_id}"):
                return await self._executor.link.gradient_of(ask, behind.tensors)
        except (RefusedError, MalformedAnswerError) as error:
            raise _refusal(hop, MalformedAnswerError(f"its gradient: {error}")) from error

    def _check(self, body: messages.StageAnswer, num_tokens: int) -> None:
        """Checks what is passed on, so that a lie of the tail is not taken for the head's.

        Raises:
            MalformedAnswerError: no honest worker answers so.
        """
        if body.applied != self._behind or body.num_tokens != num_tokens:
            raise MalformedAnswerError(
                f"expected {num_tokens} tokens counted in {', '.join(self._behind)}, found {body.num_tokens} in "
                f"{', '.join(body.applied) or 'none'}"
            )
        if body.loss_sum is None or not math.isfinite(body.loss_sum) or body.loss_sum < 0:
            raise MalformedAnswerError(f"expected a loss, found {body.loss_sum}")


def _refusal(hop: messages.Hop, error: RpcError) -> RefusedError:
    """Returns the refusal for a failure of the next hop; one that was passed on keeps the failed worker's words."""
    if isinstance(error, RefusedError):
        named = list(_NAMED.finditer(str(error)))
        if named and (error.reason == "hop" or error.reason.startswith("hop-")):
            return RefusedError(error.reason, str(error)[named[-1].start() :])
        reason = f"hop-{error.reason.removeprefix('hop-')}"
    else:
        reason = "hop" if isinstance(error, PeerUnavailableError) else "hop-malformed-answer"
    return RefusedError(reason, f"{hop.stage} {hop.peer_id}: {error}")
