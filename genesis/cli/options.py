"""Options that several commands share."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from genesis.errors import UsageError
from manifests import SourcesFile, builtin_sources


def default_store() -> str:
    """Where a store is unless ``--store`` or ``GENESIS_STORE`` says otherwise."""
    return os.environ.get("GENESIS_STORE") or str(Path("~/.neuroshard/genesis-store").expanduser())


StoreOption = Annotated[
    str,
    typer.Option(
        "--store",
        default_factory=default_store,
        show_default="$GENESIS_STORE or ~/.neuroshard/genesis-store",
        help="The store: a folder, s3://bucket/prefix or, for reading, http(s)://host/path.",
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object (docs/status.md) instead of text.")]
SourcesOption = Annotated[
    Path | None,
    typer.Option("--sources-file", envvar="GENESIS_SOURCES", help="A sources.json instead of the built-in one."),
]


def load_sources(path: Path | None) -> SourcesFile:
    """The sources of ``path``, or the built-in ones.

    Raises:
        UsageError: the file cannot be read.
        ContractError: it is not a sources.json.
    """
    if path is None:
        return builtin_sources()
    try:
        return SourcesFile.from_json(path.read_bytes(), name=str(path))
    except OSError as error:
        raise UsageError(f"--sources-file {path}: {error.strerror}") from None
