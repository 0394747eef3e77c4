"""Local input: files, folders and glob patterns become a plan.

Names in the plan are relative to the folder all files have in common, so a copy of the data elsewhere, or the same
folder given as a relative path, is the same input to a checkpoint. The price: adding files in a *new* folder beside
the old one changes what is common, and so every name; add files inside the folder that is there, or begin with the
folder above. A digest is of the size and the first and last 64 KiB: it sees every appended, cut or rewritten file
without reading terabytes, and not a change in the middle that keeps the size.
"""

from __future__ import annotations

import glob
import hashlib
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from urllib.parse import unquote

from genesis.errors import InputNotFoundError, SourceError
from genesis.sources.base import InputFile, InputPlan, is_pattern, natural_key
from genesis.sources.opening import READABLE, format_of

_DIGEST_EDGE_BYTES = 64 << 10


def local_plan(source: str, text_field: str, inputs: Sequence[str]) -> InputPlan:
    """The plan of a source read from local files.

    Args:
        source: the source's name.
        text_field: column or JSON field that holds the text.
        inputs: paths of files or folders, or glob patterns (``**`` crosses folders), absolute or relative; ``~`` is
            expanded. A file that several of them name is read once. A folder means every readable file below it.

    Raises:
        InputNotFoundError: an input matches nothing; the message names it.
        SourceError: a named file is of a kind that is not read.
    """
    paths = sorted({path for text in inputs for path in _expand(text)})
    if not paths:
        raise InputNotFoundError(
            f"{source}: expected at least one input file, found none; give --input a path or pattern"
        )
    folder = Path(os.path.commonpath([path.parent for path in paths]))
    named = sorted(
        ((path.relative_to(folder).as_posix(), path) for path in paths), key=lambda pair: natural_key(pair[0])
    )
    files = tuple(input_file(name, path) for name, path in named)
    return InputPlan(source=source, text_field=text_field, files=files)


def _expand(text: str) -> list[Path]:
    """The files an input means, as absolute paths (symbolic links not followed, so names stay the user's)."""
    text = unquote(text.removeprefix("file://")) if text.startswith("file:///") else text
    path = Path(os.path.abspath(Path(text).expanduser()))  # noqa: PTH100  Path.resolve would follow links
    if path.is_dir():
        return _below(path)
    if path.is_file():
        return [_readable(path)]
    found = [Path(match) for match in glob.glob(str(path), recursive=True)] if is_pattern(str(path)) else []  # noqa: PTH207
    files = [_readable(match) for match in found if match.is_file()]
    for folder in found:
        if folder.is_dir() and not _ends_in_any_depth(text):
            files += _below(folder)
    if not files:
        raise InputNotFoundError(
            f"--input {text!r}: no such file, and nothing matches it (looked in {_searched(path)})"
        )
    return files


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


def _below(folder: Path) -> list[Path]:
    """Readable files of a folder, at any depth; hidden files and folders are left out."""
    files: list[Path] = []
    for parent, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        files += [Path(parent, name) for name in names if not name.startswith(".") and format_of(name) is not None]
    if not files:
        raise InputNotFoundError(f"--input {str(folder)!r}: expected a folder with files of {READABLE}, found none")
    return files


def _readable(path: Path) -> Path:
    if format_of(path.name) is None:
        raise SourceError(
            f"{path}: expected a file of one of {READABLE}, found {path.suffix or 'no extension'!r}; convert it"
        )
    return path


def input_file(name: str, path: Path) -> InputFile:
    """One local file of a plan.

    Raises:
        SourceError: it cannot be read, or is of a kind that is not.
    """
    kind = format_of(path.name)
    if kind is None:
        raise SourceError(f"{path}: expected a file of one of {READABLE}; convert it")
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
