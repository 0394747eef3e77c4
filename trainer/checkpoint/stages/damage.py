"""What is wrong with a file that should be a checkpoint, in words, as far as can be seen without reading its tensors.

torch names the error of its own that damage leads to ("mmap can only be used with …"), or reads on for ever where the
name leads to a device; a person is to learn whether to look for the disk, for a copy cut short, or for a stray folder.
"""

from __future__ import annotations

import stat
import zipfile
from pathlib import Path

__all__ = ["what_is_wrong"]


def what_is_wrong(path: Path) -> str:
    """What there is in a whole checkpoint's place; empty: an archive, as a checkpoint is one."""
    try:
        status = path.stat()
        if stat.S_ISDIR(status.st_mode):
            return "a folder"
        if not stat.S_ISREG(status.st_mode):
            return "a device or pipe"
        if not status.st_size:
            return "an empty file"
        with path.open("rb") as file:
            begin = file.read(len(_ARCHIVE))
            if zipfile.is_zipfile(file):
                return ""
    except FileNotFoundError:
        return "a link that leads nowhere" if path.is_symlink() else "no file any more"
    except OSError as error:
        return f"a file that cannot be read ({error.strerror})"
    if begin == _ARCHIVE:
        return f"one cut short, of {status.st_size:,} bytes"
    return "a file of another kind"


_ARCHIVE = b"PK\x03\x04"
