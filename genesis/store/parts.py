"""A part of one object whose size and ETag are known, over as many attempts as it takes.

Bytes are taken only where the server states that they are exactly the missing ones of that very object, so a part is
never put together from two objects, and one that was replaced is an error at the first byte. What came before a cut is
kept. The time it may take is that of a whole download (`genesis.store.resuming`): the policy's deadline, and beyond it
what its bytes take at the slowest rate allowed.
"""

from __future__ import annotations

from genesis.errors import PreconditionFailedError, StoreError
from genesis.store.limits import RetryPolicy
from genesis.store.resuming import Answer, opaque_etag, parse_content_range
from genesis.store.retrying import TransientError

_OK, _PART = 200, 206


class PartDownload:
    """The state of one read of a part; a `genesis.store.limits.TimeLimit` of its own call, used by one thread."""

    def __init__(self, name: str, start: int, end: int, *, total_bytes: int, etag: str, policy: RetryPolicy) -> None:
        """Begins with nothing.

        Args:
            name: of the object, for messages.
            start: the first byte wanted.
            end: the byte after the last; above ``start``.
            total_bytes: the object's size.
            etag: its ETag; empty where the server gives none.
            policy: deadline and slowest rate.
        """
        self.name = name
        self.etag = etag
        self._start = start
        self._end = end
        self._total_bytes = total_bytes
        self._deadline = policy.deadline()
        self._rate = policy.slowest_bytes_per_s
        self._received = bytearray()

    @property
    def moved_bytes(self) -> int:
        """What has come; never less than before."""
        return len(self._received)

    def remaining_s(self) -> float:
        """Seconds left; negative once the time is up."""
        return self._deadline.remaining_s() + len(self._received) / self._rate

    @property
    def range_header(self) -> str:
        """What is still missing, as a ``Range`` header asks for it."""
        return f"bytes={self._start + len(self._received)}-{self._end - 1}"

    def begin(self, answer: Answer) -> None:
        """Checks that the body of an answer is what is missing.

        Raises:
            PreconditionFailedError: it is of another object than the one that was known.
            StoreError: it is not a part.
        """
        found = parse_content_range(answer.content_range)
        # ``rclone serve s3`` 1.75 sends parts with status 200.
        if answer.status not in (_OK, _PART) or found is None:
            raise StoreError(
                f"{self.name}: expected a part (206) for {self.range_header}, found {answer.status} and "
                f"{answer.content_range or 'no Content-Range'}; the server does not serve ranges: download the files "
                "and give those"
            )
        etag = opaque_etag(answer.etag) or ""
        if found.total != self._total_bytes or etag != self.etag:
            raise PreconditionFailedError(
                f"{self.name}: expected {self._total_bytes:,} bytes with the ETag {self.etag or '(none)'}, found "
                f"{found.total:,} bytes and {etag or 'none'}; it has been replaced"
            )
        if (found.first, found.last) != (self._start + len(self._received), self._end - 1):
            raise TransientError(f"expected {self.range_header}, found {answer.content_range}")

    def append(self, chunk: bytes) -> None:
        """Takes the next bytes of the body.

        Raises:
            TransientError: there are more than were asked for, or the time is up.
        """
        missing = self._end - self._start - len(self._received)
        self._received += chunk[:missing]
        if len(chunk) > missing:
            raise TransientError(f"more than {self._end - self._start:,} bytes came")
        if self.remaining_s() < 0:
            raise TransientError(f"{len(self._received):,} bytes had come when the time was up")

    @property
    def is_complete(self) -> bool:
        """Whether all bytes have come, whatever became of the answer they came in."""
        return len(self._received) == self._end - self._start

    def finish(self) -> bytearray:
        """The part, once an answer's body has ended.

        Raises:
            TransientError: there is more to come.
        """
        wanted = self._end - self._start
        if len(self._received) < wanted:
            raise TransientError(f"expected {wanted:,} bytes, {len(self._received):,} came")
        return self._received
