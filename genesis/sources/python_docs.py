"""``python-docs``: the text of the running Python's own standard library, a real text on every machine.

It needs no network and no account, so a first run works anywhere. One document a ``.py`` file; tests and the
packages installed beside the library are left out. Some 12 MB in 730 files for CPython 3.11. Another Python has other
text: a checkpoint made with it says so (`InputChangedError`).
"""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from genesis.errors import InputNotFoundError
from genesis.sources.base import InputPlan, natural_key
from genesis.sources.local import input_file
from manifests import SourceSpec

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
