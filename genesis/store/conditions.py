"""What a write can be conditional on, and what a store says when the condition does not hold."""

from __future__ import annotations

from dataclasses import dataclass

from typing_extensions import Buffer

from genesis.errors import PreconditionFailedError, UsageError
from genesis.store.base import StoredObject

__all__ = ["ConditionRefused", "ConditionUnsupported", "WriteCondition", "settle"]


class ConditionRefused(Exception):  # noqa: N818 - a refusal is an answer, not yet an error
    """The store refused a conditional write; never leaves the stores."""


class ConditionUnsupported(Exception):  # noqa: N818
    """The server has no conditional writes; never leaves the stores."""


@dataclass(frozen=True, slots=True)
class WriteCondition:
    """At most one of the two."""

    if_absent: bool = False
    if_match: str | None = None

    def __post_init__(self) -> None:
        if self.if_absent and self.if_match is not None:
            raise UsageError("expected if_absent or if_match, found both; a write has one condition")

    def __bool__(self) -> bool:
        return self.if_absent or self.if_match is not None

    def __str__(self) -> str:
        return "no object" if self.if_absent else f"ETag {self.if_match}"

    def holds_for(self, etag: str | None) -> bool:
        """Whether the condition holds where the object has ``etag`` (None: there is no object)."""
        if self.if_absent:
            return etag is None
        return self.if_match is None or etag == self.if_match


def settle(where: str, condition: WriteCondition, found: StoredObject | None, body: Buffer) -> str:
    """The outcome of a conditional write that was refused, from what is there now.

    An object of exactly these bytes is what an earlier attempt wrote, whose acknowledgement was lost: success.

    Args:
        where: the object, for the message.
        condition: what the write was conditional on.
        found: the object that is there.
        body: the bytes that were to be written.

    Returns:
        The ETag of the object there.

    Raises:
        PreconditionFailedError: it is another object, or there is none.
    """
    if found is None:
        raise PreconditionFailedError(f"{where}: expected {condition}, found no object; nothing was written")
    if found.body != body:
        raise PreconditionFailedError(
            f"{where}: expected {condition}, found another object of {len(found.body):,} bytes (ETag {found.etag}); "
            "nothing was written"
        )
    return found.etag
