"""One pass of a round: each member reduces its own tasks, and trades parts for results with all other reducers.

A part is reduced as soon as it has come from all who are expected. A rule that looks at whole vectors (Krum, centred
clip) needs a barrier: all parts in, sums exchanged, then results. Every member of the plan is waited for, until its
stream or the pass ends; once half of them have delivered, one that sends nothing for ``stall_timeout_s`` after three
times as long as those took is left out. A reducer that does not deliver costs a member only that task.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field

from trainer.aggregation import Moments, RuleDecision, needs_moments
from trainer.collective.arithmetic import Arithmetic, Payload, TaskResult
from trainer.collective.config import Changes
from trainer.collective.messages import Plan, ReductionOpen, Task
from trainer.errors import CodecError, PeerUnavailableError, RefusedError, RpcError
from trainer.network.rpc import CallEndpoint, Peer, ServerStream, Stream
from trainer.network.rpc.envelope import peer_boundary

logger = logging.getLogger(__name__)

REDUCTION_METHOD = "round/exchange"

DecideRule = Callable[[Task, Moments], Awaitable[RuleDecision]]


class Reduction:
    """One task of this node in one pass; ``members``, this node included, are those whose contributions are expected.

    ``decide_rule`` decides from all reducers' sums, for rules that look at whole vectors; at ``deadline_s`` of
    `time.monotonic` the pass ends whatever is missing.
    """

    def __init__(
        self,
        task: Task,
        members: tuple[str, ...],
        arithmetic: Arithmetic,
        own_id: str,
        *,
        decide_rule: DecideRule,
        stall_timeout_s: float,
        deadline_s: float,
    ) -> None:
        self.task = task
        self.parts = range(task.first_part, task.last_part)
        self.dropped: dict[str, str] = {}
        self.odd: dict[str, str] = {}  # Members left out of parts by validation, and why of the first part.
        self.num_included = 0
        self.sums: Moments | None = None
        self._members = members
        self._arithmetic = arithmetic
        self._own_id = own_id
        self._decide_rule = decide_rule
        self._stall_timeout_s = stall_timeout_s
        self._deadline_s = deadline_s
        self._arrived: dict[int, dict[str, Payload]] = {}
        self._attached: set[str] = set()
        self._started_s = time.monotonic()
        self._half_done_s: float | None = None
        self._num_arrived = dict.fromkeys(members, 0)
        self._last_arrival_s = dict.fromkeys(members, self._started_s)
        self._results: dict[int, Payload] = {}
        self._failed = False
        self._changes = Changes()

    async def run(self) -> None:
        """Reduces all parts; returns when each has a result."""
        try:
            for part in self.parts:
                self._put(self._own_id, part, self._arithmetic.encode_own(part))
                await asyncio.sleep(0)
            if needs_moments(self._arithmetic.rule):
                await self._reduce_whole_vectors()
            else:
                for part in self.parts:
                    await self._reduce(part, await self._complete(part), None)
        except BaseException:
            self._failed = True
            self._changes.notify()
            raise

    async def serve(self, sender: str, stream: ServerStream) -> None:
        """Takes a member's contributions and sends it the results, both at once, until it has all of them."""
        if sender not in self._num_arrived:
            raise RefusedError("unknown", "not a member of this pass")
        self._attached.add(sender)
        receiving = asyncio.create_task(self._receive_from(sender, stream))
        try:
            for part in self.parts:
                await stream.send(part, await self.result(part))
        finally:
            receiving.cancel()
            if self._num_arrived[sender] < len(self.parts):
                self._drop(sender, "its connection broke before all of its parts had come")
            with suppress(asyncio.CancelledError):
                await receiving

    def lose(self, sender: str, reason: str) -> None:
        """Stops waiting for a member that was found to be gone, unless it is sending."""
        if sender not in self._attached:
            self._drop(sender, reason)

    async def result(self, part: int) -> Payload:
        """Waits for a part's result; raises ConnectionAbortedError once this node has given up reducing."""
        await self._changes.wait_for(lambda: part in self._results or self._failed)
        if part not in self._results:
            raise ConnectionAbortedError(f"part {part} is not reduced here any more")
        return self._results[part]

    async def _receive_from(self, sender: str, stream: ServerStream) -> None:
        reason = "its stream ended before all of its parts had come"
        try:
            while (frame := await stream.receive()) is not None:
                part = frame.index
                if part not in self.parts or sender in self._arrived.get(part, {}):
                    reason = f"sent part {part}, which was not expected of it"
                    break
                expected_bytes = self._arithmetic.encoded_bytes(part)
                if len(frame.payload) != expected_bytes:  # Before it is kept: a frame holds 1 MiB.
                    reason = f"sent part {part} in {len(frame.payload)} bytes, not in {expected_bytes}"
                    break
                self._put(sender, part, frame.payload)
        except Exception as error:  # noqa: BLE001 - whatever ends a peer's stream ends that peer's contribution
            reason = str(error)[:200] or type(error).__name__
        if self._num_arrived[sender] < len(self.parts):
            self._drop(sender, reason)

    def _put(self, sender: str, part: int, payload: Payload) -> None:
        if part in self._results or sender in self.dropped:
            return
        self._arrived.setdefault(part, {})[sender] = payload
        self._num_arrived[sender] += 1
        self._last_arrival_s[sender] = time.monotonic()
        num_done = sum(count >= len(self.parts) for count in self._num_arrived.values())
        if self._half_done_s is None and 2 * num_done >= len(self._members):
            self._half_done_s = time.monotonic()
        self._changes.notify()

    def _drop(self, sender: str, reason: str) -> None:
        self.dropped.setdefault(sender, reason)
        self._changes.notify()

    async def _complete(self, part: int) -> dict[str, Payload]:
        """Returns the contributions to a part once no more are waited for."""
        while True:
            arrived = self._arrived.get(part, {})
            missing = [sender for sender in self._members if sender not in arrived and sender not in self.dropped]
            if not missing:
                return self._arrived.pop(part, {})
            await self._changes.wait(self._stall_timeout_s / 4)
            for sender in self._given_up(missing):
                self._drop(sender, f"did not send part {part} in time")

    def _given_up(self, missing: list[str]) -> list[str]:
        now_s = time.monotonic()
        if now_s > self._deadline_s:
            return missing
        if self._half_done_s is None or now_s < self._started_s + 3 * (self._half_done_s - self._started_s):
            return []
        return [sender for sender in missing if now_s > self._last_arrival_s[sender] + self._stall_timeout_s]

    async def _reduce_whole_vectors(self) -> None:
        payloads = {part: await self._complete(part) for part in self.parts}
        for part, arrived in payloads.items():
            self._add_sums(await asyncio.to_thread(self._arithmetic.measure, part, arrived))
        if self.sums is None:
            return
        decision = await self._decide_rule(self.task, self.sums)
        for part, arrived in payloads.items():
            await self._reduce(part, arrived, decision)

    async def _reduce(self, part: int, payloads: Mapping[str, Payload], decision: RuleDecision | None) -> None:
        reduced = await asyncio.to_thread(self._arithmetic.reduce, part, payloads, decision)
        self.num_included += reduced.num_included
        self._add_sums(reduced.sums)
        self.dropped = {**reduced.dropped, **self.dropped}
        self.odd = {**reduced.odd, **self.odd}
        self._results[part] = reduced.payload
        self._changes.notify()

    def _add_sums(self, sums: Moments | None) -> None:
        if sums is not None:
            self.sums = sums if self.sums is None else self.sums + sums


@dataclass(frozen=True, slots=True, kw_only=True)
class ReductionPass:
    """One pass, as a member goes through it."""

    plan: Plan
    plan_digest: str
    endpoint: CallEndpoint
    arithmetic: Arithmetic
    results: Mapping[str, TaskResult]  # Empty ones, of the plan's fresh tasks, by key.
    reductions: Mapping[str, Reduction]  # This node's own tasks in this pass, by key.
    stall_timeout_s: float  # Silence after which a reducer is given up.
    timeout_s: float  # How long the pass may take.
    _failed: dict[str, str] = field(default_factory=dict, init=False)

    async def run(self) -> dict[str, str]:
        """Goes through the pass; returns the reducers that did not deliver, and why."""
        peers = {member.peer_id: member.peer for member in self.arithmetic.agreement.members}
        async with asyncio.TaskGroup() as group:
            for task in self.plan.fresh:
                if task.key in self.reductions:
                    group.create_task(self._reduce_own(self.reductions[task.key], self.results[task.key]))
                else:
                    group.create_task(self._trade(task, peers[task.reducer], self.results[task.key]))
        return self._failed

    async def _reduce_own(self, reduction: Reduction, result: TaskResult) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(reduction.run())
            for part in reduction.parts:
                result.add(part, await reduction.result(part))

    async def _trade(self, task: Task, peer: Peer, result: TaskResult) -> None:
        try:
            async with asyncio.timeout(self.timeout_s):
                await self._trade_parts(task, peer, result)
        except (RpcError, CodecError, TimeoutError) as error:
            reason = str(error)[:200] or type(error).__name__
            if isinstance(error, PeerUnavailableError):
                for reduction in self.reductions.values():
                    reduction.lose(task.reducer, reason)
            self._failed[task.reducer] = reason
            logger.info("round: reducer %s did not deliver: %s", task.reducer[:8], reason)

    async def _trade_parts(self, task: Task, peer: Peer, result: TaskResult) -> None:
        opening = ReductionOpen(plan=self.plan_digest, agreement=self.plan.agreement, task=task.key)
        async with self.endpoint.open_stream(
            peer, REDUCTION_METHOD, opening, timeout_s=self.timeout_s, stall_timeout_s=self.stall_timeout_s
        ) as stream:
            sending = asyncio.create_task(self._send_parts(task, stream))
            try:
                while not result.complete:
                    frame = await stream.receive()
                    if frame is None:
                        raise CodecError(f"task {task.key}: the results ended before all parts had come")
                    with peer_boundary(f"reducer {task.reducer[:8]}"):
                        result.add(frame.index, frame.payload)
            finally:
                sending.cancel()
                with suppress(asyncio.CancelledError, RpcError):
                    await sending

    async def _send_parts(self, task: Task, stream: Stream) -> None:
        for part in range(task.first_part, task.last_part):
            await stream.send(part, self.arithmetic.encode_own(part))
        await stream.end()
