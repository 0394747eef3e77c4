"""Types of fields that several documents share, with their limits.

The limits are far beyond any honest store (2**53 counts stay exact in every JSON reader) and are there so that a
hostile file is refused while it is still a number, before it becomes memory or disk.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, Field

from manifests.errors import InvalidDocumentError
from manifests.keys import check_key
from manifests.serialisation import parse_time

MAX_COUNT = 2**53 - 1


def _checked_key(key: str) -> str:
    try:
        return check_key(key)
    except InvalidDocumentError as error:
        raise ValueError(str(error)) from None


def _checked_time(text: str) -> str:
    try:
        parse_time(text)
    except InvalidDocumentError as error:
        raise ValueError(str(error)) from None
    return text


Count = Annotated[int, Field(strict=True, ge=0, le=MAX_COUNT)]
ShardTokens = Annotated[int, Field(strict=True, ge=1, le=2**28 - 1)]
"""A shard of more would be over 2 GB, beyond the form of `manifests.shard_file`."""
TokenId = Annotated[int, Field(strict=True, ge=0, le=2**32 - 1)]
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Key = Annotated[str, AfterValidator(_checked_key)]
Time = Annotated[str, AfterValidator(_checked_time)]
SourceName = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9._-]{0,63}$")]
