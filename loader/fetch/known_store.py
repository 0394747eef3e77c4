"""What this machine remembers of a store: its believed manifest and index, in a folder beside the cached shards.

What is written here was checked before; what is read is held against its digest, so a damaged file is as good as none.
Nothing here is needed to go on: a folder that cannot be written only costs the next start some requests.
"""

from __future__ import annotations

import logging
import os
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from manifests import MANIFEST_KEY, sha256_hex

__all__ = ["KnownStore"]

logger = logging.getLogger(__name__)

_FORMAT: Final = 1
"""Of everything in the folder, and of the checks it passed: another one is another folder."""


@dataclass(frozen=True, slots=True)
class KnownStore:
    """The folder of one store."""

    folder: Path

    @classmethod
    def of(cls, cache_dir: Path, address: str) -> KnownStore:
        """The folder of the store at ``address``."""
        return cls(cache_dir / "stores" / f"{sha256_hex(address.encode())[:16]}-v{_FORMAT}")

    @classmethod
    def all(cls, cache_dir: Path) -> list[KnownStore]:
        """Every store that is remembered beside a cache."""
        with suppress(OSError):
            return [cls(folder) for folder in sorted((cache_dir / "stores").iterdir()) if folder.is_dir()]
        return []

    def index_bytes(self) -> int:
        """What the store's index takes here; the manifest, which guards against older ones, is not counted."""
        with suppress(OSError):
            return sum(path.stat().st_size for path in self.folder.iterdir() if path.name != MANIFEST_KEY)
        return 0

    def read(self, name: str) -> bytes | None:
        """A file's bytes; None if it is not there or cannot be read."""
        try:
            return (self.folder / name).read_bytes()
        except OSError:
            return None

    def write(self, name: str, body: bytes) -> None:
        """Keeps a file, all or nothing."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            descriptor, temporary = tempfile.mkstemp(dir=self.folder, prefix=".", suffix=".tmp")
        except OSError as error:
            logger.debug("%s: %s", self.folder, error)
            return
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(body)
            Path(temporary).replace(self.folder / name)
        except OSError as error:
            logger.debug("%s: %s", self.folder / name, error)
            with suppress(OSError):
                Path(temporary).unlink()

    def keep_only(self, names: frozenset[str]) -> None:
        """Removes what no manifest names any more."""
        with suppress(OSError):
            for path in self.folder.iterdir():
                if path.name not in names and not path.name.startswith("."):
                    path.unlink(missing_ok=True)
