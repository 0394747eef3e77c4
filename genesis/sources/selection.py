"""Which of the files that an input holds are documents: README and hidden files are not, and filters say the rest.

Inside a folder, a bucket's prefix or a repository, and among what a pattern matches, three kinds of file are left out
unless they are asked for, since they describe the text instead of being it: hidden ones (``.name``, and all below a
hidden folder), ``README`` files, and ``.md`` files. A pattern or ``--include`` asks for them by saying so: ``.*``,
``README*``, ``*.md``. A file that is given by its own name is always read.

``--include`` and ``--exclude`` look at a file's name below the input that named it, and at its last part alone, with
`fnmatch` (``*`` crosses folders). They are recorded nowhere: what they change shows in the fingerprint of the files, so
a filter that changes what was already read is refused, and one that changes what comes later is not.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Literal, Self

from genesis.sources.base import fixed_folder
from manifests import SourceSpec

Kind = Literal["local", "s3", "https"]


@dataclass(frozen=True, slots=True)
class Candidate:
    """A file that an input names, before it is known whether it is read."""

    kind: Kind
    path: str
    """The whole path: ``/absolute/path``, ``bucket/key``, ``host/path``; its plan name is a part of it."""
    relative: str
    """The name below the folder of the input; what filters look at."""
    location: str = field(repr=False)
    """As in `genesis.sources.base.InputFile`."""
    asked_for: bool
    """Read though it is a README, say."""
    size_bytes: int | None = None
    """None: not known without looking."""
    digest: str = ""


@dataclass(frozen=True, slots=True)
class Filters:
    """``--include`` and ``--exclude``."""

    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()

    @classmethod
    def of(cls, spec: SourceSpec) -> Self:
        """Those of a source."""
        return cls(spec.include, spec.exclude)

    def allow(self, name: str) -> bool:
        """Whether a file of that name is read."""
        wanted = not self.include or _fits_any(name, self.include)
        return wanted and not _fits_any(name, self.exclude)

    def asks_for(self, name: str) -> bool:
        """Whether ``--include`` asks for a file that would be left out."""
        return any(_fits(name, pattern) and asks_for(pattern, name) for pattern in self.include)

    def __str__(self) -> str:
        given = [("--include", pattern) for pattern in self.include]
        given += [("--exclude", pattern) for pattern in self.exclude]
        return " ".join(f"{option} {pattern!r}" for option, pattern in given)


def left_out(name: str) -> bool:
    """Whether a file of that name below an input is no document unless it is asked for."""
    return _is_hidden(name) or _is_readme(name) or _is_markdown(name)


def asks_for(pattern: str, name: str) -> bool:
    """Whether a pattern that matches a file says that it means such files too.

    Args:
        pattern: of an input, a data file or ``--include``.
        name: the file's, below the folder of the input.
    """
    said = pattern.rpartition("/")[2]
    below = name.removeprefix(f"{fixed_folder(pattern)}/")
    if _is_hidden(below) and not (said.startswith(".") and not _is_hidden(below.rpartition("/")[0])):
        return False
    if _is_readme(name) and said.lower().startswith("readme"):
        return True
    return _is_markdown(said) if _is_markdown(name) else not _is_readme(name)


def _is_hidden(name: str) -> bool:
    return any(part.startswith(".") for part in name.split("/"))


def _is_readme(name: str) -> bool:
    return name.rpartition("/")[2].lower().partition(".")[0] == "readme"


def _is_markdown(name: str) -> bool:
    return name.lower().endswith(".md")


def _fits(name: str, pattern: str) -> bool:
    return fnmatchcase(name, pattern) or fnmatchcase(name.rpartition("/")[2], pattern)


def _fits_any(name: str, patterns: tuple[str, ...]) -> bool:
    return any(_fits(name, pattern) for pattern in patterns)


def plan_names(candidates: Iterable[Candidate]) -> dict[tuple[Kind, str], str]:
    """The name in the plan for each (kind, path): the path below the folder that all of its kind have in common.

    Where files of several kinds come together, each name begins with its kind.
    """
    by_kind: dict[Kind, set[str]] = {}
    for candidate in candidates:
        by_kind.setdefault(candidate.kind, set()).add(candidate.path)
    names: dict[tuple[Kind, str], str] = {}
    for kind, paths in by_kind.items():
        depth = _common_depth([path.split("/")[:-1] for path in paths])
        for path in paths:
            name = "/".join(path.split("/")[depth:])
            names[kind, path] = f"{kind}/{name}" if len(by_kind) > 1 else name
    return names


def _common_depth(folders: list[list[str]]) -> int:
    first, last = min(folders), max(folders)
    depth = 0
    while depth < min(len(first), len(last)) and first[depth] == last[depth]:
        depth += 1
    return depth
