"""From a source's name to its plan: which files, in which order, at which revision.

Three kinds of input give the same `InputPlan`: files given with ``--input`` (local, in S3 buckets, behind web servers),
the built-in ``python-docs``, and a dataset repository on the Hub. The libraries of the Hub, of S3 and of HTTP are
imported only where they are needed: they cost 0.3 to 0.5 s that a local run does not pay.

``python-docs`` is the text of the running Python's own standard library, a real text on every machine: a first run
needs no network and no account. One document a ``.py`` file; tests and the packages installed beside the library are
left out. Some 12 MB in 730 files for CPython 3.11. Another Python has other text: a checkpoint made with it says so
(`InputChangedError`).

Names in the plan are relative to the folder all files have in common, so a copy of the data elsewhere, or the
same folder given as a relative path, is the same input to a checkpoint. The price: adding files in a *new* folder
beside the old one changes what is common, and so every name; add files inside the folder that is there, or begin with
the folder above. Filters do not change it. The digest of a local file is of the size and the first and last 64 KiB: it
sees every appended, cut or rewritten file without reading terabytes, not a change in the middle that keeps the size.
"""

from __future__ import annotations

import glob
import hashlib
import os
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path, PurePosixPath
from urllib.parse import unquote

from genesis.errors import InputChangedError, InputNotFoundError, SourceError
from genesis.sources.base import FileFormat, InputFile, InputPlan, fixed_folder, is_pattern, natural_key
from genesis.sources.opening import READABLE, format_of
from genesis.sources.selection import Candidate, Filters, Kind, asks_for, left_out, plan_names
from manifests import Cursor, SourceSpec

_DIGEST_EDGE_BYTES = 64 << 10


def input_plan(spec: SourceSpec, inputs: Sequence[str]) -> InputPlan:
    """The plan of a source read from given files.

    Args:
        spec: the source, for its name, text field and filters.
        inputs: local files, folders or glob patterns (``**`` crosses folders), absolute or relative, ``~`` expanded;
            ``s3://`` files, folders or patterns; addresses of files behind web servers. A file that several of them
            name is read once. A folder means every readable file below it but README and hidden ones.

    Raises:
        InputNotFoundError: an input matches nothing, or filters leave nothing; the message names them.
        SourceError: a named file is of a kind that is not read, or cannot be read.
    """
    filters = Filters.of(spec)
    found: dict[tuple[Kind, str], Candidate] = {}
    for text in inputs:
        for candidate in _candidates(text):
            before = found.get((candidate.kind, candidate.path))
            if before is None or not before.asked_for:
                found[candidate.kind, candidate.path] = candidate
    taken = [
        candidate
        for candidate in found.values()
        if candidate.asked_for or not left_out(candidate.relative) or filters.asks_for(candidate.relative)
    ]
    allowed = [candidate for candidate in taken if filters.allow(candidate.relative)]
    if not allowed:
        raise InputNotFoundError(_nothing_left(spec, filters, len(found), len(taken)))
    names = plan_names(taken)
    files = [_measured(names[candidate.kind, candidate.path], candidate) for candidate in allowed]
    files.sort(key=lambda file: natural_key(file.name))
    return InputPlan(source=spec.name, text_field=spec.text_field, files=tuple(files))


def _nothing_left(spec: SourceSpec, filters: Filters, found: int, taken: int) -> str:
    if not found:
        return f"{spec.name}: expected at least one input file, found none; give --input a path or pattern"
    if not taken:
        return (
            f"{spec.name}: expected input files of text, found {found} README, .md or hidden files only, which are "
            "left out; name them, or ask for them with --include '*.md'"
        )
    return f"{spec.name}: {filters} leaves none of {taken} input files; change the filters"


def _candidates(text: str) -> list[Candidate]:
    if text.startswith("s3://"):
        from genesis.sources.buckets import s3_candidates

        return s3_candidates(text)
    if text.startswith(("https://", "http://")):
        from genesis.sources.web import web_candidate

        return [web_candidate(text)]
    return _expand(text)


def _measured(name: str, candidate: Candidate) -> InputFile:
    kind = _format(candidate)
    if candidate.kind == "local":
        return input_file(name, Path(candidate.location))
    size_bytes, digest = candidate.size_bytes, candidate.digest
    if size_bytes is None:
        from genesis.sources.web import look

        size_bytes, digest = look(candidate.location)
    return InputFile(name=name, location=candidate.location, format=kind, size_bytes=size_bytes, digest=digest)


def _format(candidate: Candidate) -> FileFormat:
    kind = format_of(candidate.path)
    if kind is None:
        suffix = PurePosixPath(candidate.path).suffix or "no extension"
        raise SourceError(
            f"{candidate.path}: expected a file of one of {READABLE}, found {suffix!r}; convert it, or leave it out "
            "with --exclude"
        )
    return kind


def local_path(text: str) -> str:
    """The path that an input means: its own, or that of a ``file:///`` address."""
    return unquote(text.removeprefix("file://")) if text.startswith("file:///") else text


def _expand(text: str) -> list[Candidate]:
    """The local files an input means, by absolute paths (symbolic links not followed, so names stay the user's)."""
    text = local_path(text)
    path = Path(os.path.abspath(Path(text).expanduser()))  # noqa: PTH100  Path.resolve would follow links
    if path.is_dir():
        return _below(path, path)
    if path.is_file():
        return [_local(path, path.parent, asked_for=True)]
    pattern = str(path)
    found = [Path(match) for match in glob.glob(pattern, recursive=True)] if is_pattern(pattern) else []  # noqa: PTH207
    folder = Path(fixed_folder(pattern) or "/")
    files = [_local(match, folder, asked_for=asks_for(pattern, str(match))) for match in found if match.is_file()]
    for match in found:
        if match.is_dir() and not _ends_in_any_depth(text):
            files += _below(match, folder)
    if not files:
        raise InputNotFoundError(
            f"--input {text!r}: no such file, and nothing matches it (looked in {_searched(path)})"
        )
    return files


def _local(path: Path, folder: Path, *, asked_for: bool) -> Candidate:
    return Candidate("local", path.as_posix(), path.relative_to(folder).as_posix(), str(path), asked_for)


def _ends_in_any_depth(text: str) -> bool:
    # 'dir/**' yields the folders as well as the files in them: the files are there already.
    return "**" in text


def _searched(path: Path) -> Path:
    fixed = path
    while is_pattern(str(fixed)) or not fixed.exists():
        if fixed == fixed.parent:
            break
        fixed = fixed.parent
    return fixed


def _below(folder: Path, top: Path) -> list[Candidate]:
    """Readable files of a folder, at any depth, with names below ``top``; what is in hidden folders is left out."""
    files: list[Candidate] = []
    for parent, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        readable = (Path(parent, name) for name in names if format_of(name) is not None)
        files += [_local(path, top, asked_for=not left_out(path.name)) for path in readable if path.is_file()]
    if not files:
        raise InputNotFoundError(f"--input {str(folder)!r}: expected a folder with files of {READABLE}, found none")
    return files


def input_file(name: str, path: Path) -> InputFile:
    """One local file of a plan.

    Raises:
        SourceError: it cannot be read, or is of a kind that is not.
    """
    kind = format_of(path.name)
    if kind is None:
        raise SourceError(f"{path}: expected a file of one of {READABLE}; convert it")
    if any("\ud800" <= character <= "\udfff" for character in name):
        raise SourceError(f"{str(path)!r}: expected a name in UTF-8, found other bytes; rename the file")
    try:
        size_bytes, digest = content_digest(path)
    except OSError as error:
        raise SourceError(f"{path}: cannot be read: {error.strerror or error}") from error
    return InputFile(name=name, location=str(path), format=kind, size_bytes=size_bytes, digest=digest)


def content_digest(path: Path) -> tuple[int, str]:
    """Size in bytes, and a sha256 over size, first and last 64 KiB."""
    with path.open("rb") as stream:
        size_bytes = os.fstat(stream.fileno()).st_size
        digest = hashlib.sha256(f"{size_bytes}\n".encode())
        for part in _edges(size_bytes):
            stream.seek(part)
            digest.update(stream.read(_DIGEST_EDGE_BYTES))
    return size_bytes, digest.hexdigest()


def _edges(size_bytes: int) -> Iterable[int]:
    return (0,) if size_bytes <= _DIGEST_EDGE_BYTES else (0, size_bytes - _DIGEST_EDGE_BYTES)


PYTHON_DOCS = SourceSpec(
    name="python-docs", text_field="text", target_shards=0, priority=1000, enabled=False, merges=1000
)
"""Not one of the five sources of sources.json, whose merges shares alone sum to 31,734. In an empty store it learns
the whole vocabulary, as any first source does; populated later it adds 1,000 merges. ``target_shards`` 0 means none:
it is read to its end."""

_LEFT_OUT = frozenset({"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"})


def python_docs_plan(spec: SourceSpec = PYTHON_DOCS) -> InputPlan:
    """The plan over the standard library's files.

    Raises:
        InputNotFoundError: this Python has its library in a zip file, or none, or filters leave nothing of it.
    """
    library, filters = Path(sysconfig.get_path("stdlib")), Filters.of(spec)
    names = sorted(filter(filters.allow, _modules(library)), key=natural_key)
    if not names:
        filtered = f" that fit {filters}" if str(filters) else ""
        raise InputNotFoundError(
            f"{spec.name}: expected .py files in {library}, found none{filtered}; use another Python or --input"
        )
    files = tuple(input_file(name, library / name) for name in names)
    return InputPlan(source=spec.name, text_field=spec.text_field, files=files)


def _modules(library: Path) -> Iterator[str]:
    for parent, folders, names in os.walk(library):
        folders[:] = [name for name in folders if name not in _LEFT_OUT]
        relative = Path(parent).relative_to(library)
        yield from ((relative / name).as_posix() for name in names if name.endswith(".py"))


def resolve(spec: SourceSpec, inputs: Sequence[str] = (), *, pinned_revision: str | None = None) -> InputPlan:
    """The plan of a source.

    Args:
        spec: the source.
        inputs: what to read instead of the source's own files, as `input_plan` takes it.
        pinned_revision: the commit a checkpoint's cursor stands in; the Hub's files are taken from exactly it,
            whatever the branch holds by now. None: the spec's ``revision``, resolved to a commit here.

    Raises:
        InputNotFoundError: no file matches, or repository or revision do not exist.
        SourceError: a file is of a kind that is not read, or the Hub refuses or cannot be reached.
    """
    if inputs:
        return input_plan(spec, inputs)
    if spec.hf_path is not None:
        from genesis.sources.hub import hub_plan

        return hub_plan(spec, pinned_revision=pinned_revision)
    if spec.name == PYTHON_DOCS.name:
        return python_docs_plan(spec)
    raise InputNotFoundError(
        f"{spec.name}: expected hf_path in sources.json or files to read, found neither; give --input, or "
        "--source hf://owner/name"
    )


def check_repository(spec: SourceSpec, inputs: Sequence[str], cursor: Cursor | None) -> None:
    """Checks that a checkpoint stands in the source's own repository, before its commit is looked for there.

    Raises:
        InputChangedError: it stands in another, or in files given with ``--input``.
    """
    expected = "" if inputs else spec.hf_path or ""
    if cursor is None or cursor.repo == expected:
        return
    stands_in = f"{cursor.repo}@{cursor.revision[:12]} of the Hub" if cursor.repo else "files given with --input"
    given = f"{expected} of the Hub" if expected else "files"
    raise InputChangedError(
        f"{spec.name}: the checkpoint stands in {stands_in}, the input now is {given}; give the same input as before, "
        "or another --name for a source of its own"
    )
