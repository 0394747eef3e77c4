"""`Chain`: a micro-batch goes on from worker to worker, and its gradient comes back the same way.

Forward here, then the next worker is asked to do the rest, then the gradient that it answers is counted here. While
that lasts the graph is kept (within the replica's bound, beyond it the input is). What went wrong behind this stage is
answered as ``hop`` (no clear outcome; whoever asks again the same way gets the answers that were given, and only what
was not done is done) or ``hop-…`` with the reason of the worker that refused, whose stage and key the text names first;
what went wrong here once the stages behind had counted it, as ``partly``: asking again would not mend it.
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
from trainer.pipeline.worker.applying import StageReply
from trainer.pipeline.worker.link import StageLink
from trainer.pipeline.worker.received import ReceivedChain
from trainer.pipeline.worker.replies import Slot
from trainer.pipeline.worker.stage_executor import Gradient, StageExecutor

__all__ = ["Chain"]

_NAMED = re.compile(r"\b(?:head|tail|body-[1-9][0-9]{0,3}) [0-9a-f]{64}: ")
"""How a refusal begins that names who failed."""
_SHARE_BEHIND = 0.9
"""Of the time that is left: what the stages behind this one may take; the rest is for counting here."""


class Chain:
    """One stage's part in chains.

    Args:
        endpoint: asks the next worker.
        plan: the run's stages.
        stage_name: which one is here.
        passing: its passes.
        link: what comes and goes.
        peer_of: where a hop is reached; raises `RefusedError` of one that is not known.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        plan: StagePlan,
        stage_name: str,
        passing: StageExecutor,
        link: StageLink,
        peer_of: Callable[[messages.Hop], Peer],
    ) -> None:
        self._endpoint = endpoint
        self._behind = plan.names[plan.index(stage_name) + 1 :]
        self._name = stage_name
        self._passing = passing
        self._link = link
        self._peer_of = peer_of

    def check_route(self, ask: ReceivedChain) -> None:
        """Whether a route names the stages behind this one.

        Raises:
            RefusedError: ``malformed``; or the next worker is not known.
        """
        found = tuple(hop.stage for hop in ask.route)
        if found != self._behind:
            raise RefusedError(
                "malformed",
                f"expected a route of {', '.join(self._behind) or 'no stage'}, found {', '.join(found) or 'none'}",
            )
        if ask.route:
            self._peer_of(ask.route[0])

    async def answer(self, slot: Slot, sender: PeerId, ask: ReceivedChain, tensors: Mapping[str, Tensor]) -> StageReply:
        """Takes the micro-batch of ``slot`` through this stage and those behind it.

        Raises:
            RefusedError: as of `StageExecutor`, and ``hop`` or ``hop-…``.
        """
        if not self._behind:
            return await self._passing.answer_tail(slot, sender, ask, tensors)
        labels = self._link.labels_of(ask, tensors)
        num_tokens = int((labels != IGNORED_LABEL).sum())
        passed, sent = await self._passing.forward(sender, ask, tensors)
        try:
            behind = await self._ask_next(ask, tensors, sent, num_tokens, slot.owner)
            del sent  # As large as the gradient that comes in its place.
            grad_y = await self._gradient_in(ask, behind)
        except RefusedError:
            await self._passing.forget(passed.key)
            raise
        try:
            gradient = Gradient(passed.key, passed.x, grad_y, num_tokens, passed.version)
            own = await self._passing.count_gradient(slot, sender, ask, gradient, owed=True)
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
        if self._link.codec.needs_ids:
            sent[IDS] = tensors[IDS]
        hop, *rest = ask.route
        peer = self._peer_of(hop)
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
        try:
            answer = await ask_tensors(
                self._endpoint,
                peer,
                messages.CHAIN,
                next_ask,
                sent,
                messages.StageAnswer,
                answer_bytes=self._link.gradient_bytes(ask.num_rows, ask.num_positions),
                timeout_s=left_s,
            )
            self._check(answer, num_tokens)
        except RpcError as error:
            raise _refusal(hop, error) from error
        return answer

    async def _gradient_in(self, ask: ReceivedChain, behind: StageReply) -> Tensor:
        hop = ask.route[0]
        try:
            with peer_boundary(f"{hop.stage} {hop.peer_id}"):
                return await self._link.gradient_of(ask, behind.tensors)
        except (RefusedError, MalformedAnswerError) as error:
            raise _refusal(hop, MalformedAnswerError(f"its gradient: {error}")) from error

    def _check(self, answer: StageReply, num_tokens: int) -> None:
        """What is passed on is vouched for: a lie of the tail's must not be taken for the head's.

        Raises:
            MalformedAnswerError: no honest worker answers so.
        """
        body = answer.body
        if body.applied != self._behind or body.num_tokens != num_tokens:
            raise MalformedAnswerError(
                f"expected {num_tokens} tokens counted in {', '.join(self._behind)}, found {body.num_tokens} in "
                f"{', '.join(body.applied) or 'none'}"
            )
        if body.loss_sum is None or not math.isfinite(body.loss_sum) or body.loss_sum < 0:
            raise MalformedAnswerError(f"expected a loss, found {body.loss_sum}")


def _refusal(hop: messages.Hop, error: RpcError) -> RefusedError:
    """What is answered when the next hop did not do its part; of what is passed on, the words of who failed."""
    if isinstance(error, RefusedError):
        named = list(_NAMED.finditer(str(error)))
        if named and (error.reason == "hop" or error.reason.startswith("hop-")):
            return RefusedError(error.reason, str(error)[named[-1].start() :])
        reason = f"hop-{error.reason.removeprefix('hop-')}"
    else:
        reason = "hop" if isinstance(error, PeerUnavailableError) else "hop-malformed-answer"
    return RefusedError(reason, f"{hop.stage} {hop.peer_id}: {error}")
