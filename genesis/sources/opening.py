"""Opens an `InputFile` wherever it is: for reading from end to end, or at random."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, cast

from genesis.errors import InputChangedError, InputNotFoundError, SourceError
from genesis.sources.base import InputFile
from genesis.sources.read_ahead import read_ahead

__all__ = ["is_remote", "open_file", "read_all", "stream"]

_CHUNK_BYTES = 1 << 20


def is_remote(file: InputFile) -> bool:
    """Whether the file is on the Hub."""
    return file.location.startswith("hf://")


def open_file(file: InputFile) -> BinaryIO:
    """The file for reading at random; unbuffered, the caller closes it.

    Raises:
        InputNotFoundError: it is gone.
        SourceError: it cannot be read.
    """
    if is_remote(file):
        from genesis.sources.hub_client import HubRetryPolicy
        from genesis.sources.hub_file import HubFile, HubReader

        return cast("BinaryIO", HubFile(HubReader(file, HubRetryPolicy.from_environment())))
    try:
        return cast("BinaryIO", io.FileIO(file.location, "rb"))
    except FileNotFoundError as error:
        raise InputNotFoundError(f"{file.name}: {file.location} is gone; it was there when the run began") from error
    except OSError as error:
        raise SourceError(f"{file.name}: {file.location} cannot be read: {error.strerror or error}") from error


def stream(file: InputFile) -> Iterator[bytes | bytearray]:
    """The file's bytes from the first to the last, in pieces of 1 MiB (local) or one range (Hub).

    Raises:
        InputNotFoundError: it is gone.
        SourceError: it cannot be read.
    """
    if is_remote(file):
        from genesis.sources.hub_client import HubRetryPolicy
        from genesis.sources.hub_file import HubReader

        yield from read_ahead(HubReader(file, HubRetryPolicy.from_environment()).windows())
        return
    with open_file(file) as opened:
        try:
            while piece := opened.read(_CHUNK_BYTES):
                yield piece
        except OSError as error:
            raise SourceError(
                f"{file.name}: {Path(file.location)} cannot be read: {error.strerror or error}"
            ) from error


def read_all(file: InputFile) -> bytes:
    """The whole file.

    Raises:
        InputChangedError: it is not as long as when the plan was made.
        SourceError: it cannot be read.
    """
    data = b"".join(stream(file))
    if len(data) != file.size_bytes:
        raise InputChangedError(
            f"{file.name}: expected {file.size_bytes} bytes, found {len(data)}; it changed during the run: run it again"
        )
    return data
