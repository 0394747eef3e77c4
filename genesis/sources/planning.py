"""From a source's name to its plan: which files, in which order, at which revision.

Three kinds of input give the same `InputPlan`: local files (``--input``), the built-in ``python-docs``, and a dataset
repository on the Hub. `huggingface_hub` is imported only for the last: it costs 0.3 s that a local run does not pay.

``python-docs`` is the text of the running Python's own standard library, a real text on every machine: a first run
needs no network and no account. One document a ``.py`` file; tests and the packages installed beside the library are
left out. Some 12 MB in 730 files for CPython 3.11. Another Python has other text: a checkpoint made with it says so
(`InputChangedError`).

Local names in the plan are relative to the folder all files have in common, so a copy of the data elsewhere, or the
same folder given as a relative path, is the same input to a checkpoint. The price: adding files in a *new* folder
beside the old one changes what is common, and so every name; add files inside the folder that is there, or begin with
the folder above. A digest is of the size and the first and last 64 KiB: it sees every appended, cut or rewritten file
without reading terabytes, and not a change in the middle that keeps the size.
"""

from __future__ import annotations

import glob
import hashlib
import os
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from urllib.parse import unquote

from genesis.errors import InputNotFoundError, SourceError, UnknownSourceError
from genesis.sources.base import InputFile, InputPlan, is_pattern, natural_key
from genesis.sources.opening import READABLE, format_of
from manifests import SourcesFile, SourceSpec

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


PYTHON_DOCS = SourceSpec(
    name="python-docs", text_field="text", target_shards=0, priority=1000, enabled=False, merges=1000
)
"""Not one of the five sources of sources.json, whose merges shares alone sum to 31,734. In an empty store it learns
the whole vocabulary, as any first source does; populated later it adds 1,000 merges. ``target_shards`` 0 means none:
it is read to its end."""

_LEFT_OUT = frozenset({"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"})


def python_docs_plan() -> InputPlan:
    """The plan over the standard library's files.

    Raises:
        InputNotFoundError: this Python has its library in a zip file, or none.
    """
    library = Path(sysconfig.get_path("stdlib"))
    names = sorted(_modules(library), key=natural_key)
    if not names:
        raise InputNotFoundError(
            f"python-docs: expected .py files in {library}, found none; use another Python or --input"
        )
    files = tuple(input_file(name, library / name) for name in names)
    return InputPlan(source=PYTHON_DOCS.name, text_field=PYTHON_DOCS.text_field, files=files)


def _modules(library: Path) -> Iterator[str]:
    for parent, folders, names in os.walk(library):
        folders[:] = [name for name in folders if name not in _LEFT_OUT]
        relative = Path(parent).relative_to(library)
        yield from ((relative / name).as_posix() for name in names if name.endswith(".py"))


def find_source(name: str, sources_file: SourcesFile) -> SourceSpec:
    """The source of that name, of the file or built in (a file's own ``python-docs`` goes before the built-in).

    Raises:
        UnknownSourceError: there is none; the message lists those there are.
    """
    spec = sources_file.get(name) or (PYTHON_DOCS if name == PYTHON_DOCS.name else None)
    if spec is None:
        known = ", ".join(sorted({source.name for source in sources_file.sources} | {PYTHON_DOCS.name}))
        raise UnknownSourceError(f"no source is named {name!r}; known: {known}; add others to sources.json")
    return spec


def resolve(spec: SourceSpec, inputs: Sequence[str] = (), *, pinned_revision: str | None = None) -> InputPlan:
    """The plan of a source.

    Args:
        spec: the source.
        inputs: local files, folders or glob patterns to read instead of the source's own files.
        pinned_revision: the commit a checkpoint's cursor stands in; the Hub's files are taken from exactly it,
            whatever the branch holds by now. None: the spec's ``revision``, resolved to a commit here.

    Raises:
        InputNotFoundError: no file matches, or repository or revision do not exist.
        SourceError: a file is of a kind that is not read, or the Hub refuses or cannot be reached.
    """
    if inputs:
        return local_plan(spec.name, spec.text_field, inputs)
    if spec.hf_path is not None:
        from genesis.sources.hub import hub_plan

        return hub_plan(spec, pinned_revision=pinned_revision)
    if spec.name == PYTHON_DOCS.name:
        return python_docs_plan()
    raise InputNotFoundError(
        f"{spec.name}: expected hf_path in sources.json or local files, found neither; give --input"
    )
