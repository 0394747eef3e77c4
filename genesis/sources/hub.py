"""A dataset repository on the Hub as a plan, at one commit and in a fixed order; and its files, read by ranges.

Everything later is read at that commit, so a push to the branch between two runs changes nothing. The digest of a file
is the Hub's own object id (the sha256 of a large file). Listing takes one request a 1,000 files below the patterns'
fixed folder: one for FineWeb-Edu's sample, 60 for the whole of SlimPajama.

A file is read by ranges: only the bytes asked for travel. The Hub answers a range with a redirect to a signed address
of its CDN; that address is kept and asked directly until it expires, so a 2 GB parquet file costs the rate-limited Hub
one request, not one a row group. A cut connection goes on at the byte. A server that ignores ranges is refused, for it
would send the file whole for every row group; a length other than the plan's is refused too.
"""

from __future__ import annotations

import io
import re
import time
from collections.abc import Iterator, Mapping
from urllib.parse import quote, urlsplit

from huggingface_hub import constants, get_session, hf_raise_for_status
from typing_extensions import Buffer

from genesis.errors import CorruptInputError, InputNotFoundError, SourceError
from genesis.sources.base import InputFile, InputPlan, fixed_folder, matches, natural_key
from genesis.sources.hub_client import CutConnectionError, HubRetryPolicy, api_pages, auth_headers, retrying
from genesis.sources.opening import format_of
from manifests import SourceSpec

_COMMIT = re.compile("[0-9a-f]{40}")


def hub_plan(spec: SourceSpec, *, pinned_revision: str | None = None) -> InputPlan:
    """The plan of a source on the Hub.

    Files come in the order of ``data_files``, those of one pattern in natural order; a file that several patterns
    match is read once, at the first.

    Raises:
        InputNotFoundError: no such repository or revision, or a pattern matches nothing.
        SourceError: the Hub refuses or cannot be reached.
    """
    repo = spec.hf_path
    if repo is None:
        raise InputNotFoundError(f"{spec.name}: expected hf_path in sources.json, found none; give --input")
    policy = HubRetryPolicy.from_environment()
    commit = _commit(repo, pinned_revision or spec.revision, policy)
    listings: dict[tuple[str, bool], dict[str, InputFile]] = {}
    files: dict[str, InputFile] = {}
    for pattern in spec.data_files:
        place = _place(pattern)
        if place not in listings:
            listings[place] = _list(repo, commit, *place, policy)
        found = {name: file for name, file in listings[place].items() if matches(name, pattern)}
        if not found:
            raise InputNotFoundError(f"{spec.name}: no file of {repo}@{commit[:12]} matches data_files {pattern!r}")
        files.update({name: found[name] for name in sorted(found, key=natural_key) if name not in files})
    return InputPlan(spec.name, spec.text_field, tuple(files.values()), repo=repo, revision=commit)


def _commit(repo: str, revision: str, policy: HubRetryPolicy) -> str:
    if _COMMIT.fullmatch(revision):
        return revision
    what = f"{repo}@{revision}"
    (info,) = api_pages(f"datasets/{repo}/revision/{quote(revision, safe='')}", what, policy, {"expand": "sha"})
    commit = info.get("sha") if isinstance(info, Mapping) else None
    if not isinstance(commit, str) or not _COMMIT.fullmatch(commit):
        raise SourceError(f"{what}: expected a commit of 40 hexadecimal digits from the Hub, found {commit!r}")
    return commit


def _place(pattern: str) -> tuple[str, bool]:
    """The folder to list for a pattern, and whether with the folders below it."""
    folder = fixed_folder(pattern)
    rest = pattern[len(folder) :].lstrip("/")
    return folder, "/" in rest or "**" in rest


def _list(repo: str, commit: str, folder: str, recursive: bool, policy: HubRetryPolicy) -> dict[str, InputFile]:
    path = f"datasets/{repo}/tree/{commit}" + (f"/{quote(folder, safe='')}" if folder else "")
    what = f"{repo}@{commit[:12]}/{folder}"
    pages = api_pages(path, what, policy, {"recursive": str(recursive).lower(), "expand": "false"})
    entries = [entry for page in pages if isinstance(page, list) for entry in page]
    files = [_file(repo, commit, entry) for entry in entries if entry.get("type") == "file"]
    return {file.name: file for file in files if file is not None}


def _file(repo: str, commit: str, entry: Mapping[str, object]) -> InputFile | None:
    path, size_bytes, large = entry.get("path"), entry.get("size"), entry.get("lfs")
    oid = large.get("oid") if isinstance(large, Mapping) else entry.get("oid")
    if not (isinstance(path, str) and isinstance(size_bytes, int) and isinstance(oid, str)):
        raise SourceError(f"{repo}: expected path, size and oid of a file from the Hub, found {dict(entry)!r:.200}")
    kind = format_of(path)
    if kind is None:
        return None
    return InputFile(path, f"hf://datasets/{repo}@{commit}/{path}", kind, size_bytes, oid)


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
