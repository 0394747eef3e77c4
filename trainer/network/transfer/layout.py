"""How a snapshot lies on disk, for all who read or write one; apart, so that a donor needs no torch.

{directory}/{digest}/descriptor.json   what it holds
{directory}/{digest}/pages             SHA-256 of each chunk, 32 bytes each
{directory}/{digest}/data              the tensors' bytes
"""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["DATA_NAME", "DESCRIPTOR_NAME", "PAGES_NAME", "publish", "snapshots_in"]

DESCRIPTOR_NAME, PAGES_NAME, DATA_NAME = "descriptor.json", "pages", "data"


def snapshots_in(directory: str | os.PathLike[str]) -> list[str]:
    """Digests of the whole snapshots, the newest first."""
    folder = Path(directory)
    if not folder.is_dir():
        return []
    found = [path for path in folder.iterdir() if len(path.name) == 64 and (path / DESCRIPTOR_NAME).is_file()]
    return [path.name for path in sorted(found, key=lambda path: path.stat().st_mtime_ns, reverse=True)]


def publish(draft: Path, target: Path) -> None:
    """Gives a draft, whose files are synced, its name; if the snapshot is there already, that becomes the newest.

    Raises:
        OSError: it cannot be renamed.
    """
    os.utime(draft)
    try:
        draft.rename(target)
    except OSError:
        if not (target / DESCRIPTOR_NAME).is_file():
            raise
        os.utime(target)
    descriptor = os.open(target.parent, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
