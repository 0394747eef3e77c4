"""Where the body of an answer goes, given what earlier attempts at the same object have brought: a pure function.

Guarantees: bytes are appended only where the server says in so many words that they are the very next ones of the very
same object (the strong ETag already seen, a ``Content-Range`` that begins where the last attempt ended and fits
the size known). Anything else starts over or is thrown away, so a body is never put together of two objects, however
a cache, a redirect or a gateway that half knows ranges mixes them up. The trade-off: a server without strong ETags
has every cut body read again from its start.
"""

from __future__ import annotations

from dataclasses import dataclass

from genesis.store.headers import parse_content_range, parse_size, strong_etag

__all__ = ["NOTHING", "Answer", "Held", "Mismatch", "place"]

_WHOLE, _PART = 200, 206
_REFUSED = {412, 416}


@dataclass(frozen=True, slots=True)
class Held:
    """What has come of an object so far."""

    size_bytes: int = 0
    etag: str | None = None
    """The strong ETag it came with; None if the server gave none, so that it cannot be gone on with."""
    total_bytes: int | None = None
    """Size of the whole object, once a server has said it."""

    @property
    def resumable_etag(self) -> str | None:
        """The ETag to ask for the rest with; None if the whole is to be asked for."""
        return self.etag if self.size_bytes > 0 else None


NOTHING = Held()


@dataclass(frozen=True, slots=True)
class Answer:
    """Status and headers of an answer; a header that is not there is empty."""

    status: int
    etag: str = ""
    content_length: str = ""
    content_range: str = ""


@dataclass(frozen=True, slots=True)
class Mismatch:
    """The answer's body is of no use, and neither is what is held: the next attempt asks for the whole."""

    reason: str


def place(held: Held, answer: Answer) -> Held | Mismatch:
    """What is held when the answer's body begins to come.

    Args:
        held: what earlier attempts brought; the request asked for the rest of it if there is a `resumable_etag`.
        answer: 200, 206, 412 or 416.

    Returns:
        ``held`` itself, but for a total now known, if the body goes on where that ends; something that holds no bytes
        if the body begins at the object's start; a `Mismatch` if it is neither.
    """
    if answer.status in _REFUSED:
        return Mismatch(f"the rest after {held.size_bytes:,} bytes is refused ({answer.status})")
    if answer.status == _WHOLE and not answer.content_range:
        return Held(0, strong_etag(answer.etag), parse_size(answer.content_length))
    # ``rclone serve s3`` 1.75 sends parts with status 200: taken for a whole, one would be an object cut at its front.
    if answer.status not in (_WHOLE, _PART) or held.resumable_etag is None:
        return Mismatch(
            f"expected the whole object, found status {answer.status}, {answer.content_range or 'no range'}"
        )
    return _appended(held, answer)


def _appended(held: Held, answer: Answer) -> Held | Mismatch:
    part = parse_content_range(answer.content_range)
    if part is None or part.first != held.size_bytes:
        return Mismatch(f"expected the bytes from {held.size_bytes:,} on, found {answer.content_range or 'no range'!r}")
    if strong_etag(answer.etag) != held.etag:
        return Mismatch(f"expected the rest of {held.etag}, found {answer.etag or 'no ETag'}")
    if held.total_bytes not in (None, part.total):
        return Mismatch(f"expected an object of {held.total_bytes:,} bytes, found one of {part.total:,}")
    if answer.content_length and parse_size(answer.content_length) != part.size_bytes:
        return Mismatch(f"expected {part.size_bytes:,} bytes for {answer.content_range}, found {answer.content_length}")
    return Held(held.size_bytes, held.etag, part.total)
