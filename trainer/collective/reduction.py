"""The reducer's side of a pass: contributions of one task come in by part, results go out to everybody.

Part by part, as soon as a part has come from all who are expected: what is still on its way does not hold up what is
there. A rule that looks at whole vectors (Krum, centred clip, enforced validation) makes a pause in the middle: all
parts in, sums exchanged, then results.

Who is waited for: everybody in the plan, until its stream ends, or the pass does. Once half of the members have
delivered, one that sends nothing for ``stall_timeout_s`` after three times what those took is left out.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Protocol

from trainer.aggregation import Decision, Moments
from trainer.collective.arithmetic import Arithmetic, Payload, ReducedPart
from trainer.collective.messages import Task
from trainer.errors import RefusedError
from trainer.network.rpc import Frame

__all__ = ["PartStream", "Reduction"]

Consult = Callable[[Task, Moments], Awaitable[Decision]]


class PartStream(Protocol):
    """One contributor's stream, or anything that behaves like it."""

    async def send(self, index: int, payload: Payload) -> None:
        """Sends a result."""

    async def receive(self) -> Frame | None:
        """The next contribution, None at the end."""


class Reduction:
    """One task of this node in one pass.

    Args:
        task: the parts.
        members: whose contributions are expected, this node's included.
        arithmetic: of the round.
        own_id: this node.
        consult: asks all reducers for their sums and decides; None for rules that need no whole vectors.
        measured: sum for the report.
        stall_timeout_s: see above.
        deadline_s: `time.monotonic` when the pass ends whatever is missing.
    """

    def __init__(
        self,
        task: Task,
        members: tuple[str, ...],
        arithmetic: Arithmetic,
        own_id: str,
        *,
        consult: Consult | None,
        measured: bool,
        stall_timeout_s: float,
        deadline_s: float,
    ) -> None:
        self.task = task
        self.dropped: dict[str, str] = {}
        self.odd: dict[str, str] = {}
        """Who was left out of parts by validation, and why of the first of them."""
        self.num_included = 0
        self.sums: Moments | None = None
        self._members = members
        self._arithmetic = arithmetic
        self._own_id = own_id
        self._consult = consult
        self._measured = measured
        self._stall_timeout_s = stall_timeout_s
        self._deadline_s = deadline_s
        self._arrived: dict[int, dict[str, Payload]] = {}
        self._attached: set[str] = set()
        self._dropping: set[asyncio.Task[None]] = set()
        self._num_arrived = dict.fromkeys(members, 0)
        self._last_arrival_s = dict.fromkeys(members, time.monotonic())
        self._results: dict[int, Payload] = {}
        self._failed = False
        self._changed = asyncio.Condition()
        self._started_s = time.monotonic()
        self._half_done_s: float | None = None

    @property
    def parts(self) -> range:
        """Numbers of the parts of this task."""
        return range(self.task.first_part, self.task.last_part)

    async def run(self) -> None:
        """Reduces all parts; returns when each has a result."""
        try:
            for part in self.parts:
                await self._put(self._own_id, part, await asyncio.to_thread(self._arithmetic.encode_own, part))
            if self._consult is None:
                await self._reduce_as_they_come()
            else:
                await self._reduce_after_consulting(self._consult)
        except BaseException:
            async with self._changed:
                self._failed = True
                self._changed.notify_all()
            raise

    async def serve(self, sender: str, stream: PartStream) -> None:
        """Takes a member's contributions and gives it the results, both at once, until it has all of them."""
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
                # A task of its own: this one is cancelled when the sender's connection breaks.
                dropping = asyncio.create_task(
                    self._drop(sender, "its connection broke before all of its parts had come")
                )
                self._dropping.add(dropping)
                dropping.add_done_callback(self._dropping.discard)
            with suppress(asyncio.CancelledError):
                await receiving

    async def lose(self, sender: str, reason: str) -> None:
        """A member was found to be gone: it is not waited for, unless it is sending."""
        if sender not in self._attached:
            await self._drop(sender, reason)

    async def result(self, part: int) -> Payload:
        """A part's result, once there is one.

        Raises:
            ConnectionAbortedError: this node has given up reducing.
        """
        async with self._changed:
            await self._changed.wait_for(lambda: part in self._results or self._failed)
        if part not in self._results:
            raise ConnectionAbortedError(f"part {part} is not reduced here any more")
        return self._results[part]

    async def _receive_from(self, sender: str, stream: PartStream) -> None:
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
                await self._put(sender, part, frame.payload)
        except Exception as error:  # noqa: BLE001 - whatever ends a peer's stream ends that peer's contribution
            reason = str(error)[:200] or type(error).__name__
        if self._num_arrived[sender] < len(self.parts):
            await self._drop(sender, reason)

    async def _put(self, sender: str, part: int, payload: Payload) -> None:
        async with self._changed:
            if part in self._results or sender in self.dropped:
                return
            self._arrived.setdefault(part, {})[sender] = payload
            self._num_arrived[sender] += 1
            self._last_arrival_s[sender] = time.monotonic()
            done = sum(count >= len(self.parts) for count in self._num_arrived.values())
            if self._half_done_s is None and 2 * done >= len(self._members):
                self._half_done_s = time.monotonic()
            self._changed.notify_all()

    async def _drop(self, sender: str, reason: str) -> None:
        async with self._changed:
            self.dropped.setdefault(sender, reason)
            self._changed.notify_all()

    async def _complete(self, part: int) -> dict[str, Payload]:
        """What came for a part, when nobody is waited for any more."""
        while True:
            async with self._changed:
                missing = self._missing(part)
                if not missing:
                    return self._arrived.pop(part, {})
                with suppress(TimeoutError):
                    async with asyncio.timeout(self._stall_timeout_s / 4):
                        await self._changed.wait()
            for sender in self._given_up(missing):
                await self._drop(sender, f"did not send part {part} in time")

    def _missing(self, part: int) -> list[str]:
        arrived = self._arrived.get(part, {})
        return [sender for sender in self._members if sender not in arrived and sender not in self.dropped]

    def _given_up(self, missing: list[str]) -> list[str]:
        now_s = time.monotonic()
        if now_s > self._deadline_s:
            return missing
        if self._half_done_s is None or now_s < self._started_s + 3 * (self._half_done_s - self._started_s):
            return []
        return [sender for sender in missing if now_s > self._last_arrival_s[sender] + self._stall_timeout_s]

    async def _reduce_as_they_come(self) -> None:
        for part in self.parts:
            payloads = await self._complete(part)
            await self._publish(
                part,
                await asyncio.to_thread(self._arithmetic.reduce, part, payloads, None, measured=self._measured),
            )

    async def _reduce_after_consulting(self, consult: Consult) -> None:
        payloads = {part: await self._complete(part) for part in self.parts}
        for part, arrived in payloads.items():
            sums = await asyncio.to_thread(self._arithmetic.measure, part, arrived)
            self.sums = sums if self.sums is None else self.sums + sums
        if self.sums is None:
            return
        decision = await consult(self.task, self.sums)
        for part, arrived in payloads.items():
            reduced = await asyncio.to_thread(self._arithmetic.reduce, part, arrived, decision, measured=False)
            await self._publish(part, reduced)

    async def _publish(self, part: int, reduced: ReducedPart) -> None:
        self.num_included += reduced.num_included
        if reduced.sums is not None:
            self.sums = reduced.sums if self.sums is None else self.sums + reduced.sums
        async with self._changed:
            for sender, reason in reduced.dropped.items():
                self.dropped.setdefault(sender, reason)
            for sender, reason in reduced.odd.items():
                self.odd.setdefault(sender, reason)
            self._results[part] = reduced.payload
            self._changed.notify_all()
