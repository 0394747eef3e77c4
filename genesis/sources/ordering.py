"""The order of a source's files, and the patterns that choose them.

The order is *natural*: folder by folder, and within a name a run of digits counts as a number, so ``chunk2`` comes
before ``chunk10`` and SlimPajama's ``example_train_9`` before ``example_train_10``. It is a function of the names
alone (never of the file system's own order, a locale or an absolute prefix), so every machine agrees on it.
"""

from __future__ import annotations

import re
from fnmatch import fnmatchcase

__all__ = ["fixed_folder", "is_pattern", "matches", "natural_key"]

_DIGITS = re.compile("([0-9]+)")
_MAGIC = re.compile(r"[*?\[]")

NaturalKey = tuple[tuple[tuple[str, int], ...], ...]


def natural_key(name: str) -> tuple[NaturalKey, str]:
    """Sort key of a relative name with ``/`` between folders; equal only for equal names."""
    return tuple(_component_key(part) for part in name.split("/")), name


def _component_key(part: str) -> tuple[tuple[str, int], ...]:
    pieces = _DIGITS.split(part)
    numbers = [int(digits) for digits in pieces[1::2]]
    return tuple(zip(pieces[0::2], [*numbers, -1], strict=True))


def is_pattern(text: str) -> bool:
    """Whether the text holds a wildcard."""
    return _MAGIC.search(text) is not None


def fixed_folder(pattern: str) -> str:
    """The folder every match of the pattern lies in; empty for the top."""
    folders = pattern.split("/")[:-1]
    fixed: list[str] = []
    for folder in folders:
        if is_pattern(folder):
            break
        fixed.append(folder)
    return "/".join(fixed)


def matches(path: str, pattern: str) -> bool:
    """Whether a path is what the pattern means: ``*`` stays within a folder, ``**`` crosses any number of them."""
    return _matches(path.split("/"), pattern.split("/"))


def _matches(parts: list[str], patterns: list[str]) -> bool:
    if not patterns:
        return not parts
    if patterns[0] == "**":
        return any(_matches(parts[skipped:], patterns[1:]) for skipped in range(len(parts) + 1))
    return bool(parts) and fnmatchcase(parts[0], patterns[0]) and _matches(parts[1:], patterns[1:])
