"""Which file is read how, told by its name alone.

A name decides, not the first bytes: a plan over 60,000 files must not open them, and a file whose name and content
disagree is reported when its turn comes, with its position.
"""

from __future__ import annotations

from enum import Enum

from genesis.sources.base import FileFormat

__all__ = ["READABLE", "Codec", "codec_of", "format_of"]


class Codec(Enum):
    """How the bytes of a file of lines are compressed."""

    NONE = "none"
    ZSTD = "zstd"
    GZIP = "gzip"


_CODECS = {".zst": Codec.ZSTD, ".gz": Codec.GZIP}
_FORMATS = {
    ".parquet": FileFormat.PARQUET,
    **{stem + codec: FileFormat.JSON_LINES for stem in (".jsonl", ".json") for codec in ("", *_CODECS)},
    ".txt": FileFormat.WHOLE_FILE,
    ".py": FileFormat.WHOLE_FILE,
}

READABLE = ".parquet, .jsonl, .jsonl.zst, .jsonl.gz, .json, .json.zst, .json.gz, .txt, .py"
"""What `format_of` knows, as error messages list it."""


def format_of(name: str) -> FileFormat | None:
    """How the file of that name is read, or None if it is not."""
    lowered = name.lower()
    return next((kind for suffix, kind in _FORMATS.items() if lowered.endswith(suffix)), None)


def codec_of(name: str) -> Codec:
    """How the file of that name is compressed."""
    lowered = name.lower()
    return next((codec for suffix, codec in _CODECS.items() if lowered.endswith(suffix)), Codec.NONE)
