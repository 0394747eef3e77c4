"""Text sources: files (local, in buckets, behind web servers), the standard library's text, and the Hub's data sets.

`resolve` makes an `InputPlan`, `tasks` cuts it into what one worker reads at a time, `read_batches` reads a task. No
file is ever downloaded whole; memory stays at a few batches of 4 MB whatever the size of files, row groups and lists.
"""

from __future__ import annotations

from genesis.sources.base import (
    BATCH_BYTES,
    FileFormat,
    InputFile,
    InputPlan,
    LinesTask,
    RowGroupTask,
    Task,
    TextBatch,
    WholeFilesTask,
)
from genesis.sources.naming import SourceOptions, find_source
from genesis.sources.planning import PYTHON_DOCS, check_repository, resolve
from genesis.sources.reading import read_batches, tasks

__all__ = [
    "BATCH_BYTES",
    "PYTHON_DOCS",
    "FileFormat",
    "InputFile",
    "InputPlan",
    "LinesTask",
    "RowGroupTask",
    "SourceOptions",
    "Task",
    "TextBatch",
    "WholeFilesTask",
    "check_repository",
    "find_source",
    "read_batches",
    "resolve",
    "tasks",
]
