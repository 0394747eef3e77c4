"""A file on the Hub, read by ranges.

Only the bytes asked for travel. The Hub answers a range with a redirect to a signed address of its CDN; that address is
kept and asked directly until it expires, so a 2 GB parquet file costs the rate-limited Hub one request, not one a
row group. A cut connection goes on at the byte. A server that ignores ranges is refused, for it would send the file
whole for every row group; a length other than the plan's is refused too.
"""

from __future__ import annotations

import io
import re
import time
from collections.abc import Iterator
from urllib.parse import quote, urlsplit

from huggingface_hub import constants, get_session, hf_raise_for_status
from typing_extensions import Buffer

from genesis.errors import CorruptInputError, SourceError
from genesis.sources.base import InputFile
from genesis.sources.hub_client import CutConnectionError, HubRetryPolicy, auth_headers, retrying

HUB_WINDOW_BYTES = 16 << 20
"""Range asked for at a time when a file is read from end to end: at 100 MB/s and 50 ms a request, 3/4 of the line."""

_LOCATION = re.compile(r"hf://datasets/(?P<repo>[^@]+)@(?P<commit>[0-9a-f]{40})/(?P<path>.+)", re.DOTALL)
_CONTENT_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+)")
_EXPIRED = (400, 401, 403, 404, 410)


class HubReader:
    """Reads ranges of one file of a plan; safe to use from one thread at a time."""

    def __init__(self, file: InputFile, policy: HubRetryPolicy) -> None:
        self._file = file
        self._policy = policy
        self._signed_url: str | None = None

    @property
    def size_bytes(self) -> int:
        """The file's length, as the plan has it."""
        return self._file.size_bytes

    def read(self, start: int, end: int) -> bytearray:
        """Bytes ``start:end``, cut off at the file's end.

        Raises:
            CorruptInputError: the file is not as long as the plan says.
            SourceError: it cannot be read, or not by ranges.
        """
        end = min(end, self.size_bytes)
        received = bytearray()
        if end > start:
            retrying(self._file.name, lambda: self._attempt(received, start, end), self._policy)
        return received

    def windows(self) -> Iterator[bytearray]:
        """The file from its first byte to its last, `HUB_WINDOW_BYTES` at a time."""
        for start in range(0, self.size_bytes, HUB_WINDOW_BYTES):
            yield self.read(start, start + HUB_WINDOW_BYTES)

    def _attempt(self, received: bytearray, start: int, end: int) -> None:
        """Asks for what is still missing of a range; what comes before a cut is kept.

        After any failure the next attempt asks the Hub again: the CDN's address may have expired, or its host be down.
        """
        signed_url, self._signed_url = self._signed_url, None
        headers = {"Range": f"bytes={start + len(received)}-{end - 1}", "Accept-Encoding": "identity"}
        if signed_url is None:
            self._receive(received, start, end, self._hub_url(), {**auth_headers(), **headers})
        else:
            self._receive(received, start, end, signed_url, headers)

    def _receive(self, received: bytearray, start: int, end: int, url: str, headers: dict[str, str]) -> None:
        first = start + len(received)
        wanted = end - start
        give_up_at = time.monotonic() + self._policy.deadline_s
        with get_session().stream("GET", url, headers=headers, timeout=self._policy.timeout_s) as response:
            if url != self._hub_url() and response.status_code in _EXPIRED:
                raise CutConnectionError(f"the CDN's address has expired (HTTP {response.status_code})")
            if response.is_error:
                response.read()
            hf_raise_for_status(response)
            self._check_range(response.status_code, response.headers.get("content-range", ""), first, end)
            # Pieces as they arrive: a chunk size would hold back what came before a cut.
            for chunk in response.iter_raw():
                received += chunk
                if len(received) > wanted:
                    raise CorruptInputError(f"{self._file.name}: the server sent more than bytes {first}-{end - 1}")
                if time.monotonic() > give_up_at:
                    raise CutConnectionError(f"slower than {self._policy.deadline_s:.0f} s for {wanted} bytes")
        if len(received) < wanted:
            raise CutConnectionError(f"connection cut at byte {start + len(received)} of {end}")
        self._remember(str(response.url))

    def _check_range(self, status: int, content_range: str, first: int, end: int) -> None:
        if status == 200 and first == 0 and end == self.size_bytes:
            return
        found = _CONTENT_RANGE.fullmatch(content_range)
        if status != 206 or found is None:
            raise SourceError(
                f"{self._file.name}: expected a part (HTTP 206) for bytes {first}-{end - 1}, found HTTP {status}; "
                f"{constants.ENDPOINT} does not serve ranges: download the files and give them with --input"
            )
        if tuple(map(int, found.groups())) != (first, end - 1, self.size_bytes):
            raise CorruptInputError(
                f"{self._file.name}: expected bytes {first}-{end - 1} of {self.size_bytes}, found {content_range!r}; "
                "the server holds another file than its own listing says"
            )

    def _remember(self, url: str) -> None:
        if urlsplit(url).netloc != urlsplit(constants.ENDPOINT).netloc:
            self._signed_url = url

    def _hub_url(self) -> str:
        found = _LOCATION.fullmatch(self._file.location)
        if found is None:
            raise SourceError(f"expected hf://datasets/owner/name@commit/path, found {self._file.location!r}")
        return f"{constants.ENDPOINT}/datasets/{found['repo']}/resolve/{found['commit']}/{quote(found['path'])}"


class HubFile(io.RawIOBase):
    """`HubReader` as a seekable file, for pyarrow: every read is one range."""

    def __init__(self, reader: HubReader) -> None:
        self._reader = reader
        self._position = 0

    def readable(self) -> bool:
        """Always."""
        return True

    def seekable(self) -> bool:
        """Always."""
        return True

    def tell(self) -> int:
        """Position in bytes."""
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Moves the position."""
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._reader.size_bytes}[whence]
        self._position = max(0, base + offset)
        return self._position

    def read(self, size: int = -1) -> bytes:
        """The next ``size`` bytes (all the rest if negative) in one request."""
        end = self._reader.size_bytes if size is None or size < 0 else self._position + size
        data = self._reader.read(self._position, end)
        self._position += len(data)
        return bytes(data)

    def readall(self) -> bytes:
        """All the rest."""
        return self.read(-1)

    def readinto(self, buffer: Buffer) -> int:
        """Fills the buffer as far as the file goes."""
        view = memoryview(buffer).cast("B")
        data = self.read(len(view))
        view[: len(data)] = data
        return len(data)
