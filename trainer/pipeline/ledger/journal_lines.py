r"""The form of a journal, wherever it is kept: one record a line, vouched for by a digest over it and all before it.

`<32 hexadecimal digits> <JSON>\n`. The digest of the last line names the whole journal up to there, so two copies with
the same digest are the same, and lines that belong to another copy do not fit. The trade-off: a line cannot be checked
without those before it, which costs 1 µs each.
"""

from __future__ import annotations

import hashlib
import io
import logging
from typing import Final

from pydantic import ValidationError

from trainer.errors import LedgerError
from trainer.pipeline.ledger.records import RECORD, Record

logger = logging.getLogger(__name__)

SEED: Final = hashlib.sha256(b"genesis ledger 1").hexdigest()[:32]
"""Takes the place of a digest before the first line, and before a snapshot, which stands for all lines before it."""
_DIGEST_CHARS: Final = 32


def encode_line(record: Record, before: str) -> tuple[bytes, str]:
    """Returns a record's line, after lines that end with the digest ``before``, and its own digest."""
    body = record.model_dump_json().encode()
    digest = chain_digest(before, body)
    return b"%s %s\n" % (digest.encode(), body), digest


def chain_digest(before: str, body: bytes) -> str:
    """Returns the digest of a line with this JSON after lines that end with the digest ``before``."""
    return hashlib.sha256(before.encode() + body).hexdigest()[:_DIGEST_CHARS]


def check_lines(data: bytes | bytearray | memoryview, before: str) -> tuple[str, int, int]:
    """Follows the digests of lines, without reading what they say.

    Returns:
        The digest of the last line that fits those before it, how many lines do, and how many bytes these take.
    """
    digest, num_lines, size_bytes = before, 0, 0
    for line in io.BytesIO(data):
        found, _, body = line.rstrip(b"\n").partition(b" ")
        expected = chain_digest(digest, body)
        if not line.endswith(b"\n") or found != expected.encode():
            break
        digest, num_lines, size_bytes = expected, num_lines + 1, size_bytes + len(line)
    return digest, num_lines, size_bytes


def decode_lines(data: bytes, name: str, *, may_be_cut: bool = False) -> tuple[list[Record], str, int]:
    """Returns the records of a whole journal, the digest of the last, and how many bytes they take.

    Args:
        data: all of its lines.
        name: where it is kept, for messages.
        may_be_cut: the last line may be one that was not written to its end; it is left out.

    Raises:
        LedgerError: a line does not fit the digests before it, or is of another release.
    """
    digest, num_lines, size_bytes = check_lines(data, SEED)
    if size_bytes < len(data):
        if not may_be_cut or b"\n" in data[size_bytes:-1]:
            raise LedgerError(
                f"expected line {num_lines + 1} of {name} to fit the digests before it, found it damaged or changed; "
                "put back a copy, or begin a new account in another state folder"
            )
        logger.warning("%s: line %d was not written to its end; nobody was told of it", name, num_lines + 1)
    records: list[Record] = []
    for number, line in enumerate(io.BytesIO(data[:size_bytes]), 1):
        try:
            records.append(RECORD.validate_json(line.partition(b" ")[2]))
        except ValidationError as error:
            why = str(error).splitlines()[0]
            raise LedgerError(f"expected line {number} of {name} to be this release's, found another ({why})") from None
    return records, digest, size_bytes
