"""The one serialised form of JSON, digests and times, beneath the models.

Separate from `documents` so that code that only needs a digest does not import pydantic (0.1 s).
"""

from __future__ import annotations

import hashlib
import json
from datetime import UTC, datetime
from typing import Any

from typing_extensions import Buffer

from manifests.errors import InvalidDocumentError


def canonical_json(value: object) -> bytes:
    """The canonical form of ``value`` as JSON: UTF-8, keys sorted, no white space, no NaN."""
    return json.dumps(value, ensure_ascii=False, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def sha256_hex(data: Buffer) -> str:
    """Lower-case hexadecimal SHA-256 of ``data``."""
    return hashlib.sha256(data).hexdigest()


def format_time(moment: datetime) -> str:
    """``2026-11-20T17:32:03Z``; seconds, always UTC."""
    return moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def parse_time(text: str) -> datetime:
    """The inverse of `format_time`.

    Raises:
        InvalidDocumentError: ``text`` is not such a time.
    """
    try:
        return datetime.strptime(text, "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=UTC)
    except ValueError:
        raise InvalidDocumentError(f"expected a time such as '2026-11-20T17:32:03Z', found {text!r}") from None


def parse_object(data: bytes, what: str) -> dict[str, Any]:
    """Parses ``data`` as one JSON object; ``what`` names the file in messages.

    Raises:
        InvalidDocumentError: it is not UTF-8, not JSON, nested too deep, or not an object.
    """
    try:
        # Decoded here: json.loads would take UTF-16, too, and surrogates that UTF-8 does not have.
        value = json.loads(data.decode("utf-8-sig"))
        if b"\\u" in data:
            _check_unicode(value, what)
    except (ValueError, RecursionError) as error:
        raise InvalidDocumentError(f"{what}: expected a JSON object, found {_excerpt(data)} ({error})") from None
    if not isinstance(value, dict):
        raise InvalidDocumentError(f"{what}: expected a JSON object, found {_excerpt(data)}")
    return value


def _check_unicode(value: object, what: str) -> None:
    """Refuses strings that cannot be written again: JSON's escapes can spell what UTF-8 cannot."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise InvalidDocumentError(f"{what}: expected Unicode text, found half of a surrogate pair") from None


def _excerpt(data: bytes) -> str:
    if not data:
        return "an empty file"
    return f"{len(data)} bytes beginning {bytes(data[:24])!r}"
