"""One call or stream as its two ends see it: which frames belong to it, and in what order.

Every frame is bound to its call by nonce, method, run, both identities, direction and its place in the sequence. One
that was signed for another call, or for this one at another place, is refused before its signature is looked at.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import Literal

from pydantic import BaseModel
from typing_extensions import Buffer

from trainer.errors import RefusedError, TrainerUsageError
from trainer.network.rpc.envelope import SealedFrame, parse_header, seal, verify_header, verify_payload
from trainer.network.rpc.identity import Identity
from trainer.network.rpc.messages import PeerId, Reason
from trainer.network.rpc.wire import PeerFinishedError, Wire

__all__ = ["CALL_FRAMES", "STREAM_FRAMES", "CallTerms", "RpcCall", "check_bound"]

CALL_FRAMES = frozenset({"reply"})
STREAM_FRAMES = frozenset({"data", "end"})

_CERTIFICATE_HINT = ": the node restarted, or there is a man in the middle"
_MAX_INDEX = 2**53 - 1


@dataclass(frozen=True, slots=True)
class CallTerms:
    """What all frames of one call have in common."""

    method: str
    run_id: str
    nonce: str
    caller: PeerId
    callee: PeerId | None
    """None: the caller does not know yet whom it reaches; the first answer says."""
    certificate_sha256: str
    max_payload_bytes: int


class RpcCall:
    """One end of a call: sends its frames in the order in which tasks give them, and checks those of the other end.

    Args:
        terms: of the call.
        origin: which end this is.
        identity: signs what goes out.
        expected: kinds of frame the other end may send; the callee has taken the first frame already.
        wire: of this end.
    """

    def __init__(
        self,
        terms: CallTerms,
        origin: Literal["caller", "callee"],
        identity: Identity,
        expected: frozenset[str],
        wire: Wire,
    ) -> None:
        self._terms = terms
        self._origin = origin
        self._identity = identity
        self._expected = expected
        self.wire = wire
        self._turn = asyncio.Lock()
        self._num_sent = 0
        self._num_received = 0 if origin == "caller" else 1
        self._other = terms.callee if origin == "caller" else terms.caller
        self._other_ended = False
        self.ended = False
        """Whether this end has sent its last frame."""

    async def send(
        self,
        kind: Literal["request", "open", "reply", "data", "end"],
        *,
        index: int = 0,
        body: BaseModel | None = None,
        payload: Buffer = b"",
    ) -> None:
        """Sends a frame; returns when the connection has taken the frame before, or, after the last frame, that one.

        Raises:
            RpcError: the first error of the call.
            TrainerUsageError: the frame is larger than a frame may be, its body has no named fields, or it comes after
                the last one; the call goes on.
        """
        if not 0 <= index <= _MAX_INDEX:
            raise TrainerUsageError(f"expected a frame's index from 0 to 2**53 - 1, found {index}")
        dumped = None if body is None else body.model_dump(mode="json")
        if not isinstance(dumped, dict | None):
            raise TrainerUsageError(f"expected a body with named fields, found {type(body).__name__}")
        async with self._turn:
            await asyncio.sleep(0)  # So that the write begun last is in flight while this frame is sealed.
            self.wire.raise_if_failed()
            if self.ended:
                raise TrainerUsageError("expected nothing after the end of the stream, found another frame")
            fields: dict[str, object] = {
                "kind": kind,
                "origin": self._origin,
                "method": self._terms.method,
                "run_id": self._terms.run_id,
                "recipient": self._other or "",
                "nonce": self._terms.nonce,
                "sequence": self._num_sent,
                "index": index,
                "sent_at": time.time(),
                "certificate_sha256": self._terms.certificate_sha256,
                "body": dumped,
            }
            raw = seal(self._identity, fields, payload)
            await self.wire.settle()
            # From here on nothing is awaited, so that a cancelled send has either sent its frame or left no gap.
            self.wire.begin_write(raw)
            self._num_sent += 1
            self.ended = kind in ("reply", "end")
        if self.ended:
            await self.wire.settle()

    async def end(self) -> None:
        """Sends the end, unless it was sent before, or the other side has finished in good order without it."""
        if self.ended:
            return
        try:
            await self.send("end")
        except PeerFinishedError:
            self.ended = True

    def open(self, raw: bytes) -> SealedFrame | None:
        """Returns the frame that came, checked in full; None for a heartbeat.

        Raises:
            RefusedError: it does not belong here, or a signature or digest is wrong.
        """
        frame = parse_header(raw)
        if frame is None:
            return None
        header = frame.header
        if header.origin == self._origin or header.kind not in self._expected or self._other_ended:
            raise RefusedError(Reason.KIND, f"expected no frame of kind {header.kind} by the {header.origin} here")
        check_bound(frame, self._terms, self._other, self._identity.peer_id)
        if header.nonce != self._terms.nonce or header.sequence != self._num_received:
            raise RefusedError(
                Reason.SEQUENCE, f"expected frame {self._num_received} of this call, found {header.sequence} of one"
            )
        verify_header(frame)
        verify_payload(frame)
        self._num_received += 1
        self._other = header.sender
        self._other_ended = header.kind in ("reply", "end")
        return frame


def check_bound(frame: SealedFrame, terms: CallTerms, sender: PeerId | None, recipient: PeerId) -> None:
    """Checks what a header claims against what its receiver knows; ``sender`` None: anyone.

    Raises:
        RefusedError: ``run``, ``recipient``, ``sender``, ``certificate``, ``method`` or ``payload_size``.
    """
    header = frame.header
    for reason, expected, found, hint in (
        (Reason.RUN, terms.run_id, header.run_id, ""),
        (Reason.RECIPIENT, recipient, header.recipient, ""),
        (Reason.SENDER, header.sender if sender is None else sender, header.sender, ""),
        (Reason.CERTIFICATE, terms.certificate_sha256, header.certificate_sha256, _CERTIFICATE_HINT),
        (Reason.METHOD, terms.method, header.method, ""),
    ):
        if found != expected:
            raise RefusedError(reason, f"expected a message with {reason} {expected!r}, found one with {found!r}{hint}")
    if len(frame.payload) > terms.max_payload_bytes:
        raise RefusedError(
            Reason.PAYLOAD_SIZE, f"expected at most {terms.max_payload_bytes} bytes, found {len(frame.payload)}"
        )
