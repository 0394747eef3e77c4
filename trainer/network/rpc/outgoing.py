"""The sending half of an exchange: seals the next frame while the last one is on its way."""

from __future__ import annotations

import asyncio
from typing import Any, Literal

from typing_extensions import Buffer

from trainer.errors import TrainerUsageError
from trainer.network.rpc.exchange import Exchange
from trainer.network.rpc.failure import Failure
from trainer.network.rpc.reasons import PeerFinishedError
from trainer.network.rpc.writer import FrameWriter

__all__ = ["Outgoing"]

_MAX_INDEX = 2**53 - 1


class Outgoing:
    """Numbers the frames and keeps them in the order in which they were given, whoever sends."""

    def __init__(self, exchange: Exchange, writer: FrameWriter, failure: Failure) -> None:
        self._exchange = exchange
        self._writer = writer
        self._failure = failure
        self._turn = asyncio.Lock()
        self._ended = False

    @property
    def ended(self) -> bool:
        """Whether the last frame was given."""
        return self._ended

    async def send(
        self,
        kind: Literal["request", "open", "reply", "data", "end"],
        *,
        index: int = 0,
        body: dict[str, Any] | None = None,
        payload: Buffer = b"",
    ) -> None:
        """Sends a frame; returns when the one before it was taken by the connection, after the last one: it itself.

        Raises:
            RpcError: what went wrong with the exchange.
            TrainerUsageError: the frame cannot be sent; the exchange goes on.
        """
        if not 0 <= index <= _MAX_INDEX:
            raise TrainerUsageError(f"expected a frame's index from 0 to 2**53 - 1, found {index}")
        async with self._turn:
            await asyncio.sleep(0)  # So that the write begun last is under way while this frame is sealed.
            self._failure.raise_if_set()
            if self._ended:
                raise TrainerUsageError("expected nothing after the end of the stream, found another frame")
            raw = self._exchange.seal(kind, index=index, body=body, payload=payload)
            await self._writer.settle()
            # From here on nothing is awaited, so that a cancelled send has either sent its frame or left no gap.
            self._writer.begin(raw)
            self._exchange.sent()
            self._ended = kind in ("reply", "end")
        if self._ended:
            await self._writer.settle()

    async def end(self) -> None:
        """Sends the end, unless it was sent before, or the other side has gone in good order without waiting for it."""
        if self._ended:
            return
        try:
            await self.send("end")
        except PeerFinishedError:
            self._ended = True
