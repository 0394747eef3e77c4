"""One call or stream as its two ends see it: which frames belong to it, and in what order.

Every frame is bound to the exchange by nonce, method, run, both identities, direction and its place in the sequence;
a frame that was signed for another exchange, or for this one at another place, is refused as ``sequence``, ``kind`` or
whatever differs, before its signature is looked at.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any, Literal

from typing_extensions import Buffer

from trainer.errors import RefusedError
from trainer.network.rpc.envelope import Head, SealedFrame, parse_head, seal, verify_head, verify_payload
from trainer.network.rpc.identity import Identity
from trainer.network.rpc.messages import PeerId
from trainer.network.rpc.reasons import Reason

__all__ = ["CALL_FRAMES", "STREAM_FRAMES", "Exchange", "ExchangeTerms", "check_bound"]

CALL_FRAMES = frozenset({"reply"})
STREAM_FRAMES = frozenset({"data", "end"})


@dataclass(frozen=True, slots=True)
class ExchangeTerms:
    """What all frames of one exchange have in common."""

    method: str
    run_id: str
    nonce: str
    caller: PeerId
    callee: PeerId | None
    """None: the caller does not know yet whom it reaches; the first answer says."""
    certificate_sha256: str
    max_payload_bytes: int


class Exchange:
    """The frames of one end.

    Args:
        terms: of the exchange.
        origin: which end this is.
        identity: signs what goes out.
        expected: kinds of frame the other end may send.
        num_received: frames of the other end that were taken before (the request, by the callee).
    """

    def __init__(
        self,
        terms: ExchangeTerms,
        origin: Literal["caller", "callee"],
        identity: Identity,
        *,
        expected: frozenset[str],
        num_received: int = 0,
    ) -> None:
        self._terms = terms
        self._origin = origin
        self._identity = identity
        self._expected = expected
        self._num_sent = 0
        self._num_received = num_received
        self._other = terms.callee if origin == "caller" else terms.caller
        self._finished = False

    @property
    def other(self) -> PeerId | None:
        """Who the other end is; None as long as it is not known."""
        return self._other

    def seal(
        self,
        kind: Literal["request", "open", "reply", "data", "end"],
        *,
        index: int = 0,
        body: dict[str, Any] | None = None,
        payload: Buffer = b"",
    ) -> bytes:
        """The next frame of this end; it counts as sent once `sent` is called.

        Raises:
            TrainerUsageError: body or payload are larger than a frame may be.
        """
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
            "body": body,
        }
        return seal(self._identity, fields, payload)

    def sent(self) -> None:
        """Counts the frame sealed last."""
        self._num_sent += 1

    def open(self, raw: bytes) -> SealedFrame | None:
        """The frame that came, checked in full; None: a heartbeat.

        Raises:
            RefusedError: it does not belong here, or nobody vouches for it.
        """
        frame = parse_head(raw)
        if frame is None:
            return None
        head = frame.head
        if head.origin == self._origin or head.kind not in self._expected or self._finished:
            raise RefusedError(Reason.KIND, f"expected no frame of kind {head.kind} by the {head.origin} here")
        check_bound(frame, self._terms, self._other, self._identity.peer_id)
        if head.nonce != self._terms.nonce or head.sequence != self._num_received:
            raise RefusedError(
                Reason.SEQUENCE, f"expected frame {self._num_received} of this exchange, found {head.sequence} of one"
            )
        verify_head(frame)
        verify_payload(frame)
        self._num_received += 1
        self._other = head.sender
        self._finished = head.kind in ("reply", "end")
        return frame


def check_bound(frame: SealedFrame, terms: ExchangeTerms, sender: PeerId | None, recipient: PeerId) -> None:
    """Checks what a head claims against what its receiver knows.

    Raises:
        RefusedError: ``run``, ``recipient``, ``sender``, ``certificate``, ``method`` or ``payload_size``.
    """
    head: Head = frame.head
    if head.run_id != terms.run_id:
        raise RefusedError(Reason.RUN, f"expected a message for run {terms.run_id!r}, found one for {head.run_id!r}")
    if head.recipient != recipient:
        found = head.recipient or "whoever answers"
        raise RefusedError(Reason.RECIPIENT, f"expected a message for {recipient}, found one for {found}")
    if sender is not None and head.sender != sender:
        raise RefusedError(Reason.SENDER, f"expected a message by {sender}, found one by {head.sender}")
    if head.certificate_sha256 != terms.certificate_sha256:
        raise RefusedError(
            Reason.CERTIFICATE,
            f"expected TLS certificate {terms.certificate_sha256[:16] or 'none'}, found "
            f"{head.certificate_sha256[:16] or 'none'}: the node restarted, or somebody stands in between",
        )
    if head.method != terms.method:
        raise RefusedError(Reason.METHOD, f"expected a frame of {terms.method!r}, found one of {head.method!r}")
    if len(frame.payload) > terms.max_payload_bytes:
        raise RefusedError(
            Reason.PAYLOAD_SIZE, f"expected at most {terms.max_payload_bytes} bytes, found {len(frame.payload)}"
        )
