"""A dataset repository on the Hub as a plan, at one commit and in a fixed order; and its files, read by ranges.

Everything later is read at that commit, so a push to the branch between two runs changes nothing. The digest of a file
is the Hub's own object id (the sha256 of a large file). Listing takes one request a 1,000 files below the patterns'
fixed folder: one for FineWeb-Edu's sample, 60 for the whole of SlimPajama. A source without patterns takes those of a
configuration that the repository's README.md declares (`genesis.sources.hub_configurations`).

A file is read by ranges: only the bytes asked for travel. The Hub answers a range with a redirect to a signed address
of its CDN; that address is kept and asked directly until it expires, so a 2 GB parquet file costs the rate-limited Hub
one request, not one a row group. A cut connection goes on at the byte. A server that ignores ranges is refused, for it
would send the file whole for every row group; a length other than the plan's is refused too.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from urllib.parse import quote, urlsplit

from huggingface_hub import constants, get_session, hf_raise_for_status

from genesis.errors import CorruptInputError, InputNotFoundError, SourceError
from genesis.sources.base import InputFile, InputPlan, fixed_folder, matches, natural_key
from genesis.sources.hub_client import CutConnectionError, HubRetryPolicy, api_pages, auth_headers, endpoint, retrying
from genesis.sources.hub_configurations import MAX_CARD_BYTES, configured_patterns
from genesis.sources.opening import format_of
from genesis.sources.ranges import RangeReader
from genesis.sources.selection import Filters, asks_for
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

    def listed(folder: str, recursive: bool) -> dict[str, InputFile]:
        if (folder, recursive) not in listings:
            listings[folder, recursive] = _list(repo, commit, folder, recursive, policy)
        return listings[folder, recursive]

    filters = Filters.of(spec)
    patterns = spec.data_files or configured_patterns(spec, _card(listed("", False), policy))
    files: dict[str, InputFile] = {}
    for pattern in patterns:
        found = {name: file for name, file in listed(*_place(pattern)).items() if matches(name, pattern)}
        if not found:
            raise InputNotFoundError(f"{spec.name}: no file of {repo}@{commit[:12]} matches data_files {pattern!r}")
        text = (name for name in found if _is_text(name, pattern) or filters.asks_for(name))
        files.update({name: found[name] for name in sorted(text, key=natural_key) if name not in files})
    chosen = tuple(file for file in files.values() if filters.allow(file.name))
    if not chosen:
        raise InputNotFoundError(
            f"{spec.name}: {len(files)} files of {repo}@{commit[:12]} match {' '.join(patterns)}, none of them is text "
            f"that {str(filters) or 'a pattern'} asks for; give other patterns"
        )
    return InputPlan(spec.name, spec.text_field, chosen, repo=repo, revision=commit)


_ABOUT = frozenset({"dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json", "config.json"})
"""What libraries write beside a data set, in a format that text comes in too."""


def _is_text(name: str, pattern: str) -> bool:
    return asks_for(pattern, name) and not (pattern.endswith("**") and name.rpartition("/")[2] in _ABOUT)


def _card(top: Mapping[str, InputFile], policy: HubRetryPolicy) -> str:
    """The repository's README.md, as far as it can declare anything; empty if there is none."""
    card = top.get("README.md")
    return "" if card is None else HubReader(card, policy).read(0, MAX_CARD_BYTES).decode("utf-8", "replace")


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


_LOCATION = re.compile(r"hf://datasets/(?P<repo>[^@]+)@(?P<commit>[0-9a-f]{40})/(?P<path>.+)", re.DOTALL)
_CONTENT_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+)")
_EXPIRED = (400, 401, 403, 404, 410)


class HubReader(RangeReader):
    """Reads ranges of one file at a commit of the Hub."""

    def __init__(self, file: InputFile, policy: HubRetryPolicy) -> None:
        super().__init__(file)
        self._policy = policy
        self._signed_url: str | None = None

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
        return f"{endpoint()}/datasets/{found['repo']}/resolve/{found['commit']}/{quote(found['path'])}"
