"""Frames in both directions over one exchange, in order, with backpressure, and with somebody alive at the other end.

`Stream.send` returns once the frame before it was taken by the connection, so that hashing a frame overlaps with
sending the one before; `Stream.receive` takes from at most ``max_queued_frames`` frames that were read ahead. A side
that has nothing to send sends heartbeats, and a side that hears nothing for ``stall_timeout_s`` gives up. Silence is
judged only while this side is reading: a peer is not called dead because this node leaves its frames unread. What is
left to notice meanwhile is left to gRPC's pings and to the deadline of the call.
"""

from __future__ import annotations

from typing_extensions import Buffer

from trainer.network.rpc.incoming import Incoming
from trainer.network.rpc.messages import Frame
from trainer.network.rpc.outgoing import Outgoing

__all__ = ["ServerStream", "Stream"]


class Stream:
    """One end of a stream; `send` and `receive` may be awaited side by side, on the endpoint's event loop."""

    def __init__(self, incoming: Incoming, outgoing: Outgoing) -> None:
        self._incoming = incoming
        self._outgoing = outgoing

    async def send(self, index: int, payload: Buffer) -> None:
        """Sends a frame after those sent before; waits while the other side takes none.

        Args:
            index: the sender's own number for it, in [0, 2**53).
            payload: at most the method's ``max_payload_bytes``; may be changed once this returns.

        Raises:
            PeerUnavailableError: the peer died, fell silent, or has finished.
            RefusedError: it refused the stream, or a frame of it.
            TrainerUsageError: after `end`, or a payload larger than a frame may be.
        """
        await self._outgoing.send("data", index=index, payload=payload)

    async def end(self) -> None:
        """Says that no more frames come; returns when all are handed to the connection. Further calls do nothing.

        Raises:
            PeerUnavailableError, RefusedError: as `send`.
        """
        await self._outgoing.end()

    async def receive(self) -> Frame | None:
        """The next frame, or None after the other side's `end`. May be cancelled without losing a frame.

        Raises:
            PeerUnavailableError: the peer died or fell silent, or stopped without `end`.
            RefusedError: it refused the stream; in a handler: a frame of the caller was refused.
        """
        return await self._incoming.receive()


ServerStream = Stream
"""The handler's end; it ends by itself when the handler returns."""
