"""A dataset repository on the Hub as a plan: revision resolved once to a commit, files listed in a fixed order.

Everything later is read at that commit, so a push to the branch between two runs changes nothing. The digest of a file
is the Hub's own object id (the sha256 of a large file). Listing takes one request a 1,000 files below the patterns'
fixed folder: one for FineWeb-Edu's sample, 60 for the whole of SlimPajama.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from urllib.parse import quote

from genesis.errors import InputNotFoundError, SourceError
from genesis.sources.base import InputFile, InputPlan, fixed_folder, matches, natural_key
from genesis.sources.hub_client import HubRetryPolicy, api_pages
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
