"""Files of a vocabulary on the local disk, written so that they are there whole or not at all."""

from __future__ import annotations

from pathlib import Path

from genesis.store.durable import TemporaryFile, make_folders, sync_folder
from genesis.store.folder import folder_errors

__all__ = ["write_file"]


def write_file(path: Path, body: bytes) -> None:
    """Puts ``body`` at ``path``: the old file or the new one is there at any moment, and the new one is durable.

    Raises:
        StoreError: it cannot be written; the message says why.
    """
    with folder_errors(path.parent, f"write {path}", size_bytes=len(body)):
        make_folders(path.parent)
        with TemporaryFile(path.parent) as file:
            file.write(memoryview(body))
            file.replace(path)
        sync_folder(path.parent)
